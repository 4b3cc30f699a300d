// out = (x - mean) * rstd * weight + bias over the rows of an (N, C) matrix. With a residual, x is replaced by sum =
// dropout(x + x_bias) + residual, rounded to T, and the sum is written, too.
//
// layernorm_forward_registers_kernel computes rows of whole packs that fit into registers, except float64, with one
// team (a warp or a thread block) per row:
//
//   load the row; add the residual and store the sum
//   mean = sum(x) / C
//   variance = sum((x - mean)^2) / C, corrected by the rounding error of the mean (moments.cuh)
//   normalise, scale, shift, store
//
// layernorm_forward_simple_kernel computes all other rows, and float64, by the same steps, but reads the row from
// memory in each pass.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../layernorm.h"
#include "cuda/common/moments.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/row.cuh"
#include "cuda/common/simple_row.cuh"
#include "cuda/elementwise/dropout.cuh"
#include "shape.cuh"

namespace gptkernels::cuda {

// ---- used by both kernels ----

// A null weight means ones, and a null bias zeros.
template <bool kBoth, int kVec, typename T, typename X>
__device__ void load_affine(accumulate_t<T> (&weight)[kVec], accumulate_t<T> (&bias)[kVec],
                            const LayernormForward<T, X>& p, auto column) {
  for (int k = 0; k < kVec; ++k) weight[k] = 1, bias[k] = 0;
  if (kBoth || p.weight) load_wide<kVec>(weight, p.weight + column);
  if (kBoth || p.bias) load_wide<kVec>(bias, p.bias + column);
}

// ---- any row: one thread block per row reads the row from memory in every pass ----

template <typename T, int kVec, typename X>
__global__ void __launch_bounds__(kSimpleThreads)
    layernorm_forward_simple_kernel(const LayernormForward<T, X> p, const OptionalDropout<accumulate_t<T>> dropout) {
  using A = accumulate_t<T>;
  const auto draw = dropout.draw();
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x_row = p.sum + row * p.width;
    if constexpr (std::is_same_v<T, X>)
      if (!p.residual) x_row = p.x + row * p.width;
    A x[kVec];
    LongSum<A> sum, rests, squares;
    for_each_pack<kVec>(p.width, [&](int64_t column) {
      load_wide<kVec>(x, p.x + row * p.width + column);
      if (p.residual) {
        if (p.x_bias) add_pack(x, load<kVec>(p.x_bias + column));
        draw.apply(x, row * p.width + column);
        add_pack(x, load<kVec>(p.residual + row * p.width + column));
        const auto rounded = narrow<T>(x);
        store(p.sum + row * p.width + column, rounded);
        widen(x, rounded);
      }
      A part = 0;
      for (int k = 0; k < kVec; ++k) part += x[k];
      sum.add(part);
    });
    const A mean = block_sum(sum.value()) / A(p.width);
    for_each_pack<kVec>(p.width, [&](int64_t column) {
      load_wide<kVec>(x, x_row + column);
      A rest = 0, square = 0;
      for (int k = 0; k < kVec; ++k) rest += x[k] - mean, square += (x[k] - mean) * (x[k] - mean);
      rests.add(rest);
      squares.add(square);
    });
    const Moments<A> m = moments(mean, block_sum(rests.value()), block_sum(squares.value()), A(1) / A(p.width), p.eps);
    if (threadIdx.x == 0) p.mean[row] = m.mean + m.rest, p.rstd[row] = m.rstd;
    for_each_pack<kVec>(p.width, [&](int64_t column) {
      A weight[kVec], bias[kVec];
      load_wide<kVec>(x, x_row + column);
      load_affine<false>(weight, bias, p, column);
      for (int k = 0; k < kVec; ++k) x[k] = (x[k] - m.mean - m.rest) * m.rstd * weight[k] + bias[k];
      store_row_pack<kVec>(p.out + row * p.width + column, x);
    });
  }
}

// ---- rows of whole packs that fit into registers ----

// Stores 4 bytes of a 32-byte sector. Other rows' stores write the other bytes within microseconds. With evict-last,
// the L2 cache collects the whole sector before writing it to memory.
__device__ inline void store_statistic(float* p, float value) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(p), "f"(value), "l"(policy) : "memory");
}

