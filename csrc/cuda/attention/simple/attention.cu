// Attention by ordinary multiply-adds, for every dtype, head size, mask and device: what float64 uses, and whatever the
// tensor cores' kernels do not serve. Tiles of 64 queries by 64 keys; a thread of 256 has 4 x 4 of a tile's scores, at
// rows 4 * ty + i and columns tx + 16 * j.
#include <type_traits>

#include "cuda/attention/logsumexp_correction.cuh"
#include "cuda/attention/lowest_bias.cuh"
#include "cuda/attention/variants.h"
#include "cuda/common/launch.cuh"
#include "cuda/elementwise/dropout.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kSimtTile = 64;
constexpr int kSimtThreads = 256;

// ---- what a query sees, and what dropout keeps ----------------------------------------------------------------------

// Whether query i sees key j, and the bias of their score.
template <typename T>
__device__ bool sees(const AttentionMask<T>& mask, const AttentionSizes& sizes, int64_t b, int64_t h, int64_t i,
                     int64_t j, accumulate_t<T>& bias) {
  using A = accumulate_t<T>;
  bias = 0;
  if (i >= sizes.queries || j >= sizes.keys) return false;
  if (mask.causal && j > i + mask.query_offset) return false;
  if (mask.key_begin && j < mask.key_begin[b]) return false;
  if (mask.key_end && j >= mask.key_end[b]) return false;
  const int64_t at = b * mask.batch + h * mask.head + i * mask.query + j * mask.key;
  if (mask.allowed && !mask.allowed[at]) return false;
  if (mask.bias) bias = static_cast<A>(mask.bias[at]);
  return bias != -static_cast<A>(INFINITY);
}

// The keys from `first` to `end` are all that the queries [row, row + rows) may see by causality and bounds. Others are
// not read: what is there need not be a number.
template <typename T>
__device__ void key_range(const AttentionMask<T>& mask, const AttentionSizes& sizes, int64_t b, int64_t row, int rows,
                          int64_t& first, int64_t& end) {
  first = 0;
  end = sizes.keys;
  if (mask.causal) end = min(end, max(row + rows + mask.query_offset, int64_t{0}));
  if (mask.key_begin) first = max(first, static_cast<int64_t>(mask.key_begin[b]));
  if (mask.key_end) end = min(end, static_cast<int64_t>(mask.key_end[b]));
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// Rows of shared memory are padded by 16 bytes, so that neighbouring ones begin in other banks. What is staged for
// scores takes as many bytes whatever they are summed as.
template <typename A>
struct SimtShape {
  static constexpr int kVector = 16 / sizeof(A);
  static constexpr int kChunk = 128 / sizeof(A);  // columns of HS at a time, for scores
  static constexpr int kChunkPitch = kChunk + kVector;
  static constexpr int kRowsAtATime = 16;  // of what weights are multiplied with
  static constexpr int kWeightPitch = kSimtTile + kVector;
};

// scores = rows of x times rows of y, both (64, HS), summed as S; rows beyond the end count as 0. The terms of a chunk
// of columns are summed by themselves: a single sum over 256 columns has several times the rounding error.
template <typename S, typename T>
__device__ void multiply_rows(accumulate_t<T> (&scores)[4][4], const T* x, int64_t x_stride, int64_t x_rows, const T* y,
                              int64_t y_stride, int64_t y_rows, int head_size, accumulate_t<T>* shared) {
  using Shape = SimtShape<S>;
  S(*xs)[Shape::kChunkPitch] = reinterpret_cast<S(*)[Shape::kChunkPitch]>(shared);
  S(*ys)[Shape::kChunkPitch] = xs + kSimtTile;
  S sums[4][4] = {};
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  for (int start = 0; start < head_size; start += Shape::kChunk) {
    __syncthreads();
    for (int i = threadIdx.x; i < kSimtTile * Shape::kChunk; i += kSimtThreads) {
      const int row = i / Shape::kChunk, column = i % Shape::kChunk;
      const bool inside = start + column < head_size;
      xs[row][column] = inside && row < x_rows ? static_cast<S>(x[row * x_stride + start + column]) : S(0);
      ys[row][column] = inside && row < y_rows ? static_cast<S>(y[row * y_stride + start + column]) : S(0);
    }
    __syncthreads();
    S part[4][4] = {};
#pragma unroll 4
    for (int c = 0; c < Shape::kChunk; c += Shape::kVector) {
      struct alignas(16) Vector {
        S v[Shape::kVector];
      };
      Vector a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = *reinterpret_cast<const Vector*>(&xs[4 * ty + i][c]);
        b[i] = *reinterpret_cast<const Vector*>(&ys[tx + 16 * i][c]);
      }
#pragma unroll
      for (int k = 0; k < Shape::kVector; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) part[i][j] += a[i].v[k] * b[j].v[k];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] += part[i][j];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) scores[i][j] = static_cast<accumulate_t<T>>(sums[i][j]);
}

