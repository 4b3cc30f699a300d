// The maximum of a row and the sum of its exponentials: in one pass (SoftmaxSum, online softmax) where every pass reads
// the row from memory, in two (MaxSum) where the row is in registers and shared memory.
#pragma once

#include <limits>
#include <type_traits>

#include "approximate.cuh"
#include "packed.cuh"
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

// ---- rows in registers and shared memory (row_part.cuh) -------------------------------------------------------------

// exp(scale * x). The scale is part of the factor that turns e^x into 2^x, so it takes no instruction.
template <typename T>
struct ScaledExp {
  float factor;

  __device__ explicit ScaledExp(float scale) : factor(kSixteenBits<T> ? scale * kLog2E : scale) {}

  __device__ float operator()(float x) const {
    return kSixteenBits<T> ? exp2_approximately(x * factor) : expf(x * factor);
  }

  // exp(scale * x) / 2^y; for 16-bit types.
  __device__ float over_power(float x, float y) const { return exp2_approximately(fmaf(x, factor, -y)); }
};

template <typename T, int N>
__device__ float largest_of(const Packed<T, N>& pack) {
  if constexpr (sizeof(T) == 2 && N == 8) {  // two at a time, before their conversion
    using Pair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;
    const auto& pairs = reinterpret_cast<const Pair(&)[4]>(pack);
    const Pair largest = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(widen(largest.x), widen(largest.y));
  } else if constexpr (N == 4) {
    return fmaxf(fmaxf(pack.v[0], pack.v[1]), fmaxf(pack.v[2], pack.v[3]));
  } else {
    return widen(pack.v[0]);
  }
}

// The maximum of some x, and the sum of exp(scale * (x - max)). The maximum starts at the lowest finite number, so that
// x - max is never inf - inf, and ignores NaNs, which show in the sum.
template <typename T>
struct MaxSum {
  float max = std::numeric_limits<float>::lowest();
  sum_t<T> total = 0;

  // Each warp sums relative to its own maximum. So the warps of a team synchronise once, not twice.
  template <typename Meeting>
  __device__ MaxSum of_team(Meeting& meeting, const ScaledExp<T>& exponential) const {
    MaxSum all = *this;
    meeting(all, [&](MaxSum& of_lane) {
      const float max = warp_reduce<FiniteMax>(of_lane.max);
      of_lane.total = warp_reduce<Sum>(of_lane.total * sum_t<T>(exponential(of_lane.max - max)));
      of_lane.max = max;
    });
    return all;
  }
};

}  // namespace gptkernels::cuda
