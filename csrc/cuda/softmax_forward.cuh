// Softmax forward over the rows of a matrix. Reads x, writes out.
#pragma once

#include <limits>
#include <type_traits>

#include "common/approximate.cuh"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "common/softmax_sum.cuh"
#include "common/teams.cuh"
#include "common/wide_row.cuh"
#include "row_part.cuh"

namespace gptkernels::cuda {

template <typename T>
struct SoftmaxRows {
  T* out;
  const T* x;
  int64_t rows;
  int64_t width;
  accumulate_t<T> scale;  // of x
};

// exp(scale * x): exp_for with the scale in the factor that 2^x needs anyway.
template <typename T>
struct ScaledExp {
  float factor;

  __device__ explicit ScaledExp(float scale) : factor(kSixteenBits<T> ? scale * kLog2E : scale) {}

  __device__ float operator()(float x) const {
    return kSixteenBits<T> ? exp2_approximately(x * factor) : expf(x * factor);
  }

  // exp(scale * x) / 2^y, for 16-bit types.
  __device__ float over_power(float x, float y) const { return exp2_approximately(fmaf(x, factor, -y)); }
};

template <typename T, int kVec>
__device__ float largest_of(const Packed<T, kVec>& pack) {
  if constexpr (sizeof(T) == 2) {  // pairs, before they are widened
    using Pair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;
    const auto& pairs = reinterpret_cast<const Pair(&)[4]>(pack);
    const Pair largest = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(widen(largest.x), widen(largest.y));
  } else {
    return fmaxf(fmaxf(pack.v[0], pack.v[1]), fmaxf(pack.v[2], pack.v[3]));
  }
}

// What exponentials become when their sum is known.
template <typename T>
class Quotient {
 public:
  __device__ explicit Quotient(float total) : total_(total), reciprocal_(1 / total) {}

  // For float32 the product alone would be off by one more rounding than the division: a step of Newton's takes it
  // back.
  __device__ float operator()(float e) const {
    const float q = e * reciprocal_;
    return sizeof(T) == 2 ? q : fmaf(fmaf(-q, total_, e), reciprocal_, q);
  }

 private:
  float total_;
  float reciprocal_;
};

// The maximum of some x, and the sum of exp(scale * (x - max)). It starts at the lowest finite number, so that nothing
// but -inf has a sum of 0; NaNs are passed over, they are in the sum.
template <typename T>
struct MaxSum {
  float max = std::numeric_limits<float>::lowest();
  sum_t<T> total = 0;
};

// Maxima are those of x, so the scale must be positive.
template <typename T, typename Team, int kItems, bool kSingles, bool kCausal, bool kMore>
__device__ void softmax_row(const SoftmaxRows<T>& p, void* places) {
  constexpr int kVec = kPack<T>;
  // Exponentials are kept where they fit; else they are taken again from x, of which 16-bit packs are half as large.
  constexpr bool kKept = sizeof(T) == 4 || kItems <= 2;
  typename Team::template Meeting<MaxSum<T>> meeting;
  const RowColumns<T, Team, kSingles, kCausal, kMore> at(p.out, p.rows, p.width);
  RowPart<T, kItems, kMore> x(p.x, at, places);

  MaxSum<T> own;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.counts(i)) continue;
    x.mask(at, i, -INFINITY);
    own.max = fmaxf(own.max, largest_of(x.pack(i)));
  }
  x.wait_for_more();
  if constexpr (kMore)
    for (int i = kItems; at.counts(i); ++i) {
      x.mask_more(at, i, -INFINITY);
      own.max = fmaxf(own.max, largest_of(*x.place(i)));
    }
  if (at.single_counts()) own.max = fmaxf(own.max, x.single());
  own.max = warp_reduce<FiniteMax, Team::kOfWarp>(own.max);

  // Each warp sums relative to its own maximum: warps meet once, not twice.
  const ScaledExp<T> exponential(p.scale);
  float kept[kItems][kVec], kept_single = 0;
  const auto add_exponentials = [&](float (&e)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      e[k] = exponential(e[k] - own.max);
      own.total += e[k];
    }
  };
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.counts(i)) continue;
    float e[kVec];
    x.widened(e, i);
    add_exponentials(e);
    if constexpr (kKept)
