// Layernorm backward over the rows of an (N, C) matrix. With g = dout * weight, n = (x - mean) * rstd and averages over
// a row,
//
//   dx = rstd * (g - avg(g) - n * avg(g * n)) + dsum
//   dweight = sum over rows of dout * n,   dbias = sum over rows of dout,   dx_bias = sum over rows of dx
//
// With dropout of x, or if X is narrower than T, the first line gives dresidual, and dx = dropout(dresidual), rounded
// to X.
//
// layernorm_backward_ring_kernel computes rows that fit into registers and shared memory, with one thread block per SM:
//
//   for each row of a team (several teams per thread block):
//     wait until the row is in shared memory (RowRing)
//     pass 1: add dout * n and dout to the thread's sums for dweight and dbias; team sums of g and g * n
//     pass 2: compute and store dx; add dx to the thread's sum for dx_bias
//   add the sums of the thread block's teams and write them to the workspace as one row
//
// For all other rows, layernorm_backward_simple_kernel computes dx, with one thread block per row, and
// layernorm_backward_columns_kernel writes rows of partial sums. At the end partial_sums_kernel adds the rows of the
// workspace.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../layernorm.h"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/row.cuh"
#include "cuda/common/simple_row.cuh"
#include "cuda/elementwise/dropout.cuh"
#include "ring.cuh"
#include "shape.cuh"

namespace gptkernels::cuda {

// The compiler must not contract the product and the subtraction of avg(g) into an FMA: if g is the same in all
// columns, the difference must be exactly 0.
__device__ inline float product(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ inline double product(double a, double b) {
  return __dmul_rn(a, b);
}

// ---- any row: one thread block per row reads x and dout from memory in both passes ----

// Sums g * (x - mean) rather than g * n. In a short row the rounding errors of n would not cancel, and the gradient for
// a constant dout would not be 0.
template <typename T, int kVec, typename X>
__global__ void __launch_bounds__(kSimpleThreads)
    layernorm_backward_simple_kernel(const LayernormBackward<T, X> p, const OptionalDropout<accumulate_t<T>> dropout) {
  using A = accumulate_t<T>;
  const auto draw = dropout.draw();
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const A mean = p.mean[row], rstd = p.rstd[row];
    A c[kVec], g[kVec], weight[kVec];
    LongSum<A> sum_g, sum_gc;
    const auto load_pack = [&](int64_t column) {
      load_wide<kVec>(c, p.x + row * p.width + column);
      load_wide<kVec>(g, p.dout + row * p.width + column);
      if (p.weight) load_wide<kVec>(weight, p.weight + column);
      for (int k = 0; k < kVec; ++k) {
        c[k] -= mean;
        if (p.weight) g[k] = product(g[k], weight[k]);
      }
    };
    for_each_pack<kVec>(p.width, [&](int64_t column) {
      load_pack(column);
      A part_g = 0, part_gc = 0;
      for (int k = 0; k < kVec; ++k) part_g += g[k], part_gc += g[k] * c[k];
      sum_g.add(part_g);
      sum_gc.add(part_gc);
    });
    const A avg_g = block_sum(sum_g.value()) / A(p.width);
    const A slope = block_sum(sum_gc.value()) / A(p.width) * rstd * rstd;
    for_each_pack<kVec>(p.width, [&](int64_t column) {
      A dsum[kVec] = {};
      load_pack(column);
      if (p.dsum) load_wide<kVec>(dsum, p.dsum + row * p.width + column);
      for (int k = 0; k < kVec; ++k) g[k] = (g[k] - avg_g - c[k] * slope) * rstd + dsum[k];
      if (p.dresidual) store_narrow<kVec>(p.dresidual + row * p.width + column, g);
      draw.apply(g, row * p.width + column);
      store_row_pack<kVec>(p.dx + row * p.width + column, g);
    });
  }
}

// The number of sums over the rows: 2 for dweight and dbias, 3 with dx_bias. With dresidual, or if X is narrower than
// T, it is always 3, because the ring kernels for these cases are compiled for 3 sums only.
template <typename T, typename X>
__host__ __device__ int column_sums(const LayernormBackward<T, X>& p) {
  return p.dx_bias || p.dresidual || !std::is_same_v<T, X> ? 3 : 2;
}

// Returns dx. If X is narrower than T, this is dx before it is rounded to X.
template <typename T, typename X>
__device__ accumulate_t<T> unrounded_dx(const LayernormBackward<T, X>& p,
                                        const OptionalDropout<accumulate_t<T>>& dropout, int64_t element) {
  if constexpr (std::is_same_v<T, X>) {
    return widen(p.dx[element]);
  } else {
    accumulate_t<T> dx[1] = {widen(p.dresidual[element])};
    dropout.draw().apply(dx, element);
    return dx[0];
  }
}

// Writes the partial sums, an array (gridDim.y, column_sums(p), C). dx must be complete. A thread sums one column of
// every gridDim.y-th row. It has kSums independent sums, so that the loads of kSums rows are in flight together. After
// every kRun rows it adds these sums to the totals, because in one long sum of similar numbers the rounding errors
// would add up.
template <typename T, typename X>
__global__ void layernorm_backward_columns_kernel(const LayernormBackward<T, X> p,
                                                  const OptionalDropout<accumulate_t<T>> dropout) {
  using A = accumulate_t<T>;
  constexpr int kSums = 4, kRun = 32;
  const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= p.width) return;
  A totals[3] = {};  // dweight, dbias, dx_bias
  for (int64_t first = blockIdx.y; first < p.rows; first += kRun * int64_t(gridDim.y)) {
    A sums[3][kSums] = {};
    const int64_t end = min(p.rows, first + kRun * int64_t(gridDim.y));
    for (int64_t begin = first; begin < end; begin += kSums * int64_t(gridDim.y)) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        const int64_t row = begin + k * int64_t(gridDim.y);
        if (row >= end) break;
        const A dout = widen(p.dout[row * p.width + column]);
        sums[0][k] += dout * (widen(p.x[row * p.width + column]) - p.mean[row]) * p.rstd[row];
        sums[1][k] += dout;
        if (p.dx_bias) sums[2][k] += unrounded_dx(p, dropout, row * p.width + column);
      }
    }
    for (int i = 0; i < 3; ++i) totals[i] += (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]);
  }
  A* partial = static_cast<A*>(p.workspace) + int64_t(blockIdx.y) * column_sums(p) * p.width;
  for (int i = 0; i < column_sums(p); ++i) partial[i * p.width + column] = totals[i];
}

