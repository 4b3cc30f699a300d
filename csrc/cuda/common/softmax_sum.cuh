// The maximum of a row and the sum of its exponentials, in one pass (online softmax).
#pragma once

#include <limits>

#include "approximate.cuh"
#include "reduce.cuh"
#include "teams.cuh"

namespace gptkernels::cuda {

// The maximum, and the sum of exp(x - maximum), which is rescaled whenever the maximum grows. The maximum starts at the
// lowest finite number, not at -inf: as long as all x are -inf, the sum is 0 and not NaN. The maximum ignores NaNs;
// they show in the sum.
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

  // Raises the maximum to at least x, without adding x to the sum.
  __device__ void include_max(A x) { merge({x, 0}); }

  __device__ void merge(const SoftmaxSum& other) {
    const A largest = fmax(max, other.max);
    total = total * exp_for<T>(max - largest) + other.total * exp_for<T>(other.max - largest);
    max = largest;
  }

  // The combination over a warp, given to every lane.
  __device__ void warp_reduce() {
    const A largest = cuda::warp_reduce<FiniteMax>(max);
    total = cuda::warp_reduce<Sum>(total * exp_for<T>(max - largest));
    max = largest;
  }

  // The combination over a block, given to every thread.
  __device__ void block_reduce() {
    __syncthreads();  // until then, threads may still read the values of the previous call
    warp_reduce();
    BlockMeeting<SoftmaxSum>()(*this, [](SoftmaxSum& of_lane) { of_lane.warp_reduce(); });
  }
};

}  // namespace gptkernels::cuda
