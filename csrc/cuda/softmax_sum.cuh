// What a softmax needs to know of a row, in one pass over it.
#pragma once

#include <limits>

#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {

// exp(x) as exact as what becomes T needs it: for 16-bit types the hardware's 2^x, which drops results below 2^-126.
template <typename T>
__device__ accumulate_t<T> exp_for(accumulate_t<T> x) {
  if constexpr (sizeof(T) == 2) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
  } else {
    return exp(x);
  }
}

// Passes over NaNs, in one instruction.
struct FiniteMax {
  template <typename A>
  __device__ A operator()(A a, A b) const {
    return fmax(a, b);
  }
};

// The maximum, and the sum of exp(x - maximum); the sum is rescaled whenever the maximum grows. The maximum starts at
// the lowest finite number, not at -inf, so that nothing but -inf so far gives a sum of 0 and no number that is none.
// It passes over NaNs, which then are in the sum.
template <typename T>
struct SoftmaxSum {
  using A = accumulate_t<T>;
  A max = std::numeric_limits<A>::lowest();
  A total = 0;

  template <int kVec>
  __device__ void add(const A (&x)[kVec]) {
    A largest = max;
#pragma unroll
    for (int k = 0; k < kVec; ++k) largest = fmax(largest, x[k]);
    A sum = 0;
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum += exp_for<T>(x[k] - largest);
    total = total * exp_for<T>(max - largest) + sum;
    max = largest;
  }

  // Raises the maximum to a number that is not in the sum.
  __device__ void include_max(A x) { merge({x, 0}); }

  __device__ void merge(const SoftmaxSum& other) {
    const A largest = fmax(max, other.max);
    total = total * exp_for<T>(max - largest) + other.total * exp_for<T>(other.max - largest);
    max = largest;
  }

  __device__ void warp_reduce() {
    const A largest = cuda::warp_reduce<FiniteMax>(max);
    total = cuda::warp_reduce<Sum>(total * exp_for<T>(max - largest));
    max = largest;
  }
};

}  // namespace gptkernels::cuda
