// Far biases: values of an additive mask that are so low that adding a score to them rounds the score away. An example
// is torch.finfo(torch.float32).min, which Hugging Face's masks contain instead of -inf. If all biases of a query are
// far, its probabilities are uniform over the keys with the largest bias. (sm90/block_mask.cuh describes how the
// kernels for sm_90a treat such biases.)
//
// The kernels compute scores in units of log2, that is, multiplied by log2(e). A far bias times log2(e) may overflow to
// -inf, which would hide the key. Therefore half of the bias replaces the score. Halving keeps the order of far biases,
// and half of a far bias is still below every ordinary score.
#pragma once

#include "cuda/common/approximate.cuh"

namespace gptkernels::cuda {

constexpr float kFarBias = -0x1p100f;  // a bias at or below this value is far

// Returns score + bias in units of log2, or half of a far bias. `score` is in units of log2, `bias` is not.
__device__ inline float add_bias(float score, float bias) {
  return bias <= kFarBias ? 0.5f * bias : fmaf(bias, kLog2E, score);
}

// Returns the natural logsumexp of scores that are given in units of log2. `maximum` is the largest score, and `sum` is
// the sum of exp2(score - maximum). `has_bias` says whether the scores include an additive mask.
__device__ inline float logsumexp_of(float maximum, float sum, bool has_bias) {
  return has_bias && maximum <= 0.5f * kFarBias ? 2 * maximum : fmaf(maximum, kLn2, logf(sum));
}

// Converts a logsumexp to the value that the backward subtracts from scores in units of log2. If all biases are far,
// the logsumexp does not include log(number of keys); logsumexp_correction() corrects the probabilities for this.
__device__ inline float in_units_of_log2(float logsumexp, bool has_bias) {
  return has_bias && logsumexp <= kFarBias ? 0.5f * logsumexp : logsumexp * kLog2E;
}

}  // namespace gptkernels::cuda