// ---- rows of whole packs that fit into registers and shared memory ----

// A thread keeps its columns' sums for dweight, dbias and dx_bias in registers. These sums leave no registers for the
// next rows, which are therefore loaded into shared memory (RowRing).

// Adds the sums of the thread block's teams, and writes the totals as one row of the workspace. In shared memory the
// teams' sums overwrite the ring, as an array (blockDim.y, kArrays, kItems, kVec / 4, blockDim.x) of float4, in which
// neighbouring threads use neighbouring banks.
template <typename R, int kArrays>
__device__ void write_block_sums(const auto& p, void* shared, const float (&thread_sums)[kArrays][R::kItems][R::kVec]) {
  constexpr int kSums = 4;                                // sums per part
  constexpr int kOneArray = R::kItems * R::kVec / kSums;  // parts of one array
  constexpr int kParts = kArrays * kOneArray;
  using Part = Packed<float, kSums>;
  const int threads = blockDim.x;
  Part* const sums = static_cast<Part*>(shared) + threadIdx.x;
  __pipeline_wait_prior(0);
  __syncthreads();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int at = part % kOneArray * kSums;
    const float (&from)[R::kItems][R::kVec] = thread_sums[part / kOneArray];
    Part sum;
    for (int k = 0; k < kSums; ++k) sum.v[k] = from[at / R::kVec][at % R::kVec + k];
    sums[(threadIdx.y * kParts + part) * threads] = sum;
  }
  __syncthreads();
  float* partial = static_cast<float*>(p.workspace) + int64_t(blockIdx.x) * kArrays * p.width;
  for (int part = threadIdx.y; part < kParts; part += blockDim.y) {
    const int at = part % kOneArray * kSums;
    const int column = R::column(at / R::kVec) + at % R::kVec;
    if (column >= p.width) continue;
    Part sum = sums[part * threads];
#pragma unroll 4
    for (int row = 1; row < blockDim.y; ++row) {
      const Part more = sums[(row * kParts + part) * threads];
      for (int k = 0; k < kSums; ++k) sum.v[k] += more.v[k];
    }
    store(partial + part / kOneArray * p.width + column, sum);
  }
}