// `inverse` is 1 / C.
template <typename R>
__device__ Moments<float> row_moments(R& row, int width, float inverse, double eps) {
  // The float32 sum of a row of 16-bit numbers of similar magnitude is exact, because their significands are at least
  // 13 bits shorter than float32's. If magnitudes differ, the sum's rounding errors are small compared with the largest
  // numbers. The sum of x - mean is therefore computed as sum - C * mean. Adding the terms x - mean would cause
  // rounding errors, so that a row of equal numbers would not be normalised to 0.
  constexpr bool kExactSum = sizeof(typename R::T) == 2;
  float sum[1] = {};
  row.each(width, [&](int, const float (&x)[R::kVec]) {
    for (int k = 0; k < R::kVec; ++k) sum[0] += x[k];
  });
  team_sums<typename R::Team>(sum, 0);
  if constexpr (kMayStayPacked<R>) row.stay_packed();
  const float mean = sum[0] * inverse;
  float about_mean[kExactSum ? 1 : 2] = {};  // sums of (x - mean)^2 and, for float32, of x - mean
  row.each(width, [&](int, const float (&x)[R::kVec]) {
    for (int k = 0; k < R::kVec; ++k) {
      const float centred = x[k] - mean;
      about_mean[0] += centred * centred;
      if constexpr (!kExactSum) about_mean[1] += centred;
    }
  });
  team_sums<typename R::Team>(about_mean, 1);
  if constexpr (kMayStayPacked<R>) row.stay_packed();
  const float rests = kExactSum ? fma(-mean, float(width), sum[0]) : about_mean[sizeof(about_mean) / 4 - 1];
  return moments(mean, rests, about_mean[0], inverse, eps);
}

template <typename R, typename X, typename Draw>
__device__ void add_residual(R& packs, const typename R::template With<X>& x_packs, const R& residual,
                             const LayernormForward<typename R::T, X>& p, int64_t row, const Draw& draw) {
  constexpr int kVec = R::kVec;
  const int width = static_cast<int>(p.width);
  auto* sum = p.sum + row * p.width;
  x_packs.each(width, [&](int i, float (&x)[kVec]) {
    if (p.x_bias) add_pack(x, load<kVec>(p.x_bias + R::column(i)));
    draw.apply(x, row * width + R::column(i));
    add_pack(x, residual.packs[i]);
    packs.packs[i] = narrow<typename R::T>(x);
    store<kVec>(sum + R::column(i), packs.packs[i]);
  });
}

// Explicit rounding (__fadd_rn, fmaf) keeps the compiler from fusing different operations in different kernels, which
// would then give different bits.

template <typename T, typename X>
__device__ void store_statistics(const LayernormForward<T, X>& p, int64_t row, const Moments<float>& m) {
  store_statistic(p.mean + row, __fadd_rn(m.mean, m.rest));
  store_statistic(p.rstd + row, m.rstd);
}

// `offset` is -rest * rstd.
template <int kVec>
__device__ void normalize(float (&x)[kVec], const Moments<float>& m, float offset, const float (&weight)[kVec],
                          const float (&bias)[kVec]) {
  for (int k = 0; k < kVec; ++k) x[k] = fmaf(fmaf(x[k] - m.mean, m.rstd, offset), weight[k], bias[k]);
}

// The kernel has no loop over rows: small thread blocks that start and end at different times keep reads and writes
// evenly mixed. Weight and bias are loaded pack by pack, mostly from L1; in registers, they would leave space for fewer
// rows per SM.
template <typename R, bool kResidual, typename X, typename Dropout>
__global__ void __launch_bounds__(forward_max_threads<typename R::T>(R::kItems))
    layernorm_forward_registers_kernel(const LayernormForward<typename R::T, X> p, float inverse,
                                       const Dropout dropout) {
  constexpr int kVec = R::kVec;
  const int width = static_cast<int>(p.width);
  const int64_t row = R::Team::row();
  if (row >= p.rows) return;
  const auto draw = dropout.draw();
  R packs, residual;
  typename R::template With<X> x_packs;
  x_packs.load(p.x + row * width, width);
  if constexpr (kResidual) {
    residual.load(p.residual + row * width, width);
    add_residual(packs, x_packs, residual, p, row, draw);
  } else {
    packs = x_packs;
  }
  const Moments<float> m = row_moments(packs, width, inverse, p.eps);
  if (R::Team::thread() == 0) store_statistics(p, row, m);
  const float offset = -m.rest * m.rstd;
  auto* out = p.out + row * width;
  const auto write = [&](auto both) {
    packs.each(width, [&](int i, float (&x)[kVec]) {
      float weight[kVec], bias[kVec];
      load_affine<both.value>(weight, bias, p, R::column(i));
      normalize(x, m, offset, weight, bias);
      store_row_pack<kVec>(out + R::column(i), x);
    });
  };
  // Checking both pointers at every pack takes 10 % more instructions, which only rows with a residual hide behind
  // their memory traffic.
  if (!kResidual && p.weight != nullptr && p.bias != nullptr)
    write(std::true_type{});
  else
    write(std::false_type{});
}

}  // namespace gptkernels::cuda
