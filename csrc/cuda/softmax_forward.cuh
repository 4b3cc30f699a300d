// Softmax forward over the rows of a matrix. Reads x, writes out.
#pragma once

#include <limits>
#include <type_traits>

#include "common/approximate.cuh"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "common/simple_row.cuh"
#include "common/softmax_sum.cuh"
#include "common/teams.cuh"
#include "softmax_part.cuh"

namespace gptkernels::cuda {

template <typename T>
struct SoftmaxRows {
  T* out;
  const T* x;
  int64_t rows;
  int64_t width;
  accumulate_t<T> scale;  // of x
};

// ---- any row: one block, which reads it from memory in both passes ----

template <typename T, int kVec, bool kCausal>
__global__ void __launch_bounds__(kSimpleThreads) softmax_forward_simple_kernel(const SoftmaxRows<T> p) {
  using A = accumulate_t<T>;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t columns = columns_of<kCausal>(row, p.width);
    A x[kVec];
    const auto load_scaled = [&](int64_t column) {
      load_wide<kVec>(x, p.x + row * p.width + column);
      for (int k = 0; k < kVec; ++k) x[k] = column + k < columns ? x[k] * p.scale : -A(INFINITY);
    };
    SoftmaxSum<T> sum;
    for_each_pack<kVec>(columns, [&](int64_t column) {
      load_scaled(column);
      sum.add(x);
    });
    sum.block_reduce();
    const A factor = 1 / sum.total;
    for_each_pack<kVec>(p.width, [&](int64_t column) {
      load_scaled(column);
      for (int k = 0; k < kVec; ++k) x[k] = column + k < columns ? exp_for<T>(x[k] - sum.max) * factor : A(0);
      store_narrow<kVec>(p.out + row * p.width + column, x);
    });
  }
}

// ---- rows that fit into registers and shared memory ----

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

template <typename T, int kVec>
__device__ float largest_of(const Packed<T, kVec>& pack) {
  if constexpr (sizeof(T) == 2) {  // two at a time, before their conversion
    using Pair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;
    const auto& pairs = reinterpret_cast<const Pair(&)[4]>(pack);
    const Pair largest = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(widen(largest.x), widen(largest.y));
  } else {
    return fmaxf(fmaxf(pack.v[0], pack.v[1]), fmaxf(pack.v[2], pack.v[3]));
  }
}

// Divides by the sum of the exponentials.
template <typename T>
class Quotient {
 public:
  __device__ explicit Quotient(float total) : total_(total), reciprocal_(1 / total) {}

  // A float32 product with the reciprocal has one rounding more than the division; a Newton step corrects it.
  __device__ float operator()(float e) const {
    const float q = e * reciprocal_;
    return sizeof(T) == 2 ? q : fmaf(fmaf(-q, total_, e), reciprocal_, q);
  }

 private:
  float total_;
  float reciprocal_;
};

// The maximum of some x, and the sum of exp(scale * (x - max)). The maximum starts at the lowest finite number, so that
// x - max is never inf - inf, and ignores NaNs, which show in the sum.
template <typename T>
struct MaxSum {
  float max = std::numeric_limits<float>::lowest();
  sum_t<T> total = 0;
};

// One row. The maximum is that of x, not of scale * x, so the scale must be positive.
template <typename T, typename Team, int kItems, bool kHasHeadTail, bool kCausal, bool kOverflow>
__device__ void softmax_row(const SoftmaxRows<T>& p, void* slots) {
  constexpr int kVec = kPack<T>;
  // The exponentials stay in registers if there is room; else the last pass computes them again from x, whose 16-bit
  // packs take half the registers.
  constexpr bool kKept = sizeof(T) == 4 || kItems <= 2;
  typename Team::template Meeting<MaxSum<T>> meeting;
  const RowColumns<T, Team, kHasHeadTail, kCausal, kOverflow> at(p.out, p.rows, p.width);
  RowPart<T, kItems, kOverflow> x(p.x, at, slots);

  MaxSum<T> own;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.unmasked(i)) continue;
    x.mask(at, i, -INFINITY);
    own.max = fmaxf(own.max, largest_of(x.pack(i)));
  }
  x.wait_for_overflow();
  if constexpr (kOverflow)
    for (int i = kItems; at.unmasked(i); ++i) {
      x.mask_overflow(at, i, -INFINITY);
      own.max = fmaxf(own.max, largest_of(*x.slot(i)));
    }
  if (at.edge_unmasked()) own.max = fmaxf(own.max, x.edge());
  own.max = warp_reduce<FiniteMax, Team::kLanes>(own.max);

  // Each warp sums relative to its own maximum. So the warps of a team synchronise once, not twice.
  const ScaledExp<T> exponential(p.scale);
  float kept[kItems][kVec], kept_edge = 0;
  const auto add_exponentials = [&](float (&e)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      e[k] = exponential(e[k] - own.max);
      own.total += e[k];
    }
  };
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.unmasked(i)) continue;
    float e[kVec];
    x.widened(e, i);
    add_exponentials(e);
    if constexpr (kKept)
