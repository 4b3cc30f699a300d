// Layernorm backward over the rows of a matrix. Reads x and dout, writes dx: 3 * N * C * sizeof(T) bytes. With
// g = dout * weight and n = (x - mean) * rstd,
//   dx = rstd * (g - avg(g) - n * avg(g * n)),   dweight = sum over rows of dout * n,   dbias = sum over rows of dout.
// A gradient `dresidual` that passes by the norm is read once and added to dx.
//
// One block a multiprocessor walks over the rows, several at a time. A thread meets the same columns in every row, so
// it keeps their part of dweight and dbias in registers: they fill the register file, and the rows pass through shared
// memory instead, where copies of the rows to come are always under way. A thread reads there what it has copied
// itself, so nobody waits for anybody but for the two sums of a row. At the end a block adds up what its threads hold
// and writes one row of partial sums; a second kernel adds those of all blocks, in order.
#pragma once

#include <cstdint>

#include "../layernorm.h"
#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "common/row_ring.cuh"

namespace gptkernels::cuda {

// A product rounded by itself: fused into the subtraction of its own average it would leave a rest where there is none.
__device__ inline float product(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ inline double product(double a, double b) {
  return __dmul_rn(a, b);
}

// The most threads of a block by the registers that a thread's columns take: a word of weight for every one of memory,
// two accumulators an element, and the normalised row and its gradient between the two passes, or of more than kWidened
// elements their 16-bit packs, beside some 40 (float64: 80) for everything else.
template <typename T, int kVec, int kItems, bool kResidual>
constexpr int kBackwardMaxThreads =
    max_threads((kResidual ? 12 : 10) * sizeof(accumulate_t<T>) +
                kItems * kVec *
                    (sizeof(T) + 2 * sizeof(accumulate_t<T>) +
                     2 * (kItems * kVec > kWidened ? sizeof(T) : sizeof(accumulate_t<T>))) /
                    4);

// Adds up what the rows of a block have summed and writes it as a row of the workspace. They meet in shared memory, in
// the place of the ring, in parts of 16 bytes: (blockDim.y, 2, kItems, kVec / kSums, blockDim.x), neighbouring threads
// in neighbouring banks.
template <typename R, typename T, typename A, int kItems, int kVec>
__device__ void write_block_sums(const LayernormBackward<T>& p, void* shared, const A (&dweight)[kItems][kVec],
                                 const A (&dbias)[kItems][kVec]) {
  constexpr int kSums = std::min<int>(kVec, 16 / sizeof(A));  // of a part
  constexpr int kParts = 2 * kItems * kVec / kSums;
  using Part = Packed<A, kSums>;
  const int threads = blockDim.x;
  Part* const sums = static_cast<Part*>(shared) + threadIdx.x;
  __pipeline_wait_prior(0);
  __syncthreads();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int at = part % (kParts / 2) * kSums;
    const A(&from)[kItems][kVec] = part < kParts / 2 ? dweight : dbias;
    Part sum;
#pragma unroll
    for (int k = 0; k < kSums; ++k) sum.v[k] = from[at / kVec][at % kVec + k];
    sums[(threadIdx.y * kParts + part) * threads] = sum;
  }
  __syncthreads();
  A* partial = static_cast<A*>(p.workspace) + int64_t(blockIdx.x) * 2 * p.width;
  for (int part = threadIdx.y; part < kParts; part += blockDim.y) {
    const int at = part % (kParts / 2) * kSums;
    const int column = R::column(at / kVec) + at % kVec;
    if (column >= p.width) continue;
    Part sum = sums[part * threads];
#pragma unroll 4
    for (int row = 1; row < blockDim.y; ++row) {
      const Part more = sums[(row * kParts + part) * threads];
#pragma unroll
      for (int k = 0; k < kSums; ++k) sum.v[k] += more.v[k];
    }
    store(partial + (part < kParts / 2 ? 0 : p.width) + column, sum);
  }
}

template <typename T, int kVec, int kThreads, int kSure, int kItems, bool kResidual>
__global__ void __launch_bounds__(kBackwardMaxThreads<T, kVec, kItems, kResidual>)
    layernorm_backward_ring_kernel(const LayernormBackward<T> p, int stages) {
  using A = accumulate_t<T>;
  using R = Row<T, kVec, kItems, kThreads, kSure>;
  using Ring = RowRing<R, kResidual ? 3 : 2>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int width = static_cast<int>(p.width);
  Ring ring(shared, {p.x, p.dout, p.dresidual}, p.rows, width, stages);
  R weight;
  weight.fill(1);
  if (p.weight) weight.load(p.weight, width);
  int64_t row = Ring::first();
  A next_mean = row < p.rows ? p.mean[row] : A(0);
  A next_rstd = row < p.rows ? p.rstd[row] : A(0);

  A dweight[kItems][kVec] = {};
  A dbias[kItems][kVec] = {};
  T* dx = p.dx + row * width;
  for (int slot = 0; row < p.rows; row += Ring::step(), dx += Ring::step() * width, slot ^= 1) {
    const A mean = next_mean;
    const A rstd = next_rstd;
    if (row + Ring::step() < p.rows) {
      next_mean = p.mean[row + Ring::step()];
      next_rstd = p.rstd[row + Ring::step()];
    }
    const T* x_row = ring.next();
    const T* dout_row = x_row + ring.pitch();
    R x, dout;
    x.load(x_row, width);
    dout.load(dout_row, width);
    weight.stay_packed();
    // Of pack i: n, and g, to which `gradient` is turned from dout. Both passes call it, and the compiler keeps what it
    // gave the first, unless that would be too much.
    const auto weigh = [&](int i, A(&norm)[kVec], A(&gradient)[kVec]) {
      A w[kVec];
      widen(norm, x.packs[i]);
      widen(w, weight.packs[i]);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        norm[k] = (norm[k] - mean) * rstd;
        gradient[k] = product(gradient[k], w[k]);
      }
    };
    A sums[2] = {};  // of g and of g * n
    dout.each(width, [&](int i, A(&gradient)[kVec]) {
      A norm[kVec], weighted[kVec];
#pragma unroll
      for (int k = 0; k < kVec; ++k) weighted[k] = gradient[k];
      weigh(i, norm, weighted);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        dweight[i][k] += gradient[k] * norm[k];
        dbias[i][k] += gradient[k];
        sums[0] += weighted[k];
        sums[1] += weighted[k] * norm[k];
      }
    });
    if (p.dx == nullptr) continue;
    row_sums<kThreads>(sums, slot);
    const A avg_g = sums[0] / A(width);
    const A avg_gn = sums[1] / A(width);
    if constexpr (kItems * kVec > kWidened) {
      x.stay_packed();
      dout.stay_packed();
      weight.stay_packed();
    }
    dout.each(width, [&](int i, A(&gradient)[kVec]) {
      A norm[kVec];
      A dresidual[kVec] = {};
      weigh(i, norm, gradient);
      if constexpr (kResidual) load_wide<kVec>(dresidual, dout_row + ring.pitch() + R::column(i));
#pragma unroll
      for (int k = 0; k < kVec; ++k) gradient[k] = (gradient[k] - avg_g - norm[k] * avg_gn) * rstd + dresidual[k];
      store_narrow<kVec>(dx + R::column(i), gradient);
    });
  }
  // The last rows may be too few for all thread groups of a block. None needs this barrier, but compute-sanitizer looks
  // for races by counting barriers, and finds none if all threads have as many.
  if (kThreads == kPart && p.dx && row - threadIdx.y < p.rows) row_barrier<kThreads>();
  if (p.workspace) write_block_sums<R>(p, shared, dweight, dbias);
}

