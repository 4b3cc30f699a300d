// Far biases: values of an additive mask so low that adding a score rounds the score away, such as
// torch.finfo(torch.float32).min in Hugging Face's masks. If all biases of a query are far, its probabilities are
// uniform over the keys with the largest bias. The kernels for sm_90a use sm90/block_mask.cuh instead.
//
// Scores are multiplied by log2(e) ("in units of log2"). A far bias times log2(e) may overflow to -inf, which would
// hide the key, so half of the bias replaces the score. This keeps the order of far biases.
#pragma once

#include "cuda/common/approximate.cuh"

namespace gptkernels::cuda {

constexpr float kFarBias = -0x1p100f;

// `score` and the result are in units of log2, `bias` is not.
__device__ inline float add_bias(float score, float bias) {
  return bias <= kFarBias ? 0.5f * bias : fmaf(bias, kLog2E, score);
}

// `maximum` is the largest score, in units of log2; `sum` is the sum of exp2(score - maximum).
__device__ inline float logsumexp_of(float maximum, float sum, bool has_bias) {
  return has_bias && maximum <= 0.5f * kFarBias ? 2 * maximum : fmaf(maximum, kLn2, logf(sum));
}

// The logsumexp of a query whose biases are all far lacks the log of the number of keys with the largest bias;
// logsumexp_correction() corrects for this.
__device__ inline float in_units_of_log2(float logsumexp, bool has_bias) {
  return has_bias && logsumexp <= kFarBias ? 0.5f * logsumexp : logsumexp * kLog2E;
}

}  // namespace gptkernels::cuda
