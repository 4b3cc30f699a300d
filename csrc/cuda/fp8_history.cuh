// The history of a tensor that is quantised, in a kernel: read for the scale, and moved on at the end.
#pragma once

#include "../fp8.h"
#include "common/random_delay.cuh"
#include "common/reduce.cuh"

namespace gptkernels::cuda {

// The value with its infinities made NaN, which FiniteMax ignores and float8 has.
__device__ inline float finite_or_nan(float x) {
  return fmaf(x, 0.0f, x);
}

// The bits of floats that are not negative have the order of whole numbers.
__device__ inline int32_t history_largest(const int32_t* history) {
  int32_t bits = 0;
  if (history)
#pragma unroll
    for (int i = 0; i < kFp8Calls; ++i) bits = max(bits, history[i]);
  return bits;
}

// The largest over a block of kWarps warps, which may have two dimensions; in its first thread.
template <int kWarps>
__device__ float block_largest(float magnitude) {
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

// The last block to come here moves the history on.
__device__ inline void note_largest(int32_t* history, int32_t bits) {
  int32_t* under_way = history + kFp8Calls;
  atomicMax(under_way, bits);
  __threadfence();
  random_delay();
  const int32_t blocks = static_cast<int32_t>(gridDim.x * gridDim.y);
  if (atomicAdd(under_way + 1, 1) != blocks - 1) return;
  __threadfence();
  int32_t calls[kFp8Calls];
#pragma unroll
  for (int i = 1; i < kFp8Calls; ++i) calls[i - 1] = history[i];
  calls[kFp8Calls - 1] = atomicExch(under_way, 0);
#pragma unroll
  for (int i = 0; i < kFp8Calls; ++i) history[i] = calls[i];
  under_way[1] = 0;
}

}  // namespace gptkernels::cuda
