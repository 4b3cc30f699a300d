// Tiles in shared memory, the two matmuls, softmax, masks and dropout of the attention kernels with mma.sync.
//
// A warp computes 16 * kM rows of scores and the same rows of the results, so its exponentials stay in registers as the
// A operand of the second matmul. Rows are queries in the forward and in the kernel for dq, and keys in the kernel for
// dk and dv.
#pragma once

#include <climits>
#include <cmath>

#include "../../../attention.h"
#include "../../../philox.h"
#include "cuda/attention/lowest_bias.cuh"
#include "cuda/attention/tile_order.cuh"
#include "cuda/common/approximate.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/elementwise/dropout.cuh"
#include "cuda/ptx/sm80.cuh"

namespace gptkernels::cuda {

// ---- a warp's accumulators ------------------------------------------------------------------------------------------

// float[kM][kN][4] holds kM x kN accumulator tiles of 16 rows and 8 columns. A lane's element (m, n, 2 * r + c) is in
// row 16 * m + 8 * r + lane / 4 and column 8 * n + lane % 4 * 2 + c.

template <int kM, typename Apply>
__device__ void for_rows(const Apply& apply) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) apply(m, r);
}

template <int kN, typename Apply>
__device__ void for_columns(const Apply& apply) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) apply(n, c);
}

template <int kM, int kN, typename Apply>
__device__ void for_elements(float (&d)[kM][kN][4], const Apply& apply) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) apply(d[m][n][e], m, n, e);
}

template <int kM, int kN>
__device__ void clear(float (&d)[kM][kN][4]) {
  for_elements(d, [](float& x, int, int, int) { x = 0; });
}

// ---- tiles in shared memory -----------------------------------------------------------------------------------------

// Elements beyond the head size are 0. The 16-byte chunks of a row are permuted, so that the chunks with the same index
// in 8 neighbouring rows are in different banks.
template <typename T, int HS>
struct MmaRows {
  static constexpr int kBytes = HS * sizeof(T);
  static constexpr int kChunks = kBytes / 16;
  static constexpr int kSteps = kBytes / 32;
  static constexpr int kSpread = kBytes >= 128 ? 8 : kChunks;

  __device__ static uint32_t swizzle(int row) { return row / (8 / kSpread) % kSpread; }
  __device__ static uint32_t at(int row, int chunk) { return row * kBytes + ((chunk ^ swizzle(row)) * 16); }
};

// Rows outside [begin, end) and columns beyond the head size become 0.
template <typename T, int HS, int kRows, int kThreads>
__device__ void copy_rows(uint32_t shared, const T* global, int64_t stride, int begin, int end, int head_size) {
  using Rows = MmaRows<T, HS>;
  constexpr int kStep = kThreads / Rows::kChunks;
  static_assert(kThreads % Rows::kChunks == 0 && kRows % kStep == 0);
  const int chunk = threadIdx.x % Rows::kChunks, first = threadIdx.x / Rows::kChunks;
  const bool column = chunk * kPack<T> < head_size;
  const T* from = global + first * stride + chunk * kPack<T>;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep) {
    const bool inside = column && first + r >= begin && first + r < end;
    copy_async_16(shared + Rows::at(first + r, chunk), inside ? from : global, inside);
    from += kStep * stride;
  }
}

__device__ inline float4 round_to_tf32(const float4& x) {
  return {__uint_as_float(round_to_tf32(x.x)), __uint_as_float(round_to_tf32(x.y)), __uint_as_float(round_to_tf32(x.z)),
          __uint_as_float(round_to_tf32(x.w))};
}

// Each thread rounds the chunks that it has copied itself, and needs no barrier.
template <typename T, int HS, bool kExact, int kRows, int kThreads>
__device__ void round_rows(uint8_t* shared) {
  if constexpr (std::is_same_v<T, float> && !kExact) {
    using Rows = MmaRows<T, HS>;
    constexpr int kStep = kThreads / Rows::kChunks;
    const int chunk = threadIdx.x % Rows::kChunks, first = threadIdx.x / Rows::kChunks;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
      float4& own = *reinterpret_cast<float4*>(shared + Rows::at(first + r, chunk));
      own = round_to_tf32(own);
    }
  }
}

// ---- operands of MMAs -----------------------------------------------------------------------------------------------

// A step is the 32 bytes of each row that one MMA multiplies: 16 elements of 2 bytes, or 8 of float32.