// dx of rows too wide for shared memory: a block a row, which reads x and dout twice.
template <typename T, int kVec>
__global__ void __launch_bounds__(1024) layernorm_backward_wide_kernel(const LayernormBackward<T> p) {
  using A = accumulate_t<T>;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const A mean = p.mean[row];
    const A rstd = p.rstd[row];
    A norm[kVec], gradient[kVec], weight[kVec];
    const auto load_columns = [&](int64_t column) {
      load_wide<kVec>(norm, p.x + row * p.width + column);
      load_wide<kVec>(gradient, p.dout + row * p.width + column);
      if (p.weight) load_wide<kVec>(weight, p.weight + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        norm[k] = (norm[k] - mean) * rstd;
        if (p.weight) gradient[k] = product(gradient[k], weight[k]);
      }
    };
    A sum_g = 0;
    A sum_gn = 0;
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      load_columns(column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        sum_g += gradient[k];
        sum_gn += gradient[k] * norm[k];
      }
    }
    const A avg_g = block_sum(sum_g) / A(p.width);
    const A avg_gn = block_sum(sum_gn) / A(p.width);
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      load_columns(column);
      A dresidual[kVec] = {};
      if (p.dresidual) load_wide<kVec>(dresidual, p.dresidual + row * p.width + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) gradient[k] = (gradient[k] - avg_g - norm[k] * avg_gn) * rstd + dresidual[k];
      store_narrow<kVec>(p.dx + row * p.width + column, gradient);
    }
  }
}

// Partial sums of dweight and dbias for wide rows: a thread a column, each block of the grid's y a run of rows.
template <typename T>
__global__ void layernorm_backward_columns_kernel(const LayernormBackward<T> p) {
  using A = accumulate_t<T>;
  const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= p.width) return;
  A dweight = 0;
  A dbias = 0;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const A dout = widen(p.dout[row * p.width + column]);
    dweight += dout * (widen(p.x[row * p.width + column]) - p.mean[row]) * p.rstd[row];
    dbias += dout;
  }
  A* partial = static_cast<A*>(p.workspace) + int64_t(blockIdx.y) * 2 * p.width;  // (gridDim.y, 2, C)
  partial[column] = dweight;
  partial[p.width + column] = dbias;
}

}  // namespace gptkernels::cuda
