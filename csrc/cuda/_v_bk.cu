#include <limits>
#include <cstdio>
#include <cstdlib>

#include "../layernorm.h"
#include "partial_sums.cuh"
#include "row_ring.cuh"

namespace gptkernels::cuda {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Forward: reads x once, writes out once; 2 * N * C * sizeof(T) bytes and 8 bytes of statistics a row. A residual is
// read once more, and the sum written: twice those bytes, which is what an addition by itself would take as well.
//
// A float32 mean is off by a rounding, as large as |mean| * 2^-24. The pass for the variance measures that rest too
// (`rest`, the average of x - mean), so that an offset in x costs no digits.

template <typename A>
struct Moments {
  A mean, rest, rstd;
};

// 1 / sqrt(x). The approximation is good to 2 ulp; a step of Newton's makes that 1, for an eighth of a division's work.
// At 0 and infinity, where the step would be no number, it is exact as it is.
__device__ float reciprocal_root(float x) {
  const float r = rsqrtf(x);
  return x > 0 && x < INFINITY ? r + 0.5f * r * fmaf(-x * r, r, 1.0f) : r;
}
__device__ double reciprocal_root(double x) {
  return 1 / sqrt(x);
}

// From the sums of x - mean and of its square; `inverse` is 1 / C.
template <typename A>
__device__ Moments<A> moments(A mean, A rests, A squares, A inverse, double eps) {
  const A rest = rests * inverse;
  const A variance = squares * inverse - rest * rest;
  return {mean, rest, reciprocal_root(variance + A(eps))};
}

template <typename T>
__device__ void write_statistics(const LayernormForward<T>& p, int64_t row, const Moments<accumulate_t<T>>& m) {
  if (threadIdx.x != 0) return;
  p.mean[row] = m.mean + m.rest;
  p.rstd[row] = m.rstd;
}

// The most threads of a block by the registers that its packs take.
template <typename T, int kVec, int kItems>
constexpr int kForwardMaxThreads =
    max_threads(12 * sizeof(accumulate_t<T>) + kItems * kVec * (3 * sizeof(T) + sizeof(accumulate_t<T>)) / 4);

// Leaves x - mean in the place of x; what is beyond the row's end stays out of the sums.
template <int kThreads, typename R, typename A, int kItems, int kVec>
__device__ Moments<A> centre(A (&x)[kItems][kVec], int width, A inverse, double eps) {
  A sum[1] = {};
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!R::has(i, width)) continue;
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[0] += x[i][k];
  }
  row_sums<kThreads>(sum, 0);
  const A mean = sum[0] * inverse;
  A about_mean[2] = {};
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!R::has(i, width)) continue;
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      x[i][k] -= mean;
      about_mean[0] += x[i][k];
      about_mean[1] += x[i][k] * x[i][k];
    }
  }
  row_sums<kThreads>(about_mean, 1);
  return moments(mean, about_mean[0], about_mean[1], inverse, eps);
}

// x + residual rounded to T, in the place of x, and written as the sum.
template <typename T, int kVec, int kItems, int kThreads>
__device__ void add_residual(const LayernormForward<T>& p, int64_t row, Row<T, kVec, kItems, kThreads>& x,
                             const Row<T, kVec, kItems, kThreads>& residual) {
  const int width = static_cast<int>(p.width);
  x.update(width, [&](int i, accumulate_t<T>(&x)[kVec]) {
    accumulate_t<T> r[kVec];
    widen(r, residual.packs[i]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) x[k] += r[k];
  });
  x.store(p.sum + row * width, width);
}

// Weight and bias, ones and zeros where there are none.
template <typename R, typename T>
struct Affine {
  R weight, bias;

  __device__ explicit Affine(const LayernormForward<T>& p) {
    weight.fill(1);
    bias.fill(0);
    if (p.weight) weight.load(p.weight, static_cast<int>(p.width));
    if (p.bias) bias.load(p.bias, static_cast<int>(p.width));
  }
};

