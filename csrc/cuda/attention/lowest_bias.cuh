// Additive masks may have values so low that a score that is added to them is rounded away, for example
// torch.finfo(torch.float32).min, which Hugging Face's masks have instead of -inf. If a query has only such values, its
// probabilities are uniform over the keys of the largest one. (The kernels for sm_90a read bits instead:
// sm90/block_mask.cuh.)
//
// Such a value replaces the score. Scores are in units of log2, but a value that is multiplied by log2(e) may overflow
// to -inf, which hides the key. So it is halved: halves keep their order, and are as far from every other score.
#pragma once

#include "cuda/common/approximate.cuh"

namespace gptkernels::cuda {

constexpr float kFarBias = -0x1p100f;  // such values are this or lower

// Returns score + bias, in units of log2.
__device__ inline float add_bias(float score, float bias) {
  return bias <= kFarBias ? 0.5f * bias : fmaf(bias, kLog2E, score);
}

// Returns the logsumexp of scores in units of log2, the largest of which is `maximum`. With has_bias they include a
// mask's values.
__device__ inline float logsumexp_of(float maximum, float sum, bool has_bias) {
  return has_bias && maximum <= 0.5f * kFarBias ? 2 * maximum : fmaf(maximum, kLn2, logf(sum));
}

// Returns what the backward subtracts from scores in units of log2. The logsumexp of far scores does not contain the
// number of keys; logsumexp_correction() finds it from their sum.
__device__ inline float in_units_of_log2(float logsumexp, bool has_bias) {
  return has_bias && logsumexp <= kFarBias ? 0.5f * logsumexp : logsumexp * kLog2E;
}

}  // namespace gptkernels::cuda
