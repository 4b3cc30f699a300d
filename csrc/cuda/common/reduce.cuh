// Sums and maxima over the threads of a warp, of a block, or of a row (the threads that share threadIdx.y). The order
// of the additions is fixed by the launch shape, so equal launches give equal bits.
#pragma once

#include <cstdint>

namespace gptkernels::cuda {

constexpr int kWarp = 32;

struct Sum {
  template <typename A>
  __device__ A operator()(A a, A b) const {
    return a + b;
  }
};

// Passes over NaNs, in one instruction.
struct FiniteMax {
  template <typename A>
  __device__ A operator()(A a, A b) const {
    return fmax(a, b);
  }
};

// Over kLanes neighbours, all of which get the result.
template <typename Op, int kLanes = kWarp, typename A>
__device__ A warp_reduce(A value, Op op = {}) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  return value;
}

// Adds up over a block of blockDim.x threads and gives every thread the sum. Every thread must call it.
template <typename A>
__device__ A block_sum(A value) {
  value = warp_reduce<Sum>(value);
  __shared__ A warps[kWarp];
  const int lane = threadIdx.x % kWarp;
  __syncthreads();  // the last sum's readers are done
  if (lane == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_reduce<Sum>(lane < static_cast<int>(blockDim.x) / kWarp ? warps[lane] : A(0));
}

// How many threads share a row, where a kernel is compiled for it: kWarp, or one of these two with blockDim.x known at
// the launch only. kBlock: the row is alone in its block. kPart: a block has several rows of several warps, each with a
// barrier of its own. CUDA has 15 of these a block to spare, and few blocks fit on a multiprocessor that ask for all:
// kPart is for kernels with one block a multiprocessor.
constexpr int kBlock = 0;
constexpr int kPart = -1;
constexpr int kMaxParts = 15;

template <int kThreads>
__device__ void row_barrier() {
  if constexpr (kThreads == kPart)
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
  else
    __syncthreads();
}

// Adds up kN values over threadIdx.x with one barrier. Sums that follow each other on different `slot`s, 0 and 1 in
// turn, need no second one: whoever writes to a slot has passed the other one's barrier, before which all had read it.
template <int kThreads, typename A, int kN>
__device__ void row_sums(A (&values)[kN], int slot) {
#pragma unroll
  for (int n = 0; n < kN; ++n) values[n] = warp_reduce<Sum>(values[n]);
  if constexpr (kThreads != kWarp) {
    if (blockDim.x == kWarp) return;
    __shared__ A warps[2][kWarp][kN];  // all the warps of a block, row after row
    const int row_warps = blockDim.x / kWarp;
    A(*row)[kN] = warps[slot] + threadIdx.y * row_warps;
    if (threadIdx.x % kWarp == 0)
#pragma unroll
      for (int n = 0; n < kN; ++n) row[threadIdx.x / kWarp][n] = values[n];
    row_barrier<kThreads>();
    // Every thread takes the few values from there by itself: a second round of shuffles would take longer.
#pragma unroll
    for (int n = 0; n < kN; ++n) values[n] = row[0][n];
#pragma unroll 4
    for (int warp = 1; warp < row_warps; ++warp)
#pragma unroll
      for (int n = 0; n < kN; ++n) values[n] += row[warp][n];
  }
}

}  // namespace gptkernels::cuda