// sums (64 x HS) += weights (64 x 64, in shared memory) times rows of x. A thread has rows 4 * ty + i and columns
// tx + 16 * c. The terms of a stage are summed by themselves: the rounding error of a sum over thousands of rows then
// grows with the number of stages.
template <typename T, int kColumns>
__device__ void add_weighted_rows(accumulate_t<T> (&sums)[4][kColumns], const accumulate_t<T>* weights, const T* x,
                                  int64_t x_stride, int64_t x_rows, int head_size, accumulate_t<T>* shared) {
  using A = accumulate_t<T>;
  using Shape = SimtShape<A>;
  constexpr int kWidth = 16 * kColumns;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  for (int start = 0; start < kSimtTile && start < x_rows; start += Shape::kRowsAtATime) {
    __syncthreads();
    for (int i = threadIdx.x; i < Shape::kRowsAtATime * kWidth; i += kSimtThreads) {
      const int row = start + i / kWidth, column = i % kWidth;
      shared[i] = column < head_size && row < x_rows ? static_cast<A>(x[row * x_stride + column]) : A(0);
    }
    __syncthreads();
    A part[4][kColumns] = {};
#pragma unroll 4
    for (int k = 0; k < Shape::kRowsAtATime; ++k) {
      A w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = weights[(4 * ty + i) * Shape::kWeightPitch + start + k];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const A value = shared[k * kWidth + tx + 16 * c];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i][c] += w[i] * value;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[i][c] += part[i][c];
  }
}

// A thread's scores to shared memory: what masks and dropout do with them is a loop there, not 16 copies of it.
template <typename A>
__device__ void store_scores(A* to, const A (&scores)[4][4]) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) to[(4 * ty + i) * SimtShape<A>::kWeightPitch + tx + 16 * j] = scores[i][j];
}

template <typename A>
__device__ A row_max(A x) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

template <typename A>
__device__ A row_sum(A x) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Shared memory: one or two tiles of weights, and what is staged for either product.
template <typename A, int kColumns>
constexpr int simt_shared_bytes(int tiles) {
  using Shape = SimtShape<A>;
  const int products = 2 * kSimtTile * Shape::kChunkPitch;
  const int rows = Shape::kRowsAtATime * 16 * kColumns;
  return (tiles * kSimtTile * Shape::kWeightPitch + (products > rows ? products : rows)) * static_cast<int>(sizeof(A));
}

// ---- kernels --------------------------------------------------------------------------------------------------------

