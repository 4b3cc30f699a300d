// Layernorm forward over the rows of a matrix. Reads x, writes out: 2 * N * C * sizeof(T) bytes, and 8 bytes of
// statistics a row. A residual is read besides, and the sum written: twice those bytes, which is what an addition by
// itself would take as well.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../layernorm.h"
#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "common/row.cuh"

namespace gptkernels::cuda {

// A float32 mean is off by a rounding, as large as |mean| * 2^-24. That rest (`rest`, the average of x - mean) is known
// too, so that an offset in x costs no digits.

template <typename A>
struct Moments {
  A mean, rest, rstd;
};

// 1 / sqrt(x). The approximation is good to 2 ulp; a step of Newton's makes that 1, for an eighth of a division's work.
// At 0 and infinity, where the step would be no number, it is exact as it is.
__device__ inline float reciprocal_root(float x) {
  const float r = rsqrtf(x);
  return x > 0 && x < INFINITY ? r + 0.5f * r * fmaf(-x * r, r, 1.0f) : r;
}
__device__ inline double reciprocal_root(double x) {
  return 1 / sqrt(x);
}

// From the sums of x - mean and of its square; `inverse` is 1 / C.
template <typename A>
__device__ Moments<A> moments(A mean, A rests, A squares, A inverse, double eps) {
  const A rest = rests * inverse;
  const A variance = squares * inverse - rest * rest;
  return {mean, rest, reciprocal_root(variance + A(eps))};
}

// Four bytes of a sector of 32, whose other bytes come from other rows within microseconds. Every such piece costs
// about as much as a whole sector (65536x768 bfloat16: 3 % of the time for 0.3 % of the bytes), less where it is what
// the L2 cache parts with last.
__device__ inline void store_piece(float* p, float value) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(p), "f"(value), "l"(policy) : "memory");
}
__device__ inline void store_piece(double* p, double value) {
  *p = value;
}

template <typename T>
__device__ void write_statistics(const LayernormForward<T>& p, int64_t row, const Moments<accumulate_t<T>>& m) {
  if (threadIdx.x != 0) return;
  store_piece(p.mean + row, m.mean + m.rest);
  store_piece(p.rstd + row, m.rstd);
}

// Whether float32 adds up a row without a rounding worth speaking of: 16-bit numbers of about one size have 13 bits to
// spare, and of others the largest make up the sum. Then C * mean - sum is how far a mean is off.
template <typename T>
constexpr bool kExactSums = sizeof(T) == 2;

// The most threads of a block by the registers that its packs take.
template <typename T, int kVec, int kItems>
constexpr int kForwardMaxThreads =
    max_threads(12 * sizeof(accumulate_t<T>) + kItems * kVec * (3 * sizeof(T) + sizeof(accumulate_t<T>)) / 4);

// What is beyond the row's end stays out of the sums. `inverse` is 1 / C.
template <typename T, int kVec, int kItems, int kThreads, int kSure>
__device__ Moments<accumulate_t<T>> row_moments(Row<T, kVec, kItems, kThreads, kSure>& row, int width,
                                                accumulate_t<T> inverse, double eps) {
  using A = accumulate_t<T>;
  A sum[1] = {};
  row.each(width, [&](int, const A(&x)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[0] += x[k];
  });
  row_sums<kThreads>(sum, 0);
  if constexpr (kItems * kVec > kWidened) row.stay_packed();
  const A mean = sum[0] * inverse;
  A about_mean[kExactSums<T> ? 1 : 2] = {};  // sums of (x - mean)^2 and, where it takes a sum to know, of x - mean
  row.each(width, [&](int, const A(&x)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const A centred = x[k] - mean;
      about_mean[0] += centred * centred;
      if constexpr (!kExactSums<T>) about_mean[1] += centred;
    }
  });
  row_sums<kThreads>(about_mean, 1);
  if constexpr (kItems * kVec > kWidened) row.stay_packed();
  A rests;
  if constexpr (kExactSums<T>)
    rests = fma(-mean, A(width), sum[0]);
  else
    rests = about_mean[1];
  return moments(mean, rests, about_mean[0], inverse, eps);
}

// x + residual rounded to T, in the place of x, and written as the sum.
template <typename T, int kVec, int kItems, int kThreads, int kSure>
__device__ void add_residual(const LayernormForward<T>& p, int64_t row, Row<T, kVec, kItems, kThreads, kSure>& x,
                             const Row<T, kVec, kItems, kThreads, kSure>& residual) {
  T* sum = p.sum + row * p.width;
  x.update(static_cast<int>(p.width), [&](int i, accumulate_t<T>(&x)[kVec]) {
    add_pack(x, residual.packs[i]);
    store_narrow<kVec>(sum + residual.column(i), x);
  });
}

