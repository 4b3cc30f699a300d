// A row's maximum and sum of exponentials. SoftmaxSum computes both in one pass (online softmax) over a row in memory.
// MaxSum takes two passes over a row in registers and shared memory.
#pragma once

#include <limits>
#include <type_traits>

#include "approximate.cuh"
#include "packed.cuh"
#include "reduce.cuh"
#include "teams.cuh"

namespace gptkernels::cuda {

template <typename T, int N>
__device__ accumulate_t<T> largest_of(const Packed<T, N>& pack) {
  if constexpr (sizeof(T) == 2 && N == 8) {
    using Pair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;
    const auto& pairs = reinterpret_cast<const Pair(&)[4]>(pack);
    const Pair largest = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(widen(largest.x), widen(largest.y));
  } else if constexpr (N == 4) {
    return fmaxf(fmaxf(pack.v[0], pack.v[1]), fmaxf(pack.v[2], pack.v[3]));
  } else {
    accumulate_t<T> largest = widen(pack.v[0]);
#pragma unroll
    for (int k = 1; k < N; ++k) largest = fmax(largest, widen(pack.v[k]));
    return largest;
  }
}

// `total` is the sum of exp(x - max). `max` starts at the lowest finite number, not -inf, so that the sum is 0 and not
// NaN while all x are -inf. NaNs do not change `max`, but make the sum NaN.
template <typename T, typename Total = accumulate_t<T>>
struct SoftmaxSum {
  using A = accumulate_t<T>;
  A max = std::numeric_limits<A>::lowest();
  Total total = 0;

  template <int kVec>
  __device__ void add(const A (&x)[kVec]) {
    A largest = max;
#pragma unroll
    for (int k = 0; k < kVec; ++k) largest = fmax(largest, x[k]);
    A sum = 0;
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum += exp_for<T>(x[k] - largest);
    total = total * Total(exp_for<T>(max - largest)) + Total(sum);
    max = largest;
  }

  // Half as many registers hold the packs as would hold their values.
  template <int kVec, int kPacks>
  __device__ void add(const Packed<T, kVec> (&packs)[kPacks]) {
    A largest = max;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) largest = fmax(largest, largest_of(packs[j]));
    A sum = 0;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      A x[kVec];
      widen(x, packs[j]);
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum += exp_for<T>(x[k] - largest);
    }
    total = total * Total(exp_for<T>(max - largest)) + Total(sum);
    max = largest;
  }

  __device__ void include_max(A x) { merge({x, 0}); }

  __device__ void merge(const SoftmaxSum& other) {
    const A largest = fmax(max, other.max);
    total = total * Total(exp_for<T>(max - largest)) + other.total * Total(exp_for<T>(other.max - largest));
    max = largest;
  }

  __device__ void warp_reduce() {
    const A largest = cuda::warp_reduce<FiniteMax>(max);
    total = cuda::warp_reduce<Sum>(total * Total(exp_for<T>(max - largest)));
    max = largest;
  }

  __device__ void block_reduce() {
    __syncthreads();
    warp_reduce();
    BlockCombine<SoftmaxSum>()(*this, [](SoftmaxSum& lane_value) { lane_value.warp_reduce(); });
  }
};

// ---- rows in registers and shared memory (row_part.cuh) -------------------------------------------------------------

// exp(scale * x). For 16-bit types the factor is scale * log2(e), so the scale takes no additional instruction.
template <typename T>
struct ScaledExp {
  float factor;

  __device__ explicit ScaledExp(float scale) : factor(kSixteenBits<T> ? scale * kLog2E : scale) {}

  __device__ float operator()(float x) const {
    return kSixteenBits<T> ? exp2_approximately(x * factor) : expf(x * factor);
  }

  __device__ float over_power(float x, float y) const { return exp2_approximately(fmaf(x, factor, -y)); }
};

// `total` is the sum of exp(scale * (x - max)). As in SoftmaxSum, `max` starts at the lowest finite number, and NaNs do
// not change `max`, but make the sum NaN.
template <typename T>
struct MaxSum {
  float max = std::numeric_limits<float>::lowest();
  sum_t<T> total = 0;

  // On entry, `max` and `total` are combined over the team's lanes of each warp. Because `total` is relative to the
  // warp's `max`, the warps of a team synchronise only once.
  template <typename Combine>
  __device__ MaxSum reduce_over_team(Combine& combine, const ScaledExp<T>& exponential) const {
    MaxSum all = *this;
    combine(all, [&](MaxSum& lane_value) {
      const float max = warp_reduce<FiniteMax>(lane_value.max);
      lane_value.total = warp_reduce<Sum>(lane_value.total * sum_t<T>(exponential(lane_value.max - max)));
      lane_value.max = max;
    });
    return all;
  }
};

}  // namespace gptkernels::cuda