template <typename T, typename S, int kColumns>
__global__ void __launch_bounds__(kSimtThreads)
    attention_forward_simt_kernel(const __grid_constant__ AttentionForward<T> p) {
  using A = accumulate_t<T>;
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  A* weights = reinterpret_cast<A*>(shared_bytes);
  A* staged = weights + kSimtTile * SimtShape<A>::kWeightPitch;
  const AttentionSizes& s = p.sizes;
  const DropoutDraw dropout(p.dropout);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int64_t tiles = (s.queries + kSimtTile - 1) / kSimtTile;
  for (int64_t work = blockIdx.x; work < tiles * s.batches * s.heads; work += gridDim.x) {
    const int64_t head = work / tiles;  // of all batches
    const int64_t b = head / s.heads, h = head % s.heads, key_head = h / (s.heads / s.key_heads);
    const int64_t row = (tiles - 1 - work % tiles) * kSimtTile;
    const T* query = p.query.data + b * p.query.batch + h * p.query.head + row * p.query.token;
    const T* key = p.key.data + b * p.key.batch + key_head * p.key.head;
    const T* value = p.value.data + b * p.value.batch + key_head * p.value.head;

    A out[4][kColumns] = {}, maximum[4], sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) maximum[i] = -static_cast<A>(INFINITY);
    int64_t first, end;
    key_range(p.mask, s, b, row, kSimtTile, first, end);
    for (int64_t start = first; start < end; start += kSimtTile) {
      {
        A scores[4][4];
        multiply_rows<S>(scores, query, p.query.token, s.queries - row, key + start * p.key.token, p.key.token,
                         end - start, s.head_size, staged);
        store_scores(weights, scores);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        A* own = weights + (4 * ty + i) * SimtShape<A>::kWeightPitch + tx;
        A largest = maximum[i];
#pragma unroll 1
        for (int j = 0; j < kSimtTile; j += 16) {
          A bias;
          const bool seen = sees(p.mask, s, b, h, row + 4 * ty + i, start + tx + j, bias);
          own[j] = seen ? fma(own[j], static_cast<A>(p.scale), bias) : -static_cast<A>(INFINITY);
          largest = max(largest, own[j]);
        }
        largest = row_max(largest);
        const A origin = largest == -static_cast<A>(INFINITY) ? A(0) : largest;
        const A rescale = exp(maximum[i] - origin);
        maximum[i] = largest;
        A part = 0;
#pragma unroll 1
        for (int j = 0; j < kSimtTile; j += 16) {
          const A weight = exp(own[j] - origin);
          part += weight;
          own[j] = dropout.drops() && !dropout.keeps(head, row + 4 * ty + i, start + tx + j) ? A(0) : weight;
        }
        sum[i] = sum[i] * rescale + part;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[i][c] *= rescale;
      }
      add_weighted_rows<T, kColumns>(out, weights, value + start * p.value.token, p.value.token, end - start,
                                     s.head_size, staged);
      __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const A total = row_sum(sum[i]);
      const int64_t at = row + 4 * ty + i;
      if (at >= s.queries) continue;
      const A factor = total == 0 ? A(0) : static_cast<A>(dropout.keep_scale) / total;
      T* to = p.out.data + b * p.out.batch + h * p.out.head + at * p.out.token;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (tx + 16 * c < s.head_size) to[tx + 16 * c] = static_cast<T>(out[i][c] * factor);
      if (tx == 0)
        p.logsumexp[head * s.queries + at] = total == 0 ? -static_cast<A>(INFINITY) : maximum[i] + log(total);
    }
  }
}

// What the backward knows of each row. The first kernel writes delta, that for dq the correction.
template <typename A>
struct RowStatistics {
  A* delta;       // sum(dout * out) - dlogsumexp
  A* correction;  // of exp(score - logsumexp)
};

// delta for each row: a warp each.
template <typename T>
__global__ void attention_backward_delta_kernel(const __grid_constant__ AttentionBackward<T> p,
                                                accumulate_t<T>* delta) {
  using A = accumulate_t<T>;
  const AttentionSizes& s = p.sizes;
  const int lane = threadIdx.x % 32;
  const int64_t rows = s.batches * s.heads * s.queries;
  for (int64_t row = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / 32; row < rows;
       row += gridDim.x * static_cast<int64_t>(blockDim.x) / 32) {
    const int64_t i = row % s.queries, head = row / s.queries, b = head / s.heads, h = head % s.heads;
    const T* dout = p.dout.data + b * p.dout.batch + h * p.dout.head + i * p.dout.token;
    const T* out = p.out.data + b * p.out.batch + h * p.out.head + i * p.out.token;
    A sum = 0;
    for (int64_t c = lane; c < s.head_size; c += 32) sum += static_cast<A>(dout[c]) * static_cast<A>(out[c]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) delta[row] = p.dlogsumexp ? sum - p.dlogsumexp[row] : sum;
  }
}