// Everything from a row in registers to its output; get_affine() gives weight and bias. `inverse` is 1 / C.
template <typename T, int kVec, int kItems, int kThreads, typename GetAffine>
__device__ void normalise_row(const LayernormForward<T>& p, int64_t row, const Row<T, kVec, kItems, kThreads>& packs,
                              accumulate_t<T> inverse, const GetAffine& get_affine) {
  using A = accumulate_t<T>;
  using R = Row<T, kVec, kItems, kThreads>;
  const int width = static_cast<int>(p.width);
  A x[kItems][kVec];
#pragma unroll
  for (int i = 0; i < kItems; ++i) widen(x[i], packs.packs[i]);
  const Moments<A> m = centre<kThreads, R>(x, width, inverse, p.eps);
  const auto& affine = get_affine();
  write_statistics(p, row, m);
  const A offset = -m.rest * m.rstd;
  T* out = p.out + row * width;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!R::has(i, width)) continue;
    A w[kVec], b[kVec];
    widen(w, affine.weight.packs[i]);
    widen(b, affine.bias.packs[i]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) x[i][k] = (x[i][k] * m.rstd + offset) * w[k] + b[k];
    store_narrow<kVec>(out + R::column(i), x[i]);
  }
}

// A row a thread group, and no more: small blocks that come and go keep reads and writes evenly mixed. The row stays in
// registers between its load and its store, so the variance is taken about the mean in a second pass that costs no
// memory traffic. Weight and bias are asked for not before they are needed: so the registers hold more rows, and the L1
// cache has them.
template <typename T, int kVec, int kThreads, int kItems, bool kResidual>
__global__ void __launch_bounds__(kForwardMaxThreads<T, kVec, kItems>)
    layernorm_forward_registers_kernel(const LayernormForward<T> p, accumulate_t<T> inverse) {
  using R = Row<T, kVec, kItems, kThreads>;
  const int width = static_cast<int>(p.width);
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  R x, residual;
  x.load(p.x + row * width, width);
  if constexpr (kResidual) {
    residual.load(p.residual + row * width, width);
    add_residual(p, row, x, residual);
  }
  normalise_row(p, row, x, inverse, [&] { return Affine<R, T>(p); });
}

