// Sums and maxima over the threads of a warp or of a block row (the threads that share threadIdx.y). The order of the
// additions is fixed by the launch shape, so equal launches give equal bits.
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

struct Max {
  template <typename A>
  __device__ A operator()(A a, A b) const {
    return a > b || a != a ? a : b;  // a NaN stays
  }
};

template <typename Op, typename A>
__device__ A warp_reduce(A value, Op op = {}) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  return value;
}

// Reduces over threadIdx.x and gives every thread the result. A row of one warp needs no shared memory and may have
// neighbours in y; a longer row must be alone in its block (blockDim.y == 1). Every thread must call it.
template <typename Op, typename A>
__device__ A row_reduce(A value, A identity, Op op = {}) {
  value = warp_reduce<Op>(value);
  if (blockDim.x == kWarp) return value;
  __shared__ A warps[kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  __syncthreads();  // the last reduction's readers are done
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  return warp_reduce<Op>(lane < static_cast<int>(blockDim.x) / kWarp ? warps[lane] : identity);
}

template <typename A>
__device__ A row_sum(A value) {
  return row_reduce<Sum>(value, A(0));
}

// Waits for the threads of this block row alone: its neighbours in y may be elsewhere. At most 15 rows of several warps
// a block, the barriers that CUDA leaves free.
__device__ inline void row_barrier() {
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}

constexpr int kMaxBlockRows = 15;

// Reduces kN values over threadIdx.x with one barrier, for rows of any number of warps beside any neighbours in y (at
// most kMaxBlockRows of several warps). Reductions that follow each other on different `slot`s, 0 and 1 in turn, need
// no second barrier: whoever writes to a slot has passed the other one's barrier, before which all had read it.
template <typename Op, int kThreads = 0, typename A, int kN>
__device__ void row_reduce(A (&values)[kN], A identity, int slot, Op op = {}) {
#pragma unroll
  for (int n = 0; n < kN; ++n) values[n] = warp_reduce<Op>(values[n]);
  if (kThreads == kWarp || blockDim.x == kWarp) return;
  __shared__ A warps[2][kN][kWarp];  // all the warps of a block, row after row
  const int lane = threadIdx.x % kWarp;
  const int row_warps = blockDim.x / kWarp;
  const int first = threadIdx.y * row_warps;
  if (lane == 0)
#pragma unroll
    for (int n = 0; n < kN; ++n) warps[slot][n][first + threadIdx.x / kWarp] = values[n];
  row_barrier();
#pragma unroll
  for (int n = 0; n < kN; ++n) values[n] = warp_reduce<Op>(lane < row_warps ? warps[slot][n][first + lane] : identity);
}

template <int kThreads = 0, typename A, int kN>
__device__ void row_sums(A (&values)[kN], int slot) {
  row_reduce<Sum, kThreads>(values, A(0), slot);
}

}  // namespace gptkernels::cuda