// kArrays is column_sums(). With NoDropout, dresidual is not written.
template <typename R, int kArrays, typename X, typename Dropout>
__global__ void __launch_bounds__(backward_max_threads<typename R::T, kArrays>(R::kItems))
    layernorm_backward_ring_kernel(const LayernormBackward<typename R::T, X> p, int stages, const Dropout dropout) {
  using T = typename R::T;
  using Ring = RowRing<R, X>;
  constexpr int kVec = R::kVec;
  extern __shared__ __align__(16) unsigned char shared[];
  const int width = static_cast<int>(p.width);
  const auto draw = dropout.draw();
  Ring ring(shared, p.x, p.dout, p.dsum, p.rows, width, stages);
  R weight;
  weight.fill(1);
  if (p.weight) weight.load(p.weight, width);
  int64_t row = R::Team::row();
  float next_mean = row < p.rows ? p.mean[row] : 0.0f;
  float next_rstd = row < p.rows ? p.rstd[row] : 0.0f;

  float thread_sums[kArrays][R::kItems][kVec] = {};
  auto* dx = p.dx + row * width;
  for (int slot = 0; row < p.rows; row += Ring::step(), dx += Ring::step() * width, slot ^= 1) {
    const float mean = next_mean;
    const float rstd = next_rstd;
    if (row + Ring::step() < p.rows) {
      next_mean = p.mean[row + Ring::step()];
      next_rstd = p.rstd[row + Ring::step()];
    }
    const auto* x_row = ring.next();
    const X* dout_row = Ring::dout(x_row, width);
    R x;
    typename R::template With<X> dout;
    x.load(x_row, width);
    dout.load(dout_row, width);
    weight.stay_packed();
    // Computes n, and multiplies g by the weight; on entry g is dout.
    const auto weigh = [&](int i, float (&n)[kVec], float (&g)[kVec]) {
      float w[kVec];
      widen(n, x.packs[i]);
      widen(w, weight.packs[i]);
      for (int k = 0; k < kVec; ++k) {
        n[k] = (n[k] - mean) * rstd;
        g[k] = product(g[k], w[k]);
      }
    };
    float sums[2] = {};
    dout.each(width, [&](int i, float (&d)[kVec]) {
      float n[kVec], g[kVec];
      for (int k = 0; k < kVec; ++k) g[k] = d[k];
      weigh(i, n, g);
      for (int k = 0; k < kVec; ++k) {
        thread_sums[0][i][k] += d[k] * n[k];
        thread_sums[1][i][k] += d[k];
        sums[0] += g[k];
        sums[1] += g[k] * n[k];
      }
    });
    if (p.dx == nullptr) continue;
    team_sums<typename R::Team>(sums, slot);
    const float avg_g = sums[0] / float(width);
    const float avg_gn = sums[1] / float(width);
    if constexpr (kMayStayPacked<R>) {
      x.stay_packed();
      dout.stay_packed();
      weight.stay_packed();
    }
    // A check of p.dsum at every pack would make the compiler compute n and g again in this pass.
    const auto write_dx = [&](auto with_dsum) {
      dout.each(width, [&](int i, float (&g)[kVec]) {
        float n[kVec];
        float dsum[kVec] = {};
        weigh(i, n, g);
        if constexpr (with_dsum.value) load_wide<kVec>(dsum, Ring::dsum(x_row, width) + R::column(i));
        for (int k = 0; k < kVec; ++k) g[k] = (g[k] - avg_g - n[k] * avg_gn) * rstd + dsum[k];
        if constexpr (Dropout::kOn) store_narrow<kVec>(p.dresidual + row * width + R::column(i), g);
        draw.apply(g, row * width + R::column(i));
        if constexpr (kArrays == 3)
          for (int k = 0; k < kVec; ++k) thread_sums[2][i][k] += g[k];
        store_row_pack<kVec>(dx + R::column(i), g);
      });
    };
    if (p.dsum)
      write_dx(std::true_type());
    else
      write_dx(std::false_type());
  }
  // Teams that have no row in the thread block's last iteration pass the barrier of this iteration here. Only
  // compute-sanitizer's racecheck needs this, because it compares threads by the number of barriers that they have
  // passed.
  if constexpr (std::is_same_v<typename R::Team, BlockPart>)
    if (p.dx && row - threadIdx.y < p.rows) R::Team::barrier();
  if (p.workspace) write_block_sums<R>(p, shared, thread_sums);
}

}  // namespace gptkernels::cuda