// One block a multiprocessor walks over the rows, several at a time, while the next are on their way into shared
// memory. Weight and bias are loaded once a thread.
template <typename T, int kVec, int kItems>
__global__ void __launch_bounds__(kForwardMaxThreads<T, kVec, kItems>)
    layernorm_forward_ring_kernel(const LayernormForward<T> p, accumulate_t<T> inverse, int stages) {
  using R = Row<T, kVec, kItems, kPart>;
  using Ring = RowRing<T, kVec, kItems, kPart, 1>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int width = static_cast<int>(p.width);
  Ring ring(shared, {p.x}, p.rows, width, stages);
  Affine<R, T> affine(p);
  for (int64_t row = Ring::first(); row < p.rows; row += Ring::step()) {
    affine.weight.stay_packed();
    affine.bias.stay_packed();
    R x;
    x.load(ring.next(), width);
    normalise_row(p, row, x, inverse, [&]() -> const auto& { return affine; });
  }
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

// Whole packs of float32 and 16 bits are worth a kernel for every number of packs a thread; float64 and odd layouts
// need only be right.
template <typename T, int kVec>
constexpr bool kIsFast = kVec > 1 && sizeof(T) < 8;

template <typename T, int kVec>
constexpr int kForwardMinItems = kIsFast<T, kVec> ? 1 : 4;
template <typename T, int kVec>
constexpr int kForwardMaxItems = kIsFast<T, kVec> ? 7 : 4;  // of a row of one warp

// Of a row of several: 16-bit rows are wide in registers, and need the multiprocessor to hold many of them.
template <typename T, int kVec>
constexpr int kForwardMaxBlockItems = kVec == 8 ? 3 : 4;

template <bool kResidual, int kVec, typename T>
void launch_forward_registers(const LayernormForward<T>& p, const RowThreads& row, Stream stream) {
  const dim3 block(row.threads, row.threads > kWarp ? 1 : 2);
  const unsigned grid = grid_size(ceil_div(p.rows, block.y));
  with_row_threads<kBlock, kForwardMinItems<T, kVec>, kForwardMaxItems<T, kVec>>(row, [&](auto threads, auto items) {
    layernorm_forward_registers_kernel<T, kVec, threads.value, items.value, kResidual>
        <<<grid, block, 0, stream>>>(p, 1 / accumulate_t<T>(p.width));
  });
}

// Whether it has launched: false where the rows do not fit.
template <int kVec, typename T>
bool launch_forward_ring(const LayernormForward<T>& p, Stream stream) {
  constexpr int kMax = 7;
  const RowThreads row =
      row_threads<kVec, 1, 4, kMax>(p.width, [](auto items) { return kForwardMaxThreads<T, kVec, items.value>; });
  if (row.items == 0) return false;
  bool launched = false;
  with_row_items<1, kMax>(row.items, [&](auto items) {
    constexpr auto kKernel = layernorm_forward_ring_kernel<T, kVec, items.value>;
    const RingShape shape = ring_shape(p.rows, ring_row_bytes<T, 1>(p.width), row.threads,
                                       kForwardMaxThreads<T, kVec, items.value>, max_dynamic_shared_memory<kKernel>());
    if (shape.stages == 0) return;
    kKernel<<<shape.grid, shape.block, shape.shared_bytes, stream>>>(p, 1 / accumulate_t<T>(p.width), shape.stages);
    launched = true;
  });
  return launched;
}

// The ring is for 16-bit rows of several warps, whose barriers leave the memory idle otherwise (16384x1600: 3.6 against
// 2.9 TB/s). With a residual, or in float32, there is twice the memory's work for the same arithmetic, and rows of one
// warp have no barriers: there the plain kernel is ahead (65536x768: 4.1 against 3.9 TB/s).
template <bool kResidual, int kVec, typename T>
void launch_forward(const LayernormForward<T>& p, Stream stream) {
  const RowThreads row =
      row_threads<kVec, kForwardMinItems<T, kVec>, kForwardMaxBlockItems<T, kVec>, kForwardMaxItems<T, kVec>>(
          p.width, [](auto items) { return kForwardMaxThreads<T, kVec, items.value>; });
  if constexpr (kVec == 8 && !kResidual)
    if (!row.full && p.width > kWarp * 4 * kVec && launch_forward_ring<kVec>(p, stream)) return;
  if (row.items && p.rows <= std::numeric_limits<int>::max())  // a grid has no more blocks
    launch_forward_registers<kResidual, kVec>(p, row, stream);
  else
    layernorm_forward_wide_kernel<T, kVec><<<grid_size(p.rows), 1024, 0, stream>>>(p);
}

// ---------------------------------------------------------------------------------------------------------------
// Backward: reads x and dout once, writes dx once. With g = dout * weight and n = (x - mean) * rstd,
//   dx = rstd * (g - avg(g) - n * avg(g * n)),   dweight = sum over rows of dout * n,   dbias = sum over rows of dout.
// A gradient `dresidual` that passes by the norm is read once and added to dx.
//
// One block a multiprocessor walks over the rows, several at a time. A thread meets the same columns in every row, so
// it keeps their part of dweight and dbias in registers: they fill the register file, and the rows pass through shared
// memory instead, where copies of the rows to come are always under way. A thread reads there what it has copied
// itself, so nobody waits for anybody but for the two sums of a row. At the end a block adds up what its threads hold
// and writes one row of partial sums; a second kernel adds those of all blocks, in order.

// A product rounded by itself: fused into the subtraction of its own average it would leave a rest where there is none.
__device__ float product(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ double product(double a, double b) {
  return __dmul_rn(a, b);
}

// Packs a thread, and the most threads a block, by the registers that a thread's columns take: a word of weight for
// every one of memory, two accumulators an element, and the normalised row and its gradient between the two passes,
// beside some 40 (float64: 80) for everything else.
template <int kVec>
constexpr int kBackwardMaxItems = kVec == 8 ? 7 : kVec == 4 ? 7 : 4;

template <typename T, int kVec, int kItems>
constexpr int kBackwardMaxThreads =
    max_threads(10 * sizeof(accumulate_t<T>) + kItems * kVec * (sizeof(T) + 4 * sizeof(accumulate_t<T>)) / 4);


template <typename R, typename T, typename A, int kItems, int kVec>
__device__ void write_block_sums(const LayernormBackward<T>& p, A* shared, const A (&dweight)[kItems][kVec],
                                 const A (&dbias)[kItems][kVec]) {
  constexpr int kPer = kVec < int(16 / sizeof(A)) ? kVec : 16 / sizeof(A);
  constexpr int kParts = kVec / kPer;
  using Part = Packed<A, kPer>;
  const int threads = blockDim.x;
  const int sums = 2 * kItems * kParts * threads;  // of a row of the block
  __pipeline_wait_prior(0);
  __syncthreads();
  Part* all = reinterpret_cast<Part*>(shared);
  Part* mine = all + threadIdx.y * sums + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kItems; ++i)
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      Part a, b;
#pragma unroll
      for (int j = 0; j < kPer; ++j) a.v[j] = dweight[i][k * kPer + j], b.v[j] = dbias[i][k * kPer + j];
      mine[(i * kParts + k) * threads] = a;
      mine[((kItems + i) * kParts + k) * threads] = b;
    }
  __syncthreads();
  A* partial = static_cast<A*>(p.workspace) + int64_t(blockIdx.x) * 2 * p.width;
  for (int part = threadIdx.y; part < 2 * kItems * kParts; part += blockDim.y) {
    const int item = part / kParts;
    const int column = R::column(item % kItems);
    if (column >= p.width) continue;
    const Part* at = all + part * threads + threadIdx.x;
    Part sum = *at;
#pragma unroll 4
    for (int row = 1; row < blockDim.y; ++row) {
      const Part other = at[row * sums];
#pragma unroll
      for (int j = 0; j < kPer; ++j) sum.v[j] += other.v[j];
    }
    store(partial + (item < kItems ? 0 : p.width) + column + part % kParts * kPer, sum);
  }
}

