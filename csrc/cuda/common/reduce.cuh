// Sums and maxima over a warp or a thread block. The order of additions depends only on the launch shape.
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

struct FiniteMax {
  template <typename A>
  __device__ A operator()(A a, A b) const {
    return fmax(a, b);
  }
};

template <typename Op, int kLanes = kWarp, typename A>
__device__ A warp_reduce(A value, Op op = {}) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  return value;
}

// All threads of the one-dimensional thread block must call this function.
template <typename A>
__device__ A block_sum(A value) {
  value = warp_reduce<Sum>(value);
  __shared__ A warps[kWarp];
  const int lane = threadIdx.x % kWarp;
  __syncthreads();
  if (lane == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_reduce<Sum>(lane < static_cast<int>(blockDim.x) / kWarp ? warps[lane] : A(0));
}

}  // namespace gptkernels::cuda