template <typename T, int HS>
__device__ void load_a(uint32_t (&a)[4], uint32_t shared, int row, int step) {
  const int lane = threadIdx.x % 32;
  load_matrices(a, shared + MmaRows<T, HS>::at(row + lane % 16, 2 * step + lane / 16));
}

// The 16 rows from `row` on become the columns of two B operands: rows 0 to 7 in b[0..1], rows 8 to 15 in b[2..3].
template <typename T, int HS>
__device__ void load_b(uint32_t (&b)[4], uint32_t shared, int row, int step) {
  const int lane = threadIdx.x % 32;
  load_matrices(b, shared + MmaRows<T, HS>::at(row + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
}

// Loads two B operands of 8 columns each, from 16 rows of 2-byte elements or 8 rows of float32. The 8 rows of float32
// are in the order 0, 2, 4, 6, 1, 3, 5, 7 (see to_a()).
template <typename T, int HS>
__device__ void load_b_rows(uint32_t (&b)[4], uint32_t shared, int row, int column) {
  using Rows = MmaRows<T, HS>;
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    load_matrices_transposed(b, shared + Rows::at(row + lane % 16, column / 8 + lane / 16));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      b[i] = load_word(shared + Rows::at(row + lane % 4 * 2 + i % 2, column / 4 + i / 2 * 2 + lane / 16) +
                       lane / 4 % 4 * 4);
  }
}

// Converts two accumulator tiles (of float32: one) to an A operand. For TF32, a lane holds columns 2 * t and 2 * t + 1
// of the accumulators (t = lane % 4), but needs columns t and t + 4 of A. Since a sum's terms may be in any order,
// column 2 * t becomes column t, column 2 * t + 1 becomes column t + 4, and lanes exchange nothing.
template <typename T>
__device__ void to_a(uint32_t (&a)[4], const float (*d)[4]) {
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = round_to_tf32(d[0][i / 2 + i % 2 * 2]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Packed<T, 2> pair = narrow<T, 2>({d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1]});
      a[i] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
}

template <typename T, int HS, int kM, bool kKeep>
struct RowOperand {
  static constexpr int kSteps = MmaRows<T, HS>::kSteps;
  uint32_t kept[kKeep ? kM : 1][kKeep ? kSteps : 1][4];
  uint32_t shared;
  int row;

  __device__ RowOperand(uint32_t tile, int first_row) : shared(tile), row(first_row) {
    if constexpr (kKeep)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_a<T, HS>(kept[m][step], shared, row + 16 * m, step);
  }
  __device__ void get(uint32_t (&a)[4], int m, int step) const {
    if constexpr (kKeep) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = kept[m][step][i];
    } else {
      load_a<T, HS>(a, shared, row + 16 * m, step);
    }
  }
};

// ---- exact float32 --------------------------------------------------------------------------------------------------

// Float32 matmuls by TF32 MMAs, about as exact as float32 FMAs. An operand x is split into two TF32 numbers, x = hi +
// lo, and a product is hi * hi + hi * lo + lo * hi. The omitted lo * lo is at most 2^-22 of the product.
//
// Tensor cores truncate their sums towards 0, so the errors of long sums would add up. Therefore MMAs sum hi * hi over
// only one step in multiply_transposed_exactly(), because the backward subtracts the logsumexp from the scores, and
// over kExactSteps steps in add_product_exactly(). These sums are added in float32, which rounds to nearest. hi * lo
// and lo * hi have a separate accumulator.
constexpr int kExactSteps = 4;

struct SplitOperand {
  uint32_t hi[4];
  uint32_t lo[4];

  __device__ void split(const uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(x[i], hi[i], lo[i]);
  }
};

// large += hi * hi, small += hi * lo + lo * hi; with kFour, small += lo * lo, too. MMAs that add to the same
// accumulator are not adjacent, because the second one would wait.
template <bool kFour>
__device__ void multiply_split(float (*large)[4], float (*small)[4], const SplitOperand& a, const SplitOperand& b) {
  if constexpr (kFour) {
    mma<float>(small[0], a.lo, b.lo[0], b.lo[1]);
    mma<float>(small[1], a.lo, b.lo[2], b.lo[3]);
  }
  mma<float>(small[0], a.hi, b.lo[0], b.lo[1]);
  mma<float>(small[1], a.hi, b.lo[2], b.lo[3]);
  mma<float>(large[0], a.hi, b.hi[0], b.hi[1]);
  mma<float>(large[1], a.hi, b.hi[2], b.hi[3]);
  mma<float>(small[0], a.lo, b.hi[0], b.hi[1]);
  mma<float>(small[1], a.lo, b.hi[2], b.hi[3]);
}