template <typename T, int kVec, int kItems, int kMode>
constexpr int bmax = kMode == 0 ? kBackwardMaxThreads<T, kVec, kItems> : max_threads((kMode == 1 ? 45 : 50) + kItems * kVec * ((kMode == 1 ? 3 : kMode == 2 ? 1 : 0) * (int)sizeof(T) + 2 * 4) / 4);
inline int g_trigger, g_items, g_mode, g_height, g_stages, g_threads;
template <typename T, int kVec, int kThreads, int kItems, bool kResidual, int kMode>
__global__ void __launch_bounds__(bmax<T, kVec, kItems, kMode>)
    layernorm_backward_ring_kernel(const LayernormBackward<T> p, int stages, int trigger) {
  using A = accumulate_t<T>;
  using R = Row<T, kVec, kItems, kThreads>;
  using Ring = RowRing<T, kVec, kItems, kThreads, kResidual ? 3 : 2>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int width = static_cast<int>(p.width);
  Ring ring(shared, {p.x, p.dout, p.dresidual}, p.rows, width, stages);
  if (trigger == 1) let_next_kernel_start();
  R weight;
  if constexpr (kMode != 3) {
  weight.fill(1);
  if (p.weight) weight.load(p.weight, width); }
  const auto get_weight = [&](A (&w)[kVec], int i) {
    if constexpr (kMode != 3) widen(w, weight.packs[i]);
    else { _Pragma("unroll") for (int k = 0; k < kVec; ++k) w[k] = 1;
      if (p.weight) load_wide<kVec>(w, p.weight + R::column(i)); } };
  int64_t row = Ring::first();
  A next_mean = row < p.rows ? p.mean[row] : A(0);
  A next_rstd = row < p.rows ? p.rstd[row] : A(0);

  A dweight[kItems][kVec] = {};
  A dbias[kItems][kVec] = {};
  T* dx = p.dx + row * width;
  for (int slot = 0; row < p.rows; row += Ring::step(), dx += Ring::step() * width, slot ^= 1) {
    if constexpr (kMode != 3) weight.stay_packed();
    const A mean = next_mean;
    const A rstd = next_rstd;
    if (row + Ring::step() < p.rows) {
      next_mean = p.mean[row + Ring::step()];
      next_rstd = p.rstd[row + Ring::step()];
    }
    const T* x_row = ring.next();
    const T* dout_row = x_row + ring.pitch();
    constexpr int kKeep = kMode == 0 ? kItems : 1;
    A norm[kKeep][kVec], gradient[kKeep][kVec];
    R xp, dp;
    if constexpr (kMode == 1) { xp.load(x_row, width); dp.load(dout_row, width); }
    A sums[2] = {};  // of g and of g * n
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!R::has(i, width)) continue;
      A w[kVec];
      const int j = kMode == 0 ? i : 0;
      if constexpr (kMode == 1) { widen(norm[j], xp.packs[i]); widen(gradient[j], dp.packs[i]); } else {
      load_wide<kVec>(norm[j], x_row + R::column(i));
      load_wide<kVec>(gradient[j], dout_row + R::column(i)); }
      get_weight(w, i);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        norm[j][k] = (norm[j][k] - mean) * rstd;
        dweight[i][k] += gradient[j][k] * norm[j][k];
        dbias[i][k] += gradient[j][k];
        gradient[j][k] = product(gradient[j][k], w[k]);
        sums[0] += gradient[j][k];
        sums[1] += gradient[j][k] * norm[j][k];
      }
    }
    if (p.dx == nullptr) continue;
    row_sums<kThreads>(sums, slot);
    if constexpr (kMode > 0) { if constexpr (kMode != 3) weight.stay_packed(); if constexpr (kMode == 1) { xp.stay_packed(); dp.stay_packed(); } else asm volatile("" ::: "memory"); }
    const A avg_g = sums[0] / A(width);
    const A avg_gn = sums[1] / A(width);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!R::has(i, width)) continue;
      const int j = kMode == 0 ? i : 0;
      if constexpr (kMode > 0) {
        A w[kVec];
      if constexpr (kMode == 1) { widen(norm[j], xp.packs[i]); widen(gradient[j], dp.packs[i]); } else {
      load_wide<kVec>(norm[j], x_row + R::column(i));
      load_wide<kVec>(gradient[j], dout_row + R::column(i)); }
      get_weight(w, i);
#pragma unroll
      for (int k = 0; k < kVec; ++k) { norm[j][k] = (norm[j][k] - mean) * rstd; gradient[j][k] = product(gradient[j][k], w[k]); }
      }
      A dresidual[kVec] = {};
      if constexpr (kResidual) load_wide<kVec>(dresidual, dout_row + ring.pitch() + R::column(i));
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        gradient[j][k] = (gradient[j][k] - avg_g - norm[j][k] * avg_gn) * rstd + dresidual[k];
      store_narrow<kVec>(dx + R::column(i), gradient[j]);
    }
  }
  if (trigger == 2) let_next_kernel_start();
  if (p.workspace) write_block_sums<R>(p, reinterpret_cast<A*>(shared), dweight, dbias);
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

