// Kernels compute a tensor's scale from its amax history (fp8.h), and update the history at their end.
#pragma once

#include "../../fp8.h"
#include "cuda/common/random_delay.cuh"
#include "cuda/common/reduce.cuh"

namespace gptkernels::cuda {

__device__ inline float finite_or_nan(float x) {
  return fmaf(x, 0.0f, x);
}

// The bits of nonnegative floats, as integers, have the order of the floats.
__device__ inline int32_t history_amax(const int32_t* history) {
  int32_t bits = 0;
  if (history)
#pragma unroll
    for (int i = 0; i < kFp8Calls; ++i) bits = max(bits, history[i]);
  return bits;
}

// Only the thread block's first thread gets the result.
template <int kWarps>
__device__ float block_amax(float magnitude) {
  __shared__ float warps[kWarps];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  magnitude = warp_reduce<FiniteMax>(magnitude);
  __syncthreads();
  if (thread % kWarp == 0) warps[thread / kWarp] = magnitude;
  __syncthreads();
  if (thread == 0)
    for (int i = 1; i < kWarps; ++i) magnitude = fmaxf(magnitude, warps[i]);
  return magnitude;
}

// One thread of every thread block calls this function with the bits of the thread block's amax. The last thread block
// to call it appends the grid's amax to the history, and resets the two working cells (fp8.h).
__device__ inline void update_history(int32_t* history, int32_t bits) {
  int32_t* in_progress = history + kFp8Calls;
  atomicMax(in_progress, bits);
  __threadfence();
  random_delay();
  const int32_t blocks = static_cast<int32_t>(gridDim.x * gridDim.y);
  if (atomicAdd(in_progress + 1, 1) != blocks - 1) return;
  __threadfence();
  int32_t calls[kFp8Calls];
#pragma unroll
  for (int i = 1; i < kFp8Calls; ++i) calls[i - 1] = history[i];
  calls[kFp8Calls - 1] = atomicExch(in_progress, 0);
#pragma unroll
  for (int i = 0; i < kFp8Calls; ++i) history[i] = calls[i];
  in_progress[1] = 0;
}

}  // namespace gptkernels::cuda
