// What a softmax needs to know of a row, in one pass over it.
#pragma once

#include <limits>

#include "approximate.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {

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