template <typename T, int kVec>
constexpr int kBackwardMinItems = kIsFast<T, kVec> ? 1 : kBackwardMaxItems<kVec>;


template <int kVec, bool kResidual, int kMode, typename T>
unsigned launch_backward_ring_mode(const LayernormBackward<T>& p, Stream stream) {
  constexpr int kMin = kBackwardMinItems<T, kVec>;
  constexpr int kMax = kVec == 8 && kMode == 0 ? 5 : kBackwardMaxItems<kVec>;
  RowThreads row = row_threads<kVec, kMin, kMax, kMax>(
      p.width, [](auto items) { return bmax<T, kVec, items.value, kMode>; });
  if (g_items) { row.items = g_items; row.threads = ceil_div(ceil_div(ceil_div(p.width, kVec), g_items), 32) * 32; row.full = row.threads == 32 && p.width == 32 * row.items * kVec; }
  if (g_threads) row.threads = g_threads, row.full = g_threads == 32 && p.width == 32 * row.items * kVec;
  if (row.items == 0) return 0;
  unsigned blocks = 0;
  with_row_threads<kPart, kMin, kMax>(row, [&](auto threads, auto items) {
    constexpr auto kKernel = layernorm_backward_ring_kernel<T, kVec, threads.value, items.value, kResidual, kMode>;
    int64_t most = bmax<T, kVec, items.value, kMode>;
    if (g_height) most = std::min<int64_t>(most, g_height * row.threads);
    RingShape shape = ring_shape(p.rows, ring_row_bytes<T, kResidual ? 3 : 2>(p.width), row.threads,
                                       most, max_dynamic_shared_memory<kKernel>());
    if (shape.stages == 0) return;
    if (g_stages && g_stages < shape.stages) shape.stages = g_stages;
    const int64_t sums_bytes =
        int64_t(shape.block.x) * shape.block.y * 2 * items.value * kVec * sizeof(accumulate_t<T>);
    if (sums_bytes > max_dynamic_shared_memory<kKernel>()) return;
    if (getenv("SHOW")) printf("   [mode %d items %d block %dx%d grid %d stages %d regs-cap %d]\n", kMode, (int)items.value, shape.block.x, shape.block.y, shape.grid, shape.stages, 65536 / bmax<T, kVec, items.value, kMode>);
    kKernel<<<shape.grid, shape.block, std::max(shape.shared_bytes, sums_bytes), stream>>>(p, shape.stages, g_trigger);
    blocks = shape.grid;
  });
  return blocks;
}
template <int kVec, bool kResidual, typename T>
unsigned launch_backward_ring(const LayernormBackward<T>& p, Stream stream) {
  if constexpr (kVec > 1) {
  if constexpr (kVec == 8) if (g_mode == 3) return launch_backward_ring_mode<kVec, kResidual, 3>(p, stream);
  if (g_mode == 1) return launch_backward_ring_mode<kVec, kResidual, 1>(p, stream);
  if (g_mode == 2) return launch_backward_ring_mode<kVec, kResidual, 2>(p, stream); }
  return launch_backward_ring_mode<kVec, kResidual, 0>(p, stream);
}

