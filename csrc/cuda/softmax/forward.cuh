// out = exp(scale * x - max) / sum(exp(scale * x - max)), with one team (teams.cuh) per row.
#pragma once

#include <type_traits>

#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/row_part_launch.cuh"
#include "cuda/common/simple_row.cuh"
#include "cuda/common/softmax_sum.cuh"
#include "cuda/common/teams.cuh"
#include "rows.cuh"

namespace gptkernels::cuda {

// ---- any row: one thread block per row reads the row from memory in both passes ----

template <typename T, int kVec, bool kCausal>
__global__ void __launch_bounds__(kSimpleThreads) softmax_forward_simple_kernel(const SoftmaxRows<T> p) {
  using A = accumulate_t<T>;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t columns = unmasked_columns<kCausal>(row, p.width);
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

template <typename T>
class Quotient {
 public:
  __device__ explicit Quotient(float total) : total_(total), reciprocal_(1 / total) {}

  // e * (1 / total) is rounded twice, e / total once. For float32, a Newton step corrects the additional rounding
  // error.
  __device__ float operator()(float e) const {
    const float q = e * reciprocal_;
    return sizeof(T) == 2 ? q : fmaf(fmaf(-q, total_, e), reciprocal_, q);
  }

 private:
  float total_;
  float reciprocal_;
};

// load x; find the maximum of the warp's part of the row
// compute the exponentials relative to the warp's maximum, and their sum
// combine maximum and sum over the team's warps
// store the exponentials, rescaled to the team's maximum and divided by the team's sum
//
// The maximum is taken over x, not over scale * x, so the scale must be positive.
template <typename T_, bool kCausal>
struct SoftmaxForwardRow {
  using T = T_;
  using Arguments = SoftmaxRows<T>;
  static constexpr RowShapes kShapes = {.overflow_in_block = !kCausal, .wide_head_tail = kCausal};

  // With 1024 threads and two thread blocks per SM, a thread has 32 registers; variants that need more have fewer
  // threads.
  template <bool kHasHeadTail, bool kOverflow>
  static constexpr int kThreads = kCausal && kOverflow                                        ? 512
                                  : kCausal || (kOverflow && (kHasHeadTail || sizeof(T) > 2)) ? 768
                                                                                              : 1024;

  template <typename Team, int kItems, bool kHasHeadTail, bool kOverflow>
  static __device__ void run(const Arguments& p, uint4* slots, int) {
    // If false, the exponentials do not fit into registers. The last pass computes them again from x, whose 16-bit
    // packs take half as many registers.
    constexpr bool kKept = sizeof(T) == 4 || kItems <= 2;
    typename Team::template Combine<MaxSum<T>> combine;
    const int columns = unmasked_columns<kCausal>(static_cast<unsigned>(Team::row()), static_cast<unsigned>(p.width));
    const RowColumns<T, Team, kItems, kHasHeadTail, kCausal, kOverflow> at(p.out, p.rows, p.width, columns);
    RowPart x(p.x, at, slots);

    MaxSum<T> own;
    at.each([&](auto place) {
      at.mask(x.raw(place).v, place, narrow<T>(-INFINITY));
      own.max = fmaxf(own.max, largest_of(x.raw(place)));
    });
    own.max = warp_reduce<FiniteMax, Team::kLanes>(own.max);

    const ScaledExp<T> exponential(p.scale);
    RowValues<kItems, kPack<T>> kept;
    at.each([&](auto place) {
      auto e = x[place];
#pragma unroll
      for (float& value : e.v) {
        value = exponential(value - own.max);
        own.total += value;
      }
      if constexpr (kKept && !std::is_same_v<decltype(place), InShared>) kept[place] = e;
    });
    own.total = warp_reduce<Sum, Team::kLanes>(own.total);
    const MaxSum<T> all = own.reduce_over_team(combine, exponential);

    const Quotient<T> quotient(static_cast<float>(all.total));
    const float factor = Team::kOneWarp ? 1.f : exponential(own.max - all.max);
    // Folds the division into the exponent: e^y / total = 2^(y * log2(e) - log2(total)).
    const float log_total = __log2f(all.total);
    at.store(p.out, [&](auto place) {
      if constexpr (kKept && !std::is_same_v<decltype(place), InShared>) {
        auto y = kept[place];
#pragma unroll
        for (float& value : y.v) value = quotient(value * factor);
        return y;
      } else {
        auto y = x[place];
#pragma unroll
        for (float& value : y.v)
          value = kKept ? quotient(exponential(value - all.max)) : exponential.over_power(value - all.max, log_total);
        return y;
      }
    });
  }
};

}  // namespace gptkernels::cuda