// If an operand is infinite, its lo and the sum of small terms are NaN. The sum of hi * hi is then already correct, and
// adding a finite number does not change it.
__device__ inline float unless_nan(float small) {
  return fminf(small, 3.402823466e38f);
}

// The loop runs to a multiple of kExactSteps; elements beyond the head size are 0.
template <int HS, int kM, int kN>
__device__ void multiply_transposed_exactly(float (&d)[kM][kN][4], const RowOperand<float, HS, kM, false>& rows,
                                            uint32_t tile, int head_size) {
  // For sums of at most 32 terms, three MMAs per step are less exact than FMAs, and four MMAs are as exact.
  constexpr bool kFour = HS <= 32;
  const int steps = (head_size + 7) / 8;
  float small[kM][kN][4];
  clear(d);
  clear(small);
#pragma unroll 1  // the unrolled loop would need too many registers
  for (int chunk = 0; chunk < steps; chunk += kExactSteps) {
#pragma unroll
    for (int step = chunk; step < chunk + kExactSteps; ++step) {
      float large[kM][kN][4];
      clear(large);
      SplitOperand a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        uint32_t words[4];
        rows.get(words, m, step);
        a[m].split(words);
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t words[4];
        load_b<float, HS>(words, tile, 8 * n, step);
        SplitOperand b;
        b.split(words);
#pragma unroll
        for (int m = 0; m < kM; ++m) multiply_split<kFour>(&large[m][n], &small[m][n], a[m], b);
      }
      for_elements(d, [&](float& x, int m, int n, int e) { x += large[m][n][e]; });
    }
  }
  for_elements(d, [&](float& x, int m, int n, int e) { x += unless_nan(small[m][n][e]); });
}

template <int HS, int kM, int kN, int kOut>
__device__ void add_product_exactly(float (&sums)[kM][kOut][4], const float (&weights)[kM][kN][4], uint32_t tile,
                                    int column) {
  constexpr int kSteps = kN < kExactSteps ? kN : kExactSteps;
#pragma unroll
  for (int chunk = 0; chunk < kN; chunk += kSteps) {
    SplitOperand a[kM][kSteps];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        const float (&d)[4] = weights[m][chunk + n];  // in the order of to_a
        a[m][n].split({__float_as_uint(d[0]), __float_as_uint(d[2]), __float_as_uint(d[1]), __float_as_uint(d[3])});
      }
#pragma unroll
    for (int o = 0; o < kOut; o += 2) {
      float large[kM][2][4], small[kM][2][4];
      clear(large);
      clear(small);
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        uint32_t words[4];
        load_b_rows<float, HS>(words, tile, 8 * (chunk + n), column + 8 * o);
        SplitOperand b;
        b.split(words);
#pragma unroll
        for (int m = 0; m < kM; ++m) multiply_split<false>(large[m], small[m], a[m][n], b);
      }
      for_elements(large, [&](float& x, int m, int i, int e) { sums[m][o + i][e] += x + unless_nan(small[m][i][e]); });
    }
  }
}

// ---- the two matmuls ------------------------------------------------------------------------------------------------

