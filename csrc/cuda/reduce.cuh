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

}  // namespace gptkernels::cuda