// kVec columns of weight and bias, ones and zeros where there are none. kBoth: there are both, and nobody asks.
template <bool kBoth, int kVec, typename T>
__device__ void load_affine(accumulate_t<T> (&weight)[kVec], accumulate_t<T> (&bias)[kVec],
                            const LayernormForward<T>& p, int column) {
#pragma unroll
  for (int k = 0; k < kVec; ++k) weight[k] = 1, bias[k] = 0;
  if (kBoth || p.weight) load_wide<kVec>(weight, p.weight + column);
  if (kBoth || p.bias) load_wide<kVec>(bias, p.bias + column);
}

// A row a thread group, and no more: small blocks that come and go keep reads and writes evenly mixed. The row stays in
// registers between its load and its store, so the variance is taken about the mean in a second pass that costs no
// memory traffic. Weight and bias are asked for pack by pack, when they are needed: so the registers hold more rows,
// and the L1 cache has them.
template <typename T, int kVec, int kThreads, int kSure, int kItems, bool kResidual>
__global__ void __launch_bounds__(kForwardMaxThreads<T, kVec, kItems>)
    layernorm_forward_registers_kernel(const LayernormForward<T> p, accumulate_t<T> inverse) {
  using A = accumulate_t<T>;
  const int width = static_cast<int>(p.width);
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  Row<T, kVec, kItems, kThreads, kSure> packs, residual;
  packs.load(p.x + row * width, width);
  if constexpr (kResidual) {
    residual.load(p.residual + row * width, width);
    add_residual(p, row, packs, residual);
  }
  const Moments<A> m = row_moments(packs, width, inverse, p.eps);
  write_statistics(p, row, m);
  const A offset = -m.rest * m.rstd;
  T* out = p.out + row * width;
  const auto write = [&](auto both) {
    packs.each(width, [&](int i, A(&x)[kVec]) {
      A weight[kVec], bias[kVec];
      load_affine<both.value>(weight, bias, p, packs.column(i));
#pragma unroll
      for (int k = 0; k < kVec; ++k) x[k] = ((x[k] - m.mean) * m.rstd + offset) * weight[k] + bias[k];
      store_narrow<kVec>(out + packs.column(i), x);
    });
  };
  // To ask at each pack takes a tenth of the instructions, which the bytes of a residual leave time for.
  if (!kResidual && p.weight != nullptr && p.bias != nullptr)
    write(std::true_type{});
  else
    write(std::false_type{});
}

// x, or x + residual rounded to T.
template <int kVec, typename T>
__device__ void load_input(accumulate_t<T> (&x)[kVec], const LayernormForward<T>& p, int64_t i) {
  load_wide<kVec>(x, p.x + i);
  if (p.residual == nullptr) return;
  accumulate_t<T> residual[kVec];
  load_wide<kVec>(residual, p.residual + i);
#pragma unroll
  for (int k = 0; k < kVec; ++k) x[k] = widen(narrow<T>(x[k] + residual[k]));
}

// Rows too wide for registers, or not made of whole packs: a block a row, which reads the row three times, the second
// and third from L1 or L2.
template <typename T, int kVec>
__global__ void __launch_bounds__(1024) layernorm_forward_wide_kernel(const LayernormForward<T> p) {
  using A = accumulate_t<T>;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x_row = (p.residual ? p.sum : p.x) + row * p.width;  // a thread reads what it has written itself
    A x[kVec];
    A sum = 0;
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      load_input(x, p, row * p.width + column);
      if (p.residual) store_narrow<kVec>(p.sum + row * p.width + column, x);
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum += x[k];
    }
    const A mean = block_sum(sum) / A(p.width);

    A rests = 0;
    A squares = 0;
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      load_wide<kVec>(x, x_row + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        rests += x[k] - mean;
        squares += (x[k] - mean) * (x[k] - mean);
      }
    }
    const Moments<A> m = moments(mean, block_sum(rests), block_sum(squares), A(1) / A(p.width), p.eps);
    write_statistics(p, row, m);
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      load_wide<kVec>(x, x_row + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        const A weight = p.weight ? widen(p.weight[column + k]) : A(1);
        const A bias = p.bias ? widen(p.bias[column + k]) : A(0);
        x[k] = (x[k] - m.mean - m.rest) * m.rstd * weight + bias;
      }
      store_narrow<kVec>(p.out + row * p.width + column, x);
    }
  }
}

}  // namespace gptkernels::cuda