// d = rows * tile', where the tile has 8 * kN rows. Without kExact, float32 is multiplied as TF32.
template <typename T, int HS, bool kExact, int kM, int kN, bool kKeep>
__device__ void multiply_transposed(float (&d)[kM][kN][4], const RowOperand<T, HS, kM, kKeep>& rows, uint32_t tile,
                                    int head_size) {
  if constexpr (kExact) {
    multiply_transposed_exactly(d, rows, tile, head_size);
    return;
  }
  clear(d);
#pragma unroll
  for (int step = 0; step < MmaRows<T, HS>::kSteps; ++step) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) rows.get(a[m], m, step);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      load_b<T, HS>(b, tile, 8 * n, step);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma<T>(d[m][n], a[m], b[0], b[1]);
        mma<T>(d[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// sums += weights * tile, for the tile's 8 * kN rows and 8 * kOut columns from `column` on.
template <typename T, int HS, bool kExact, int kM, int kN, int kOut>
__device__ void add_product(float (&sums)[kM][kOut][4], const float (&weights)[kM][kN][4], uint32_t tile, int column) {
  if constexpr (kExact) {
    add_product_exactly<HS>(sums, weights, tile, column);
    return;
  }
  constexpr int kTilesOfStep = sizeof(T) == 2 ? 2 : 1;
#pragma unroll
  for (int n = 0; n < kN; n += kTilesOfStep) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) to_a<T>(a[m], &weights[m][n]);
#pragma unroll
    for (int o = 0; o < kOut; o += 2) {
      uint32_t b[4];
      load_b_rows<T, HS>(b, tile, 8 * n, column + 8 * o);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma<T>(sums[m][o], a[m], b[0], b[1]);
        mma<T>(sums[m][o + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Stores `sums * factor` in the first `rows` rows at `global`, from `column` on. The results pass through the warp's
// rows of `tile` in shared memory, which no warp may read any more.
template <typename T, int HS, int kM, int kOut>
__device__ void store_rows(uint8_t* tile, int first_row, const float (&sums)[kM][kOut][4], const float (&factor)[kM][2],
                           int column, T* global, int64_t stride, int rows, int head_size) {
  using Rows = MmaRows<T, HS>;
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int o = 0; o < kOut; ++o)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int byte = (column + 8 * o + lane % 4 * 2) * static_cast<int>(sizeof(T));
        const float f = factor[m][r];
        *reinterpret_cast<Packed<T, 2>*>(tile + Rows::at(first_row + 16 * m + 8 * r + lane / 4, byte / 16) +
                                         byte % 16) = narrow<T, 2>({sums[m][o][2 * r] * f, sums[m][o][2 * r + 1] * f});
      }
  __syncwarp();
  constexpr int kChunks = 8 * kOut / kPack<T>;
#pragma unroll 4
  for (int i = lane; i < 16 * kM * kChunks; i += 32) {
    const int row = i / kChunks, chunk = column / kPack<T> + i % kChunks;
    if (row < rows && chunk * kPack<T> < head_size)
      *reinterpret_cast<uint4*>(global + row * stride + chunk * kPack<T>) =
          *reinterpret_cast<const uint4*>(tile + Rows::at(first_row + row, chunk));
  }
}

// ---- the softmax ----------------------------------------------------------------------------------------------------

// Online softmax: replaces scores by exponentials relative to the row's maximum so far. `sum` is this thread's part of
// the row's sum. The caller must multiply the row's results by `rescale`. Returns whether any of the thread's maxima
// has changed. `factor` converts scores to exponents of 2.
//
// With kExact the maximum is subtracted first, so that the largest exponential is exactly 1. Otherwise one FMA computes
// score * factor - maximum * factor, unless maximum * factor is so large that its rounding would matter.
template <typename T, bool kExact, int kM, int kN>
__device__ bool add_exponentials(float (&scores)[kM][kN][4], float (&maximum)[kM][2], float (&sum)[kM][2],
                                 float (&rescale)[kM][2], float factor) {
  bool changed = false;
  for_rows<kM>([&](int m, int r) {
    float largest = maximum[m][r];
#pragma unroll
    for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
    largest = warp_reduce<FiniteMax, 4>(largest);
    const float finite = largest == -INFINITY ? 0 : largest;
    float origin = kExact ? finite : finite * factor;
    rescale[m][r] = exp2_approximately((maximum[m][r] - finite) * factor);
    changed |= largest != maximum[m][r];
    maximum[m][r] = largest;
    if (!kExact && fabsf(origin) > kFarFromZero<T>) {
      for_columns<kN>([&](int n, int c) { scores[m][n][2 * r + c] -= finite; });
      origin = 0;
    }
    float part = 0;
    for_columns<kN>([&](int n, int c) {
      float& score = scores[m][n][2 * r + c];
      score = exp2_approximately(kExact ? (score - origin) * factor : fmaf(score, factor, -origin));
      part += score;
    });
    sum[m][r] = sum[m][r] * rescale[m][r] + part;
  });
  return changed;
}

// ---- which columns count --------------------------------------------------------------------------------------------

template <bool kGeneral>
struct KeyBounds {
  int begin;
  int end;

  template <typename T>
  __device__ KeyBounds(const AttentionMask<T>& mask, const AttentionSizes& s, int64_t b)
      : begin(0), end(static_cast<int>(s.keys)) {
    if (kGeneral && mask.key_begin) begin = max(begin, mask.key_begin[b]);
    if (kGeneral && mask.key_end) end = min(end, mask.key_end[b]);
  }
};

template <int kM, int kN>
__device__ void keep_columns(float (&scores)[kM][kN][4], const int (&low)[kM][2], const int (&high)[kM][2], int first) {
  const int lane = threadIdx.x % 32;
  for_elements(scores, [&](float& score, int m, int n, int e) {
    const int column = first + 8 * n + lane % 4 * 2 + e % 2;
    if (column < low[m][e / 2] || column >= high[m][e / 2]) score = -INFINITY;
  });
}

template <int kM, int kN>
__device__ void scale_scores(float (&scores)[kM][kN][4], float factor) {
  for_elements(scores, [&](float& score, int, int, int) { score *= factor; });
}

// The factor that converts scores to exponents of 2. It is 1 if the kernel calls scale_scores() first: if there is a
// bool or additive mask, or if the scale is not positive, because the largest dot product then need not have the
// largest score.
template <bool kGeneral, typename T>
__device__ float score_factor(const AttentionMask<T>& mask, double scale) {
  const bool scaled = kGeneral && (scale <= 0 || mask.allowed || mask.bias);
  return scaled ? 1 : static_cast<float>(scale * 1.4426950408889634);
}

template <typename T>
__device__ void add_mask_element(float& score, const AttentionMask<T>& mask, int64_t at) {
  if (mask.allowed) {
    if (!mask.allowed[at]) score = -INFINITY;
  } else {
    score = add_bias(score, static_cast<float>(mask.bias[at]));
  }
}

// Calls apply(m, n, e, element) for each of the thread's scores. `mask` points to the head's first mask element. Scores
// beyond the last row or column are not used, and get another score's element.
template <bool kPairs, int kM, int kN, typename M, typename Apply>
__device__ void for_mask(const M* mask, int row, int rows, int64_t row_stride, int column, int columns,
                         int64_t column_stride, const Apply& apply) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const M* own = mask + min(row + 16 * m + 8 * r + lane / 4, rows - 1) * row_stride;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int j = column + 8 * n + lane % 4 * 2;
        if constexpr (kPairs) {
          const Packed<M, 2> pair = load<2>(own + min(j, columns - 2));
          apply(m, n, 2 * r, pair.v[0]);
          apply(m, n, 2 * r + 1, pair.v[1]);
        } else {
          apply(m, n, 2 * r, own[min(j, columns - 1) * column_stride]);
          apply(m, n, 2 * r + 1, own[min(j + 1, columns - 1) * column_stride]);
        }
      }
    }
}

