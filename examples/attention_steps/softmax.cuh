// The online softmax of steps 3 to 5, on the accumulators of the tensor cores. A thread has 32 of a warp's 16 x 64
// numbers: element 4 * j + 2 * r + i is in row lane / 4 + 8 * r, column 8 * j + 2 * (lane % 4) + i.
#pragma once

#include "cuda/common/approximate.cuh"
#include "problem.h"

constexpr int kAccumulators = 32;

struct OnlineSoftmax {
  float max[2] = {-INFINITY, -INFINITY};  // of the two rows so far
  float sum[2] = {0, 0};                  // of exp(kScale * (score - max)) in this thread

  // Replaces scores by exp(kScale * (score - max)), with one multiply-add and one power of 2 each. The caller must then
  // multiply its earlier sums by `rescale`. In the first tile each row must see a key.
  __device__ void add(float (&scores)[kAccumulators], float (&rescale)[2]) {
    constexpr float kFactor = kScale * gptkernels::cuda::kLog2E;
    for (int r = 0; r < 2; ++r) {
      float larger = max[r];
      for (int i = 2 * r; i < kAccumulators; i += 4) larger = fmaxf(larger, fmaxf(scores[i], scores[i + 1]));
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 1));
      larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 2));
      rescale[r] = gptkernels::cuda::exp2_approximately((max[r] - larger) * kFactor);
      max[r] = larger;
      sum[r] *= rescale[r];
      for (int i = 2 * r; i < kAccumulators; i += 4)
        for (int k = i; k < i + 2; ++k) {
          scores[k] = gptkernels::cuda::exp2_approximately(scores[k] * kFactor - larger * kFactor);
          sum[r] += scores[k];
        }
    }
  }

  // `query` is the warp's first query.
  __device__ void store(const Attention& p, int head, int query, const float (&out)[kAccumulators]) const {
    const int lane = threadIdx.x % 32;
    for (int r = 0; r < 2; ++r) {
      float total = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
      total += __shfl_xor_sync(~0u, total, 2);
      bfloat16* row = out_of(p, head, query + lane / 4 + 8 * r) + 2 * (lane % 4);
      for (int i = 2 * r; i < kAccumulators; i += 4)
        *reinterpret_cast<__nv_bfloat162*>(row + 2 * (i - 2 * r)) =
            __floats2bfloat162_rn(out[i] / total, out[i + 1] / total);
    }
  }
};

// `row` is the row of the warp's first query in the diagonal tile.
__device__ inline void mask_diagonal(float (&scores)[kAccumulators], int row) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < kAccumulators; ++i)
    if (i / 4 * 8 + 2 * (lane % 4) + i % 2 > row + lane / 4 + i / 2 % 2 * 8) scores[i] = -INFINITY;
}