// Of query i and key j: the product of q and k becomes P (times what dropout does), that of dout and v becomes dS.
// Returns the probability, without dropout; `correction` multiplies it.
template <typename T>
__device__ accumulate_t<T> weight_and_gradient(const AttentionBackward<T>& p, const DropoutDraw& dropout,
                                               const accumulate_t<T>* delta, const accumulate_t<T>* correction,
                                               int64_t b, int64_t h, int64_t head, int64_t i, int64_t j,
                                               accumulate_t<T>& weight, accumulate_t<T>& gradient) {
  using A = accumulate_t<T>;
  const int64_t row = head * p.sizes.queries + i;
  A bias;
  if (!sees(p.mask, p.sizes, b, h, i, j, bias) || p.logsumexp[row] == -static_cast<A>(INFINITY)) {
    weight = gradient = 0;
    return 0;
  }
  const A origin = bias - p.logsumexp[row];
  // Rounded once. A far bias takes the score's place, as in the forward.
  A probability = exp(bias <= kFarBias ? origin : fma(weight, static_cast<A>(p.scale), origin));
  if (correction) probability *= correction[row];
  const A factor = !dropout.drops() ? A(1) : dropout.keeps(head, i, j) ? static_cast<A>(dropout.keep_scale) : A(0);
  weight = probability * factor;
  gradient = probability * (gradient * factor - delta[row]);
  return probability;
}

