// Additive masks whose values are so low that no score is seen beside them, as torch.finfo(torch.float32).min, which
// Hugging Face's masks have for -inf. A query that has nothing but such values has uniform probabilities over the keys
// of the largest one. (The kernels for sm_90a have bits in place of them: attention/sm90/block_mask.cuh.)
//
// Such a value takes the score's place. In units of log2 it is halved, where others are multiplied by log2(e): the
// lowest number would become -inf, which hides the key. Halves keep their order, and are as far from every other score.
#pragma once

#include "cuda/common/approximate.cuh"

namespace gptkernels::cuda {

constexpr float kFarBias = -0x1p100f;  // and below

// score + bias, in units of log2.
__device__ inline float add_bias(float score, float bias) {
  return bias <= kFarBias ? 0.5f * bias : fmaf(bias, kLog2E, score);
}

// The logsumexp of scores in units of log2, the largest of which is `maximum`. `has_bias`: a mask is added to them.
__device__ inline float logsumexp_of(float maximum, float sum, bool has_bias) {
  return has_bias && maximum <= 0.5f * kFarBias ? 2 * maximum : fmaf(maximum, kLn2, logf(sum));
}

// What the backward subtracts from scores in units of log2. Of far scores it does not tell the number of keys: their
// sum does (logsumexp_correction).
__device__ inline float in_units_of_log2(float logsumexp, bool has_bias) {
  return has_bias && logsumexp <= kFarBias ? 0.5f * logsumexp : logsumexp * kLog2E;
}

}  // namespace gptkernels::cuda