#pragma unroll
      for (int k = 0; k < kVec; ++k) kept[i][k] = e[k];
  }
  if constexpr (kOverflow)
    for (int i = kItems; at.unmasked(i); ++i) {
      float e[kVec];
      widen(e, *x.slot(i));
      add_exponentials(e);
    }
  if (at.edge_unmasked()) {
    kept_edge = exponential(x.edge() - own.max);
    own.total += kept_edge;
  }
  own.total = warp_reduce<Sum, Team::kLanes>(own.total);

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
    const auto overflow = [&](float (&y)[kVec], int i) {
      widen(y, *x.slot(i));
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(exponential(y[k] - all.max));
    };
    store_part<kItems, kOverflow>(p.out, at, quotients, overflow, [&] { return quotient(kept_edge * factor); });
  } else {
    const float log_total = __log2f(all.total);
    const auto quotient = [&](float x) { return exponential.over_power(x - all.max, log_total); };
    const auto quotients = [&](float (&y)[kVec], int i) {
      x.widened(y, i);
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(y[k]);
    };
    const auto overflow = [&](float (&y)[kVec], int i) {
      widen(y, *x.slot(i));
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(y[k]);
    };
    store_part<kItems, kOverflow>(p.out, at, quotients, overflow, [&] { return quotient(x.edge()); });
  }
}

// Two blocks of this size are resident on an SM, so that one loads while the other computes. 1024 threads leave 32
// registers per thread; the variants that need more have fewer threads.
template <typename T, bool kHasHeadTail, bool kCausal, bool kOverflow>
constexpr int kForwardThreads = kCausal && kOverflow                                        ? 512
                                : kCausal || (kOverflow && (kHasHeadTail || sizeof(T) > 2)) ? 768
                                                                                            : 1024;

template <typename T, int kLanes, int kItems, bool kHasHeadTail, bool kCausal>
__global__ void __launch_bounds__(kLanesThreads<kItems>) softmax_forward_lanes_kernel(const SoftmaxRows<T> p) {
  softmax_row<T, Lanes<kLanes, kLanesThreads<kItems>>, kItems, kHasHeadTail, kCausal, false>(p, nullptr);
}

template <typename T, int kItems, bool kHasHeadTail, bool kCausal, bool kOverflow>
__global__ void __launch_bounds__(kForwardThreads<T, kHasHeadTail, kCausal, kOverflow>,
                                  kTwoBlocks<kForwardThreads<T, kHasHeadTail, kCausal, kOverflow>>)
    softmax_forward_block_kernel(const SoftmaxRows<T> p) {
  extern __shared__ uint4 slots[];
  softmax_row<T, Block, kItems, kHasHeadTail, kCausal, kOverflow>(p, slots);
}

template <typename T, int kItems, bool kHasHeadTail, bool kCausal>
__global__ void __launch_bounds__(kForwardThreads<T, kHasHeadTail, kCausal, true>,
                                  kTwoBlocks<kForwardThreads<T, kHasHeadTail, kCausal, true>>)
    softmax_forward_cluster_kernel(const SoftmaxRows<T> p) {
#if GPTKERNELS_HOPPER
  extern __shared__ uint4 slots[];
  softmax_row<T, Cluster, kItems, kHasHeadTail, kCausal, true>(p, slots);
#endif
}

}  // namespace gptkernels::cuda
