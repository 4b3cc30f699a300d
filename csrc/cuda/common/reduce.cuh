// Sums and maxima over the lanes of a warp or the threads of a thread block. The order of the additions depends on the
// launch shape only, so equal launches give equal bits.
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

// The maximum of two numbers, ignoring NaNs. For float32 it takes one instruction.
struct FiniteMax {
  template <typename A>
  __device__ A operator()(A a, A b) const {
    return fmax(a, b);
  }
};

// Reduces over groups of kLanes neighbouring lanes. Every lane gets the result of its group.
template <typename Op, int kLanes = kWarp, typename A>
__device__ A warp_reduce(A value, Op op = {}) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  return value;
}

// Returns the sum over a one-dimensional thread block to every thread. All threads must call this function.
template <typename A>
__device__ A block_sum(A value) {
  value = warp_reduce<Sum>(value);
  __shared__ A warps[kWarp];
  const int lane = threadIdx.x % kWarp;
  __syncthreads();  // threads may still be reading the sums of the previous call
  if (lane == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_reduce<Sum>(lane < static_cast<int>(blockDim.x) / kWarp ? warps[lane] : A(0));
}

}  // namespace gptkernels::cuda