#pragma unroll
      for (int k = 0; k < kVec; ++k) kept[i][k] = e[k];
  }
  if constexpr (kMore)
    for (int i = kItems; at.counts(i); ++i) {
      float e[kVec];
      widen(e, *x.place(i));
      add_exponentials(e);
    }
  if (at.single_counts()) {
    kept_single = exponential(x.single() - own.max);
    own.total += kept_single;
  }
  own.total = warp_reduce<Sum, Team::kOfWarp>(own.total);

  MaxSum<T> all = own;
  meeting(all, [&](MaxSum<T>& of_lane) {
    const float max = warp_reduce<FiniteMax>(of_lane.max);
    of_lane.total = warp_reduce<Sum>(of_lane.total * sum_t<T>(exponential(of_lane.max - max)));
    of_lane.max = max;
  });

  if constexpr (kKept) {
    const Quotient<T> quotient(static_cast<float>(all.total));
    const float factor = Team::kOneWarp ? 1.f : exponential(own.max - all.max);
    const auto quotients = [&](float (&y)[kVec], int i) {
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(kept[i][k] * factor);
    };
    const auto more = [&](float (&y)[kVec], int i) {
      widen(y, *x.place(i));
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(exponential(y[k] - all.max));
    };
    store_part<kItems, kMore>(p.out, at, quotients, more, [&] { return quotient(kept_single * factor); });
  } else {
    const float log_total = __log2f(all.total);
    const auto quotient = [&](float x) { return exponential.over_power(x - all.max, log_total); };
    const auto quotients = [&](float (&y)[kVec], int i) {
      x.widened(y, i);
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(y[k]);
    };
    const auto more = [&](float (&y)[kVec], int i) {
      widen(y, *x.place(i));
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(y[k]);
    };
    store_part<kItems, kMore>(p.out, at, quotients, more, [&] { return quotient(x.single()); });
  }
}

// Two such blocks fit on a multiprocessor, so that one loads while the other computes: 32 registers a thread, or as
// many more as the code takes.
template <typename T, bool kSingles, bool kCausal, bool kMore>
constexpr int kForwardThreads = kCausal && kMore                                    ? 512
                                : kCausal || (kMore && (kSingles || sizeof(T) > 2)) ? 768
                                                                                    : 1024;

template <typename T, int kLanes, int kItems, bool kSingles, bool kCausal>
__global__ void __launch_bounds__(kLanesThreads<kItems>) softmax_forward_lanes_kernel(const SoftmaxRows<T> p) {
  softmax_row<T, Lanes<kLanes, kLanesThreads<kItems>>, kItems, kSingles, kCausal, false>(p, nullptr);
}

template <typename T, int kItems, bool kSingles, bool kCausal, bool kMore>
__global__ void __launch_bounds__(kForwardThreads<T, kSingles, kCausal, kMore>,
                                  kTwoBlocks<kForwardThreads<T, kSingles, kCausal, kMore>>)
    softmax_forward_block_kernel(const SoftmaxRows<T> p) {
  extern __shared__ uint4 places[];
  softmax_row<T, Block, kItems, kSingles, kCausal, kMore>(p, places);
}

template <typename T, int kItems, bool kSingles, bool kCausal>
__global__ void __launch_bounds__(kForwardThreads<T, kSingles, kCausal, true>,
                                  kTwoBlocks<kForwardThreads<T, kSingles, kCausal, true>>)
    softmax_forward_cluster_kernel(const SoftmaxRows<T> p) {
#if GPTKERNELS_HOPPER
  extern __shared__ uint4 places[];
  softmax_row<T, Cluster, kItems, kSingles, kCausal, true>(p, places);
#endif
}

template <typename T, int kVec, bool kCausal>
__global__ void __launch_bounds__(kWideThreads<T, false>, 1)
    softmax_forward_simple_kernel(const SoftmaxRows<T> p, const WideShape shape) {
  using A = accumulate_t<T>;
  using Rows = WideRows<T, 1, kVec, false>;
  using Column = typename Rows::Column;
  Rows rows(shape, p.rows, p.width, {p.x});
  for (; rows.more(); rows.next()) {
    const auto columns = static_cast<Column>(columns_of<kCausal>(rows.row(), p.width));
    const auto scale = [&](Column column, A(&x)[1][kVec], auto exceptional) {
      if constexpr (kCausal)
#pragma unroll
        for (int k = 0; k < kVec; ++k)
          x[0][k] = exceptional.value && column + k >= columns ? -A(INFINITY) : x[0][k] * p.scale;
    };
    rows.wait();
    SoftmaxSum<T> sum;
    rows.each(-A(INFINITY), {columns, -1}, [&](Column column, A(&x)[1][kVec], auto exceptional) {
      scale(column, x, exceptional);
      sum.add(x[0]);
    });
    rows.reduce(sum);
    const A factor = 1 / sum.total;
    rows.write(p.out, {columns, -1}, [&](Column column, A(&x)[1][kVec], auto exceptional) {
      scale(column, x, exceptional);
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        x[0][k] = exceptional.value && column + k >= columns ? A(0) : exp_for<T>(x[0][k] - sum.max) * factor;
    });
  }
}

}  // namespace gptkernels::cuda