template <typename T, typename S, int kColumns>
__global__ void __launch_bounds__(kSimtThreads)
    attention_backward_dquery_simt_kernel(const __grid_constant__ AttentionBackward<T> p,
                                          const RowStatistics<accumulate_t<T>> rows) {
  using A = accumulate_t<T>;
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  A* weights = reinterpret_cast<A*>(shared_bytes);
  A* gradients = weights + kSimtTile * SimtShape<A>::kWeightPitch;
  A* staged = gradients + kSimtTile * SimtShape<A>::kWeightPitch;
  const AttentionSizes& s = p.sizes;
  const DropoutDraw dropout(p.dropout);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int64_t tiles = (s.queries + kSimtTile - 1) / kSimtTile;
  for (int64_t work = blockIdx.x; work < tiles * s.batches * s.heads; work += gridDim.x) {
    const int64_t head = work / tiles;
    const int64_t b = head / s.heads, h = head % s.heads, key_head = h / (s.heads / s.key_heads);
    const int64_t row = (tiles - 1 - work % tiles) * kSimtTile;
    const T* query = p.query.data + b * p.query.batch + h * p.query.head + row * p.query.token;
    const T* dout = p.dout.data + b * p.dout.batch + h * p.dout.head + row * p.dout.token;
    const T* key = p.key.data + b * p.key.batch + key_head * p.key.head;
    const T* value = p.value.data + b * p.value.batch + key_head * p.value.head;

    A dquery[4][kColumns] = {}, sum[4] = {};
    int64_t first, end;
    key_range(p.mask, s, b, row, kSimtTile, first, end);
    for (int64_t start = first; start < end; start += kSimtTile) {
      {
        A scores[4][4], dweights[4][4];
        multiply_rows<S>(scores, query, p.query.token, s.queries - row, key + start * p.key.token, p.key.token,
                         end - start, s.head_size, staged);
        multiply_rows<S>(dweights, dout, p.dout.token, s.queries - row, value + start * p.value.token, p.value.token,
                         end - start, s.head_size, staged);
        store_scores(weights, scores);
        store_scores(gradients, dweights);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll 1
        for (int j = tx; j < kSimtTile; j += 16) {
          const int at = (4 * ty + i) * SimtShape<A>::kWeightPitch + j;
          sum[i] += weight_and_gradient<T>(p, dropout, rows.delta, nullptr, b, h, head, row + 4 * ty + i, start + j,
                                           weights[at], gradients[at]);
        }
      add_weighted_rows<T, kColumns>(dquery, gradients, key + start * p.key.token, p.key.token, end - start,
                                     s.head_size, staged);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = row + 4 * ty + i;
      const A total = row_sum(sum[i]);
      if (at >= s.queries) continue;
      const int64_t index = head * s.queries + at;
      const A correction = logsumexp_correction(total, p.logsumexp[index]);
      if (tx == 0) rows.correction[index] = correction;
      const A factor = correction * static_cast<A>(gradient_scale(p));
      T* to = p.dquery.data + b * p.dquery.batch + h * p.dquery.head + at * p.dquery.token;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (tx + 16 * c < s.head_size) to[tx + 16 * c] = static_cast<T>(dquery[i][c] * factor);
    }
  }
}

// Rows of the tile are keys, columns queries.
template <typename T, typename S, int kColumns>
__global__ void __launch_bounds__(kSimtThreads)
    attention_backward_dkey_simt_kernel(const __grid_constant__ AttentionBackward<T> p,
                                        const RowStatistics<accumulate_t<T>> rows) {
  using A = accumulate_t<T>;
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  A* weights = reinterpret_cast<A*>(shared_bytes);
  A* gradients = weights + kSimtTile * SimtShape<A>::kWeightPitch;
  A* staged = gradients + kSimtTile * SimtShape<A>::kWeightPitch;
  const AttentionSizes& s = p.sizes;
  const DropoutDraw dropout(p.dropout);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int64_t group = s.heads / s.key_heads;
  const int64_t tiles = (s.keys + kSimtTile - 1) / kSimtTile;
  for (int64_t work = blockIdx.x; work < tiles * s.batches * s.key_heads; work += gridDim.x) {
    const int64_t b = work / tiles / s.key_heads, key_head = work / tiles % s.key_heads;
    const int64_t row = work % tiles * kSimtTile;
    const T* key = p.key.data + b * p.key.batch + key_head * p.key.head + row * p.key.token;
    const T* value = p.value.data + b * p.value.batch + key_head * p.value.head + row * p.value.token;

    A dkey[4][kColumns] = {}, dvalue[4][kColumns] = {};
    const int64_t first =
        p.mask.causal ? max(row - p.mask.query_offset, int64_t{0}) / kSimtTile * kSimtTile : int64_t{0};
    for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
      const int64_t head = b * s.heads + h;
      const T* query = p.query.data + b * p.query.batch + h * p.query.head;
      const T* dout = p.dout.data + b * p.dout.batch + h * p.dout.head;
      for (int64_t start = first; start < s.queries; start += kSimtTile) {
        {
          A scores[4][4], dweights[4][4];
          multiply_rows<S>(scores, key, p.key.token, s.keys - row, query + start * p.query.token, p.query.token,
                           s.queries - start, s.head_size, staged);
          multiply_rows<S>(dweights, value, p.value.token, s.keys - row, dout + start * p.dout.token, p.dout.token,
                           s.queries - start, s.head_size, staged);
          store_scores(weights, scores);
          store_scores(gradients, dweights);
        }
#pragma unroll 1
        for (int e = 0; e < 16; ++e) {
          const int i = 4 * ty + e / 4, j = tx + 16 * (e % 4), at = i * SimtShape<A>::kWeightPitch + j;
          weight_and_gradient<T>(p, dropout, rows.delta, rows.correction, b, h, head, start + j, row + i, weights[at],
                                 gradients[at]);
        }
        add_weighted_rows<T, kColumns>(dvalue, weights, dout + start * p.dout.token, p.dout.token, s.queries - start,
                                       s.head_size, staged);
        add_weighted_rows<T, kColumns>(dkey, gradients, query + start * p.query.token, p.query.token, s.queries - start,
                                       s.head_size, staged);
        __syncthreads();
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = row + 4 * ty + i;
      if (at >= s.keys) continue;
      T* dkey_to = p.dkey.data + b * p.dkey.batch + key_head * p.dkey.head + at * p.dkey.token;
      T* dvalue_to = p.dvalue.data + b * p.dvalue.batch + key_head * p.dvalue.head + at * p.dvalue.token;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (tx + 16 * c >= s.head_size) continue;
        dkey_to[tx + 16 * c] = static_cast<T>(dkey[i][c] * static_cast<A>(gradient_scale(p)));
        dvalue_to[tx + 16 * c] = static_cast<T>(dvalue[i][c]);
      }
    }
  }
}