// Rows of partial sums when the rows are too wide for the ring.
inline int64_t wide_partials(int64_t rows) {
  return std::clamp<int64_t>(rows / 16, 1, 64);
}

template <int kVec, bool kResidual, typename T>
void launch_backward(const LayernormBackward<T>& p, Stream stream) {
  int64_t partials = p.rows ? launch_backward_ring<kVec, kResidual>(p, stream) : 0;
  if (partials == 0) {
    partials = wide_partials(p.rows);
    if (p.dx && p.rows) layernorm_backward_wide_kernel<T, kVec><<<grid_size(p.rows), 1024, 0, stream>>>(p);
    constexpr int kThreads = 128;
    const dim3 grid(grid_size(ceil_div(p.width, kThreads)), static_cast<unsigned>(partials));
    if (p.workspace) layernorm_backward_columns_kernel<T><<<grid, kThreads, 0, stream>>>(p);
  }
  if (p.workspace)
    launch_partial_sums<T>({.first = p.dweight,
                            .second = p.dbias,
                            .partials = static_cast<const accumulate_t<T>*>(p.workspace),
                            .count = partials,
                            .width = 2 * p.width,
                            .split = p.width},
                           stream);
}

template <int kVec, typename T>
void launch_backward(const LayernormBackward<T>& p, Stream stream) {
  return p.dresidual ? launch_backward<kVec, true>(p, stream) : launch_backward<kVec, false>(p, stream);
}