template <int kM, int kN, typename M, typename Apply>
__device__ void for_mask(const M* mask, int row, int rows, int64_t row_stride, int column, int columns,
                         int64_t column_stride, const Apply& apply) {
  const bool pairs = column_stride == 1 && reinterpret_cast<uintptr_t>(mask) % (2 * sizeof(M)) == 0 &&
                     row_stride % 2 == 0 && columns % 2 == 0;
  if (pairs)
    for_mask<true, kM, kN>(mask, row, rows, row_stride, column, columns, column_stride, apply);
  else
    for_mask<false, kM, kN>(mask, row, rows, row_stride, column, columns, column_stride, apply);
}

// Scores are in units of log2; `base` is the index of the head's first mask element.
template <typename T, int kM, int kN>
__device__ void add_mask(float (&scores)[kM][kN][4], const AttentionMask<T>& mask, int64_t base, int row, int rows,
                         int64_t row_stride, int column, int columns, int64_t column_stride) {
  if (mask.allowed)
    for_mask<kM, kN>(mask.allowed + base, row, rows, row_stride, column, columns, column_stride,
                     [&](int m, int n, int e, bool allowed) {
                       if (!allowed) scores[m][n][e] = -INFINITY;
                     });
  else
    for_mask<kM, kN>(
        mask.bias + base, row, rows, row_stride, column, columns, column_stride,
        [&](int m, int n, int e, T bias) { scores[m][n][e] = add_bias(scores[m][n][e], static_cast<float>(bias)); });
}

// ---- dropout --------------------------------------------------------------------------------------------------------

// Rows are queries, columns are keys. A thread's 8 elements of two neighbouring accumulator tiles are one group of
// philox.h. `head` is DropoutDraw::head_number().
template <int kM, int kN, typename Drop>
__device__ void for_dropped(const DropoutDraw& dropout, uint32_t head, int query, int key, const Drop& drop) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const PhiloxWords words =
          dropout_words(dropout.seed, dropout.offset, head, dropout.first_group_row + (query + 16 * m) / 2 + lane / 4,
                        (key + 8 * n) / 4 + lane % 4);
#pragma unroll
      for (int slot = 0; slot < 8; ++slot)
        if (sixteen_bits(words, slot) < dropout.threshold) drop(m, n + slot / 2 % 2, slot / 4 * 2 + slot % 2);
    }
}