// ---- launches -------------------------------------------------------------------------------------------------------

// fn.template operator()<S, columns of 16 that hold the head>(), S as what scores are summed.
template <typename S, typename Fn>
Status for_simt_columns(int64_t head_size, const Fn& fn) {
  if (head_size <= 32) return fn.template operator()<S, 2>();
  if (head_size <= 64) return fn.template operator()<S, 4>();
  if (head_size <= 128) return fn.template operator()<S, 8>();
  return fn.template operator()<S, 16>();
}

// An error of a score is one of its probability. Few scores of float32 are summed as float64: torch's product of a
// vector has hardly an error, because many threads sum short parts of a row.
template <typename T, typename Fn>
Status for_simt_shape(const AttentionSizes& s, const Fn& fn) {
  constexpr int64_t kFew = 64;
  if constexpr (std::is_same_v<T, float>)
    if (s.queries < kFew || s.keys < kFew) return for_simt_columns<double>(s.head_size, fn);
  return for_simt_columns<accumulate_t<T>>(s.head_size, fn);
}

}  // namespace

template <typename T>
Status attention_forward_simt(const AttentionForward<T>& p, Stream stream) {
  return for_simt_shape<T>(p.sizes, [&]<typename S, int kColumns>() -> Status {
    constexpr auto kKernel = attention_forward_simt_kernel<T, S, kColumns>;
    constexpr int kShared = simt_shared_bytes<accumulate_t<T>, kColumns>(1);
    if (max_dynamic_shared_memory<kKernel>() < kShared) return cudaErrorInvalidConfiguration;
    const int64_t tiles = ceil_div(p.sizes.queries, kSimtTile) * p.sizes.batches * p.sizes.heads;
    kKernel<<<grid_size(tiles), kSimtThreads, kShared, stream>>>(p);
    return cudaGetLastError();
  });
}

template <typename T>
int64_t attention_backward_simt_workspace(const AttentionSizes& s) {
  return 2 * s.batches * s.heads * s.queries * static_cast<int64_t>(sizeof(accumulate_t<T>));
}

template <typename T>
Status attention_backward_simt(const AttentionBackward<T>& p, Stream stream) {
  using A = accumulate_t<T>;
  A* delta = static_cast<A*>(p.workspace);
  const RowStatistics<A> rows = {delta, delta + p.sizes.batches * p.sizes.heads * p.sizes.queries};
  constexpr int kWarps = 4;
  attention_backward_delta_kernel<T>
      <<<grid_size(ceil_div(p.sizes.batches * p.sizes.heads * p.sizes.queries, kWarps)), 32 * kWarps, 0, stream>>>(
          p, delta);
  return for_simt_shape<T>(p.sizes, [&]<typename S, int kColumns>() -> Status {
    constexpr auto kDquery = attention_backward_dquery_simt_kernel<T, S, kColumns>;
    constexpr auto kDkey = attention_backward_dkey_simt_kernel<T, S, kColumns>;
    constexpr int kShared = simt_shared_bytes<A, kColumns>(2);
    if (max_dynamic_shared_memory<kDquery>() < kShared || max_dynamic_shared_memory<kDkey>() < kShared)
      return cudaErrorInvalidConfiguration;
    const int64_t query_tiles = ceil_div(p.sizes.queries, kSimtTile) * p.sizes.batches * p.sizes.heads;
    const int64_t key_tiles = ceil_div(p.sizes.keys, kSimtTile) * p.sizes.batches * p.sizes.key_heads;
    kDquery<<<grid_size(query_tiles), kSimtThreads, kShared, stream>>>(p, rows);
    kDkey<<<grid_size(key_tiles), kSimtThreads, kShared, stream>>>(p, rows);
    return cudaGetLastError();
  });
}

#define GPTKERNELS_INSTANTIATE(T)                                                \
  template int64_t attention_backward_simt_workspace<T>(const AttentionSizes&);  \
  template Status attention_forward_simt<T>(const AttentionForward<T>&, Stream); \
  template Status attention_backward_simt<T>(const AttentionBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)
#undef GPTKERNELS_INSTANTIATE

}  // namespace gptkernels::cuda