template <int kVec, typename T>
void launch_forward(const LayernormForward<T>& p, Stream stream) {}
}  // namespace

template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, Stream stream) {
  if (p.rows == 0) return cudaSuccess;
  if (packs<T>(p.width, p.out, p.sum, p.x, p.residual, p.weight, p.bias))
    launch_forward<kPack<T>>(p, stream);
  else
    launch_forward<1>(p, stream);
  return cudaGetLastError();
}

// One row of partial sums a block, of which there is at most one a multiprocessor or, for wide rows, 64.
template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width) {
  const int64_t partials = std::max(std::clamp<int64_t>(rows, 1, multiprocessors()), wide_partials(rows));
  return partials * 2 * width * int64_t(sizeof(accumulate_t<T>));
}

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, Stream stream) {
  if (p.width == 0) return cudaSuccess;
  if (packs<T>(p.width, p.dx, p.dout, p.dresidual, p.x, p.weight))
    launch_backward<kPack<T>>(p, stream);
  else
    launch_backward<1>(p, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                           \
  template Status layernorm_forward<T>(const LayernormForward<T>&, Stream); \
  template int64_t layernorm_backward_workspace<T>(int64_t, int64_t);       \
  template Status layernorm_backward<T>(const LayernormBackward<T>&, Stream);
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)

}  // namespace gptkernels::cuda
extern "C" void ln_knobs(int mode, int items, int height, int stages, int threads, int trigger) { using namespace gptkernels::cuda; g_trigger = trigger; g_mode = mode; g_items = items; g_height = height; g_stages = stages; g_threads = threads; }
// extern "C" doors of one variant of layernorm.cu
using namespace gptkernels;
using namespace gptkernels::cuda;
template <typename T> static int fwd(void* out, void* mean, void* rstd, void* sum, const void* x, const void* res, const void* w, const void* b, int64_t rows, int64_t width, void* s) {
  using A = accumulate_t<T>;
  return layernorm_forward<T>({(T*)out,(A*)mean,(A*)rstd,(T*)sum,(const T*)x,(const T*)res,(const T*)w,(const T*)b,rows,width,1e-5},(Stream)s);
}
template <typename T> static int bwd(void* dx, void* dw, void* db, const void* dout, const void* dres, const void* x, const void* w, const void* mean, const void* rstd, void* ws, int64_t rows, int64_t width, void* s) {
  using A = accumulate_t<T>;
  return layernorm_backward<T>({(T*)dx,(T*)dw,(T*)db,(const T*)dout,(const T*)dres,(const T*)x,(const T*)w,(const A*)mean,(const A*)rstd,ws,rows,width},(Stream)s);
}
extern "C" int ln_fwd(int bf, void* out, void* mean, void* rstd, void* sum, const void* x, const void* res, const void* w, const void* b, int64_t rows, int64_t width, void* s) {
  return bf ? fwd<bfloat16>(out,mean,rstd,sum,x,res,w,b,rows,width,s) : fwd<float>(out,mean,rstd,sum,x,res,w,b,rows,width,s);
}
extern "C" int ln_bwd(int bf, void* dx, void* dw, void* db, const void* dout, const void* dres, const void* x, const void* w, const void* mean, const void* rstd, void* ws, int64_t rows, int64_t width, void* s) {
  return bf ? bwd<bfloat16>(dx,dw,db,dout,dres,x,w,mean,rstd,ws,rows,width,s) : bwd<float>(dx,dw,db,dout,dres,x,w,mean,rstd,ws,rows,width,s);
}
extern "C" int64_t ln_ws(int bf, int64_t rows, int64_t width) { return bf ? layernorm_backward_workspace<bfloat16>(rows,width) : layernorm_backward_workspace<float>(rows,width); }
