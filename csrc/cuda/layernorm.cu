#include <limits>

#include "../layernorm.h"
#include "partial_sums.cuh"
#include "row_ring.cuh"

namespace gptkernels::cuda {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Forward: reads x once, writes out once; 2 * N * C * sizeof(T) bytes and 8 bytes of statistics a row. A residual is
// read once more, and the sum written: twice those bytes, which is what an addition by itself would take as well.
//
// A float32 mean is off by a rounding, as large as |mean| * 2^-24. That rest (`rest`, the average of x - mean) is known
// too, so that an offset in x costs no digits.

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

// Four bytes of a sector of 32, whose other bytes come from other rows within microseconds. Every such piece costs
// about as much as a whole sector (65536x768 bfloat16: 3 % of the time for 0.3 % of the bytes), less where it is what
// the L2 cache parts with last.
__device__ void store_piece(float* p, float value) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(p), "f"(value), "l"(policy) : "memory");
}
__device__ void store_piece(double* p, double value) {
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

// The most elements a thread that stay widened from one pass to the next: beyond, 16-bit rows would fill the registers.
constexpr int kWidened = 40;

// The most threads of a block by the registers that its packs take.
template <typename T, int kVec, int kItems>
constexpr int kForwardMaxThreads =
    max_threads(12 * sizeof(accumulate_t<T>) + kItems * kVec * (3 * sizeof(T) + sizeof(accumulate_t<T>)) / 4);

// What is beyond the row's end stays out of the sums. `inverse` is 1 / C.
template <typename T, int kVec, int kItems, int kThreads, bool kWhole>
__device__ Moments<accumulate_t<T>> row_moments(Row<T, kVec, kItems, kThreads, kWhole>& row, int width,
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
template <typename T, int kVec, int kItems, int kThreads, bool kWhole>
__device__ void add_residual(const LayernormForward<T>& p, int64_t row, Row<T, kVec, kItems, kThreads, kWhole>& x,
                             const Row<T, kVec, kItems, kThreads, kWhole>& residual) {
  T* sum = p.sum + row * p.width;
  x.update(static_cast<int>(p.width), [&](int i, accumulate_t<T>(&x)[kVec]) {
    accumulate_t<T> r[kVec];
    widen(r, residual.packs[i]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) x[k] += r[k];
    store_narrow<kVec>(sum + residual.column(i), x);
  });
}

// kVec columns of weight and bias, ones and zeros where there are none.
template <int kVec, typename T>
__device__ void load_affine(accumulate_t<T> (&weight)[kVec], accumulate_t<T> (&bias)[kVec],
                            const LayernormForward<T>& p, int column) {
#pragma unroll
  for (int k = 0; k < kVec; ++k) weight[k] = 1, bias[k] = 0;
  if (p.weight) load_wide<kVec>(weight, p.weight + column);
  if (p.bias) load_wide<kVec>(bias, p.bias + column);
}

// A row a thread group, and no more: small blocks that come and go keep reads and writes evenly mixed. The row stays in
// registers between its load and its store, so the variance is taken about the mean in a second pass that costs no
// memory traffic. Weight and bias are asked for pack by pack, when they are needed: so the registers hold more rows,
// and the L1 cache has them.
template <typename T, int kVec, int kThreads, bool kWhole, int kItems, bool kResidual>
__global__ void __launch_bounds__(kForwardMaxThreads<T, kVec, kItems>)
    layernorm_forward_registers_kernel(const LayernormForward<T> p, accumulate_t<T> inverse) {
  using A = accumulate_t<T>;
  const int width = static_cast<int>(p.width);
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  Row<T, kVec, kItems, kThreads, kWhole> packs, residual;
  packs.load(p.x + row * width, width);
  if constexpr (kResidual) {
    residual.load(p.residual + row * width, width);
    add_residual(p, row, packs, residual);
  }
  const Moments<A> m = row_moments(packs, width, inverse, p.eps);
  write_statistics(p, row, m);
  const A offset = -m.rest * m.rstd;
  T* out = p.out + row * width;
  packs.each(width, [&](int i, A(&x)[kVec]) {
    A weight[kVec], bias[kVec];
    load_affine(weight, bias, p, packs.column(i));
#pragma unroll
    for (int k = 0; k < kVec; ++k) x[k] = ((x[k] - m.mean) * m.rstd + offset) * weight[k] + bias[k];
    store_narrow<kVec>(out + packs.column(i), x);
  });
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

constexpr int kForwardMaxItems = 4;  // of a row of several warps

// Of a row of one warp.
template <typename T, int kVec>
constexpr int kForwardMaxWarpItems = kIsFast<T, kVec> ? 7 : kForwardMaxItems;

// Whether all rows are at once on the multiprocessors.
inline bool few_rows(int64_t rows) {
  return rows < 64 * int64_t(multiprocessors());
}

// A residual changes nothing here: the norm of a sum has the same bits either way.
template <typename T, int kVec>
RowThreads forward_row_threads(int64_t rows, int64_t width) {
  constexpr int kMin = kForwardMinItems<T, kVec>;
  constexpr int kMaxWarp = kForwardMaxWarpItems<T, kVec>;
  const auto max_threads = [](auto items) { return kForwardMaxThreads<T, kVec, items.value>; };
  // Two warps a row of 768 float32 have enough to do and are gone sooner, if there are enough rows to follow.
  if (kVec == 4 && !few_rows(rows))
    return row_threads<kBlock, kVec, kMin, kForwardMaxItems, std::min(kMaxWarp, 5)>(width, max_threads);
  return row_threads<kBlock, kVec, kMin, kForwardMaxItems, kMaxWarp>(width, max_threads);
}

// Rows of one warp a block. Blocks of some 3 KB keep reads and writes best mixed; where all rows are at once on the
// multiprocessors, the launch of blocks is what takes the time, and there are fewer.
inline unsigned forward_block_rows(int64_t rows, int threads, int64_t row_bytes) {
  if (threads > kWarp) return 1;
  return few_rows(rows) ? 4 : static_cast<unsigned>(std::clamp<int64_t>(3072 / row_bytes, 1, 4));
}

template <bool kResidual, int kVec, typename T>
void launch_forward(const LayernormForward<T>& p, Stream stream) {
  const RowThreads row = forward_row_threads<T, kVec>(p.rows, p.width);
  if (row.items == 0 || p.rows > std::numeric_limits<int>::max()) {  // a grid has no more blocks
    layernorm_forward_wide_kernel<T, kVec><<<grid_size(p.rows), 1024, 0, stream>>>(p);
    return;
  }
  const int64_t row_bytes = (kResidual ? 2 : 1) * std::max<int64_t>(p.width, 1) * int64_t(sizeof(T));
  const dim3 block(row.threads, forward_block_rows(p.rows, row.threads, row_bytes));
  const unsigned grid = grid_size(ceil_div(p.rows, block.y));
  with_row_threads<kBlock, kForwardMinItems<T, kVec>, kForwardMaxItems, kForwardMaxWarpItems<T, kVec>>(
      row, [&](auto threads, auto whole, auto items) {
        layernorm_forward_registers_kernel<T, kVec, threads.value, whole.value, items.value, kResidual>
            <<<grid, block, 0, stream>>>(p, 1 / accumulate_t<T>(p.width));
      });
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
// or of more than kWidened elements their 16-bit packs, beside some 40 (float64: 80) for everything else.
constexpr int kBackwardMaxItems = 4;  // of a row of several warps

// Of a row of one warp. With a third array to wait for, more warps are worth their barriers.
template <typename T, int kVec, bool kResidual>
constexpr int kBackwardMaxWarpItems = !kIsFast<T, kVec>        ? kBackwardMaxItems
                                      : kVec == 8 && kResidual ? 5
                                                               : 7;

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

template <typename T, int kVec, int kThreads, bool kWhole, int kItems, bool kResidual>
__global__ void __launch_bounds__(kBackwardMaxThreads<T, kVec, kItems, kResidual>)
    layernorm_backward_ring_kernel(const LayernormBackward<T> p, int stages) {
  using A = accumulate_t<T>;
  using R = Row<T, kVec, kItems, kThreads, kWhole>;
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

template <typename T, int kVec>
constexpr int kBackwardMinItems = kIsFast<T, kVec> ? 1 : kBackwardMaxItems;

// Launches the ring kernel if its rows fit; the blocks, and so the rows of partial sums, that it has launched.
template <int kVec, bool kResidual, typename T>
unsigned launch_backward_ring(const LayernormBackward<T>& p, Stream stream) {
  constexpr int kMin = kBackwardMinItems<T, kVec>;
  constexpr int kMax = kBackwardMaxItems;
  constexpr int kMaxWarp = kBackwardMaxWarpItems<T, kVec, kResidual>;
  const RowThreads row = row_threads<kPart, kVec, kMin, kMax, kMaxWarp>(
      p.width, [](auto items) { return kBackwardMaxThreads<T, kVec, items.value, kResidual>; });
  if (row.items == 0) return 0;
  unsigned blocks = 0;
  with_row_threads<kPart, kMin, kMax, kMaxWarp>(row, [&](auto threads, auto whole, auto items) {
    constexpr auto kKernel =
        layernorm_backward_ring_kernel<T, kVec, threads.value, whole.value, items.value, kResidual>;
    const RingShape shape =
        ring_shape(p.rows, ring_row_bytes<T, kResidual ? 3 : 2>(p.width), row.threads,
                   kBackwardMaxThreads<T, kVec, items.value, kResidual>, max_dynamic_shared_memory<kKernel>());
    if (shape.stages == 0) return;
    const int64_t sums_bytes =
        int64_t(shape.block.x) * shape.block.y * 2 * items.value * kVec * sizeof(accumulate_t<T>);
    kKernel<<<shape.grid, shape.block, std::max(shape.shared_bytes, sums_bytes), stream>>>(p, shape.stages);
    blocks = shape.grid;
  });
  return blocks;
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
void launch_forward(const LayernormForward<T>& p, Stream stream) {
  return p.residual ? launch_forward<true, kVec>(p, stream) : launch_forward<false, kVec>(p, stream);
}

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
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cuda