// Rows are keys, columns are queries. Two lanes with neighbouring keys need halves of the same two groups: each lane
// draws one group, and the lanes exchange words.
template <int kM, int kN, typename Drop>
__device__ void for_dropped_transposed(const DropoutDraw& dropout, uint32_t head, int key, int query,
                                       const Drop& drop) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane / 4 % 2;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const PhiloxWords own = dropout_words(dropout.seed, dropout.offset, head,
                                            dropout.first_group_row + (query + 8 * n) / 2 + lane % 4 * 2 + odd,
                                            (key + 16 * m) / 4 + lane / 8);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t other = __shfl_xor_sync(~0u, own.word[w], 4);
        const uint32_t words[2] = {odd ? other : own.word[w], odd ? own.word[w] : other};
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if ((words[c] >> (odd ? 16 : 0) & 0xFFFFu) < dropout.threshold) drop(m, n + w / 2, w % 2 * 2 + c);
      }
    }
}

// ---- the order of thread blocks -------------------------------------------------------------------------------------

template <typename T>
HeadTiles mma_order(int64_t tiles, int64_t heads, int64_t rows, int64_t head_size, bool longest_last) {
  constexpr int64_t kSectionBytes = 32 << 20;
  return HeadTiles::of(tiles, heads, 2 * rows * head_size * static_cast<int64_t>(sizeof(T)), longest_last,
                       kSectionBytes);
}

// ---- which calls the kernels support --------------------------------------------------------------------------------

template <typename T>
bool suits_chunks(const HeadsView<T>& t) {
  constexpr int kElements = kPack<std::remove_const_t<T>>;
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.batch % kElements == 0 && t.head % kElements == 0 &&
         t.token % kElements == 0;
}

template <auto kKernel>
bool built_for_mma() {
  return once_a_device([](int) {
           cudaFuncAttributes attributes = {};
           cudaFuncGetAttributes(&attributes, kKernel);
           return attributes.ptxVersion;
         }) >= 80;
}

// With more than 128 channels of float32, shared memory holds too few rows for these kernels to be faster than simple/.
template <typename T>
constexpr int kMmaLargestHead = sizeof(T) == 2 ? 256 : 128;

// Exact float32 with fewer keys (in the backward, also with fewer queries) is left to simple/, whose FMAs are then more
// exact than MMAs, and as fast.
constexpr int64_t kFewestExact = 64;

template <typename T, typename Params>
bool mma_supports(const Params& p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  const AttentionSizes& s = p.sizes;
  return (sizeof(T) == 2 || p.tf32 || s.keys >= kFewestExact) && s.head_size % 8 == 0 &&
         s.head_size <= kMmaLargestHead<T> && std::abs(p.mask.query_offset) < kLargest && s.queries < kLargest &&
         s.keys < kLargest && s.batches * s.heads * ceil_div(max(s.queries, s.keys), int64_t{16}) < kLargest &&
         suits_chunks(p.query) && suits_chunks(p.key) && suits_chunks(p.value) && suits_chunks(p.out);
}

template <typename T, typename Params>
bool is_plain(const Params& p) {
  return p.scale > 0 && p.dropout.probability == 0 && !p.mask.key_begin && !p.mask.key_end && !p.mask.allowed &&
         !p.mask.bias;
}

// Calls that are not plain (is_plain()) need kGeneral. Kernels without kGeneral are compiled only for an HS of 64 or
// 128, the usual head sizes.
template <typename T, bool kExact, typename Fn>
Status for_mma_shape(int64_t head_size, bool plain, const Fn& fn) {
  if (head_size <= 32) return fn.template operator()<32, true, kExact>();
  if (head_size <= 64)
    return plain ? fn.template operator()<64, false, kExact>() : fn.template operator()<64, true, kExact>();
  if constexpr (kMmaLargestHead<T> > 128)
    if (head_size > 128) return fn.template operator()<256, true, kExact>();
  return plain ? fn.template operator()<128, false, kExact>() : fn.template operator()<128, true, kExact>();
}

template <typename T, typename Fn>
Status for_mma_shape(int64_t head_size, bool plain, bool tf32, const Fn& fn) {
  if constexpr (std::is_same_v<T, float>)
    if (!tf32) return for_mma_shape<T, true>(head_size, plain, fn);
  return for_mma_shape<T, false>(head_size, plain, fn);
}

}  // namespace gptkernels::cuda
