// Attention without tensor cores, for every dtype, supported head size, mask and device. A thread block of 256 threads
// computes tiles of 64 x 64; thread (tx, ty) = (threadIdx.x % 16, threadIdx.x / 16) computes rows 4 * ty + i and
// columns tx + 16 * j.
#include <type_traits>

#include "cuda/attention/logsumexp_correction.cuh"
#include "cuda/attention/variants.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/elementwise/dropout.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kTile = 64;
constexpr int kThreads = 256;

// ---- which keys a query sees ----------------------------------------------------------------------------------------

template <typename T>
__device__ bool sees(const AttentionMask<T>& mask, const AttentionSizes& sizes, const QueryHead& head, int64_t i,
                     int64_t j, accumulate_t<T>& bias) {
  using A = accumulate_t<T>;
  bias = 0;
  if (i >= sizes.queries || j >= sizes.keys) return false;
  if (mask.causal && j > i + mask.query_offset) return false;
  if (mask.key_begin && j < mask.key_begin[head.batch]) return false;
  if (mask.key_end && j >= mask.key_end[head.batch]) return false;
  const int64_t at = head.batch * mask.batch + head.head * mask.head + i * mask.query + j * mask.key;
  if (mask.allowed && !mask.allowed[at]) return false;
  if (mask.bias) bias = static_cast<A>(mask.bias[at]);
  return bias != -static_cast<A>(INFINITY);
}

// The keys that a query tile may see according to the causal mask and the key bounds. Other keys may be NaN; the
// kernels for query tiles do not read them.
struct KeyRange {
  int64_t begin = 0;
  int64_t end;

  template <typename T>
  __device__ KeyRange(const AttentionMask<T>& mask, const AttentionSizes& sizes, int64_t b, int64_t row)
      : end(sizes.keys) {
    if (mask.causal) end = min(end, max(row + kTile + mask.query_offset, int64_t{0}));
    if (mask.key_begin) begin = max(begin, static_cast<int64_t>(mask.key_begin[b]));
    if (mask.key_end) end = min(end, static_cast<int64_t>(mask.key_end[b]));
  }
};

// ---- tiles ----------------------------------------------------------------------------------------------------------

// kChunkPitch and kWeightPitch pad rows in shared memory by 16 bytes, so that neighbouring rows begin in different
// banks.
template <typename A>
struct TileShape {
  static constexpr int kVector = 16 / sizeof(A);
  static constexpr int kChunk = 128 / sizeof(A);  // columns per iteration of multiply_rows()
  static constexpr int kChunkPitch = kChunk + kVector;
  static constexpr int kRowsAtATime = 16;  // rows per iteration of add_weighted_rows()
  static constexpr int kWeightPitch = kTile + kVector;
};

template <typename A, int kColumns, int kTiles>
struct Shared {
  using Shape = TileShape<A>;
  static constexpr int kScoreRows = 2 * kTile * Shape::kChunkPitch;
  static constexpr int kWeightedRows = Shape::kRowsAtATime * 16 * kColumns;

  A tiles[kTiles][kTile * Shape::kWeightPitch];
  alignas(16) A rows[kScoreRows > kWeightedRows ? kScoreRows : kWeightedRows];
};

// Rows from `count` on are not read, and are treated as zeros.
template <typename T>
struct Rows {
  const T* data;
  int64_t stride;
  int64_t count;

  __device__ Rows from(int64_t row) const { return {data + row * stride, stride, count - row}; }
};

template <typename T>
__device__ Rows<T> rows_of(const HeadsView<const T>& t, int64_t b, int64_t h, int64_t count) {
  return {t.at(b, h, 0), t.token, count};
}

// tile = x y^T, where x and y are (64, HS). Each chunk of columns is summed separately, because a single sum over 256
// columns would have several times the rounding error. The tile is stored in shared memory: if it were in registers,
// the compiler would repeat the code of masks and dropout for each of a thread's 16 elements.
template <typename S, typename T>
__device__ void multiply_rows(accumulate_t<T>* tile, const Rows<T>& x, const Rows<T>& y, int head_size,
                              accumulate_t<T>* shared) {
  using A = accumulate_t<T>;
  using Shape = TileShape<S>;
  S(*xs)[Shape::kChunkPitch] = reinterpret_cast<S(*)[Shape::kChunkPitch]>(shared);
  S(*ys)[Shape::kChunkPitch] = xs + kTile;
  S sums[4][4] = {};
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  for (int start = 0; start < head_size; start += Shape::kChunk) {
    __syncthreads();
    for (int i = threadIdx.x; i < kTile * Shape::kChunk; i += kThreads) {
      const int row = i / Shape::kChunk, column = i % Shape::kChunk;
      const bool inside = start + column < head_size;
      xs[row][column] = inside && row < x.count ? static_cast<S>(x.data[row * x.stride + start + column]) : S(0);
      ys[row][column] = inside && row < y.count ? static_cast<S>(y.data[row * y.stride + start + column]) : S(0);
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
    for (int j = 0; j < 4; ++j)
      tile[(4 * ty + i) * TileShape<A>::kWeightPitch + tx + 16 * j] = static_cast<A>(sums[i][j]);
}

// sums += weights x, where sums are (64, HS) and weights (64, 64). Each iteration sums its rows separately, so that
// rounding errors grow with the number of iterations, not of rows.
template <typename T, int kColumns>
__device__ void add_weighted_rows(accumulate_t<T> (&sums)[4][kColumns], const accumulate_t<T>* weights,
                                  const Rows<T>& x, int head_size, accumulate_t<T>* shared) {
  using A = accumulate_t<T>;
  using Shape = TileShape<A>;
  constexpr int kWidth = 16 * kColumns;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  for (int start = 0; start < kTile && start < x.count; start += Shape::kRowsAtATime) {
    __syncthreads();
    for (int i = threadIdx.x; i < Shape::kRowsAtATime * kWidth; i += kThreads) {
      const int row = start + i / kWidth, column = i % kWidth;
      shared[i] = column < head_size && row < x.count ? static_cast<A>(x.data[row * x.stride + column]) : A(0);
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

template <typename T, int kColumns>
__device__ void store_row(T* to, const accumulate_t<T> (&sums)[kColumns], accumulate_t<T> factor, int head_size) {
  const int tx = threadIdx.x % 16;
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (tx + 16 * c < head_size) to[tx + 16 * c] = static_cast<T>(sums[c] * factor);
}

// ---- kernels --------------------------------------------------------------------------------------------------------

template <typename T, typename S, int kColumns>
__global__ void __launch_bounds__(kThreads)
    attention_forward_simple_kernel(const __grid_constant__ AttentionForward<T> p) {
  using A = accumulate_t<T>;
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<A, kColumns, 1>*>(shared_bytes);
  A* weights = shared.tiles[0];
  const AttentionSizes& s = p.sizes;
  const DropoutDraw dropout(p.dropout);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int64_t tiles = (s.queries + kTile - 1) / kTile;
  for (int64_t work = blockIdx.x; work < tiles * s.batches * s.heads; work += gridDim.x) {
    const QueryHead head(s, work / tiles);
    const int64_t row = (tiles - 1 - work % tiles) * kTile;
    const Rows<T> query = rows_of(p.query, head.batch, head.head, s.queries).from(row);

    A out[4][kColumns] = {}, maximum[4], sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) maximum[i] = -static_cast<A>(INFINITY);
    const KeyRange range(p.mask, s, head.batch, row);
    const Rows<T> key = rows_of(p.key, head.batch, head.key_head, range.end);
    const Rows<T> value = rows_of(p.value, head.batch, head.key_head, range.end);
    for (int64_t start = range.begin; start < range.end; start += kTile) {
      multiply_rows<S>(weights, query, key.from(start), s.head_size, shared.rows);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        A* scores = weights + (4 * ty + i) * TileShape<A>::kWeightPitch + tx;
        A largest = maximum[i];
#pragma unroll 1
        for (int j = 0; j < kTile; j += 16) {
          A bias;
          const bool seen = sees(p.mask, s, head, row + 4 * ty + i, start + tx + j, bias);
          scores[j] = seen ? fma(scores[j], static_cast<A>(p.scale), bias) : -static_cast<A>(INFINITY);
          largest = max(largest, scores[j]);
        }
        largest = warp_reduce<FiniteMax, 16>(largest);
        const A origin = largest == -static_cast<A>(INFINITY) ? A(0) : largest;
        const A rescale = exp(maximum[i] - origin);
        maximum[i] = largest;
        A part = 0;
#pragma unroll 1
        for (int j = 0; j < kTile; j += 16) {
          const A weight = exp(scores[j] - origin);
          part += weight;
          const bool dropped =
              dropout.drops() && !dropout.keeps(head.index, head.batch, row + 4 * ty + i, start + tx + j);
          scores[j] = dropped ? A(0) : weight;
        }
        sum[i] = sum[i] * rescale + part;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[i][c] *= rescale;
      }
      add_weighted_rows(out, weights, value.from(start), s.head_size, shared.rows);
      __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const A total = warp_reduce<Sum, 16>(sum[i]);
      const int64_t at = row + 4 * ty + i;
      if (at >= s.queries) continue;
      const A factor = total == 0 ? A(0) : static_cast<A>(dropout.keep_scale) / total;
      store_row(p.out.at(head.batch, head.head, at), out[i], factor, s.head_size);
      if (tx == 0)
        p.logsumexp[head.index * s.queries + at] = total == 0 ? -static_cast<A>(INFINITY) : maximum[i] + log(total);
    }
  }
}

// Kahan's compensated sum: the rounding error of each addition is subtracted from the next term. It is for long sums of
// equal terms, whose rounding errors do not average out.
template <typename A>
struct KahanSum {
  A sum = 0;
  A error = 0;

  __device__ void add(A x) {
    const A term = x - error;
    const A next = sum + term;
    error = (next - sum) - term;
    sum = next;
  }
};

template <typename A>
struct RowStatistics {
  A* delta;       // sum(dout * out) - dlogsumexp
  A* correction;  // factor of exp(score - logsumexp)
};

template <typename T>
__global__ void attention_backward_delta_kernel(const __grid_constant__ AttentionBackward<T> p,
                                                accumulate_t<T>* delta) {
  using A = accumulate_t<T>;
  const AttentionSizes& s = p.sizes;
  const int lane = threadIdx.x % 32;
  const int64_t rows = s.batches * s.heads * s.queries;
  for (int64_t row = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / 32; row < rows;
       row += gridDim.x * static_cast<int64_t>(blockDim.x) / 32) {
    const int64_t i = row % s.queries, head = row / s.queries;
    const T* dout = p.dout.at(head / s.heads, head % s.heads, i);
    const T* out = p.out.at(head / s.heads, head % s.heads, i);
    A sum = 0;
    for (int64_t c = lane; c < s.head_size; c += 32) sum += static_cast<A>(dout[c]) * static_cast<A>(out[c]);
    sum = warp_reduce<Sum>(sum);
    if (lane == 0) delta[row] = p.dlogsumexp ? sum - p.dlogsumexp[row] : sum;
  }
}

// Replaces `weight`, the dot product of q and k, by the probability P times dropout's factor, and `gradient`, the dot
// product of dout and v, by dS. Returns P.
template <typename T>
__device__ accumulate_t<T> weight_and_gradient(const AttentionBackward<T>& p, const DropoutDraw& dropout,
                                               const accumulate_t<T>* delta, const accumulate_t<T>* correction,
                                               const QueryHead& head, int64_t i, int64_t j, accumulate_t<T>& weight,
                                               accumulate_t<T>& gradient) {
  using A = accumulate_t<T>;
  const int64_t row = head.index * p.sizes.queries + i;
  A bias;
  if (!sees(p.mask, p.sizes, head, i, j, bias) || p.logsumexp[row] == -static_cast<A>(INFINITY)) {
    weight = gradient = 0;
    return 0;
  }
  // The score is rounded as in the forward, because the gradients of nearly equal keys cancel only if the probabilities
  // equal those of the forward.
  A probability = exp(fma(weight, static_cast<A>(p.scale), bias) - p.logsumexp[row]);
  if (correction) probability *= correction[row];
  const A factor = !dropout.drops()                              ? A(1)
                   : dropout.keeps(head.index, head.batch, i, j) ? static_cast<A>(dropout.keep_scale)
                                                                 : A(0);
  weight = probability * factor;
  gradient = probability * (gradient * factor - delta[row]);
  return probability;
}

template <typename T, typename S, int kColumns>
__global__ void __launch_bounds__(kThreads)
    attention_backward_dquery_simple_kernel(const __grid_constant__ AttentionBackward<T> p,
                                            const RowStatistics<accumulate_t<T>> statistics) {
  using A = accumulate_t<T>;
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<A, kColumns, 2>*>(shared_bytes);
  auto& [weights, gradients] = shared.tiles;
  const AttentionSizes& s = p.sizes;
  const DropoutDraw dropout(p.dropout);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int64_t tiles = (s.queries + kTile - 1) / kTile;
  for (int64_t work = blockIdx.x; work < tiles * s.batches * s.heads; work += gridDim.x) {
    const QueryHead head(s, work / tiles);
    const int64_t row = (tiles - 1 - work % tiles) * kTile;
    const Rows<T> query = rows_of(p.query, head.batch, head.head, s.queries).from(row);
    const Rows<T> dout = rows_of(p.dout, head.batch, head.head, s.queries).from(row);

    A dquery[4][kColumns] = {};
    KahanSum<A> sum[4];  // of probabilities
    const KeyRange range(p.mask, s, head.batch, row);
    const Rows<T> key = rows_of(p.key, head.batch, head.key_head, range.end);
    const Rows<T> value = rows_of(p.value, head.batch, head.key_head, range.end);
    for (int64_t start = range.begin; start < range.end; start += kTile) {
      multiply_rows<S>(weights, query, key.from(start), s.head_size, shared.rows);
      multiply_rows<S>(gradients, dout, value.from(start), s.head_size, shared.rows);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        A part = 0;
#pragma unroll 1
        for (int j = tx; j < kTile; j += 16) {
          const int at = (4 * ty + i) * TileShape<A>::kWeightPitch + j;
          part += weight_and_gradient(p, dropout, statistics.delta, nullptr, head, row + 4 * ty + i, start + j,
                                      weights[at], gradients[at]);
        }
        sum[i].add(part);
      }
      add_weighted_rows(dquery, gradients, key.from(start), s.head_size, shared.rows);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = row + 4 * ty + i, index = head.index * s.queries + at;
      const A total = warp_reduce<Sum, 16>(sum[i].sum);
      if (at >= s.queries) continue;
      const A correction = logsumexp_correction(total, p.logsumexp[index]);
      if (tx == 0) statistics.correction[index] = correction;
      store_row(p.dquery.at(head.batch, head.head, at), dquery[i], correction * static_cast<A>(gradient_scale(p)),
                s.head_size);
    }
  }
}

// Rows of a tile are keys, columns are queries.
template <typename T, typename S, int kColumns>
__global__ void __launch_bounds__(kThreads)
    attention_backward_dkey_simple_kernel(const __grid_constant__ AttentionBackward<T> p,
                                          const RowStatistics<accumulate_t<T>> statistics) {
  using A = accumulate_t<T>;
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<A, kColumns, 2>*>(shared_bytes);
  auto& [weights, gradients] = shared.tiles;
  const AttentionSizes& s = p.sizes;
  const DropoutDraw dropout(p.dropout);
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int64_t group = s.heads / s.key_heads;
  const int64_t tiles = (s.keys + kTile - 1) / kTile;
  for (int64_t work = blockIdx.x; work < tiles * s.batches * s.key_heads; work += gridDim.x) {
    const int64_t b = work / tiles / s.key_heads, key_head = work / tiles % s.key_heads;
    const int64_t row = work % tiles * kTile;
    const Rows<T> key = rows_of(p.key, b, key_head, s.keys).from(row);
    const Rows<T> value = rows_of(p.value, b, key_head, s.keys).from(row);

    A dkey[4][kColumns] = {}, dvalue[4][kColumns] = {};
    const int64_t first = p.mask.causal ? max(row - p.mask.query_offset, int64_t{0}) / kTile * kTile : int64_t{0};
    for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
      const QueryHead head(s, b * s.heads + h);
      const Rows<T> query = rows_of(p.query, b, h, s.queries), dout = rows_of(p.dout, b, h, s.queries);
      for (int64_t start = first; start < s.queries; start += kTile) {
        multiply_rows<S>(weights, key, query.from(start), s.head_size, shared.rows);
        multiply_rows<S>(gradients, value, dout.from(start), s.head_size, shared.rows);
#pragma unroll 1
        for (int e = 0; e < 16; ++e) {
          const int i = 4 * ty + e / 4, j = tx + 16 * (e % 4), at = i * TileShape<A>::kWeightPitch + j;
          weight_and_gradient(p, dropout, statistics.delta, statistics.correction, head, start + j, row + i,
                              weights[at], gradients[at]);
        }
        add_weighted_rows(dvalue, weights, dout.from(start), s.head_size, shared.rows);
        add_weighted_rows(dkey, gradients, query.from(start), s.head_size, shared.rows);
        __syncthreads();
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = row + 4 * ty + i;
      if (at >= s.keys) continue;
      store_row(p.dkey.at(b, key_head, at), dkey[i], static_cast<A>(gradient_scale(p)), s.head_size);
      store_row(p.dvalue.at(b, key_head, at), dvalue[i], A(1), s.head_size);
    }
  }
}

// ---- launches -------------------------------------------------------------------------------------------------------

template <typename S, typename Fn>
Status for_columns(int64_t head_size, const Fn& fn) {
  if (head_size <= 64) return fn.template operator()<S, 4>();
  if (head_size <= 128) return fn.template operator()<S, 8>();
  return fn.template operator()<S, 16>();
}

// S is the type in which scores are summed. A score's error becomes a relative error of its probability. For float32
// with few queries or keys, torch's matrix-vector products sum very accurately, so S is float64.
template <typename T, typename Fn>
Status for_shape(const AttentionSizes& s, const Fn& fn) {
  constexpr int64_t kFew = 64;
  if constexpr (std::is_same_v<T, float>)
    if (s.queries < kFew || s.keys < kFew) return for_columns<double>(s.head_size, fn);
  return for_columns<accumulate_t<T>>(s.head_size, fn);
}

}  // namespace

template <typename T>
Status attention_forward_simple(const AttentionForward<T>& p, Stream stream) {
  return for_shape<T>(p.sizes, [&]<typename S, int kColumns>() -> Status {
    constexpr auto kKernel = attention_forward_simple_kernel<T, S, kColumns>;
    constexpr int kShared = sizeof(Shared<accumulate_t<T>, kColumns, 1>);
    if (max_dynamic_shared_memory<kKernel>() < kShared) return cudaErrorInvalidConfiguration;
    const int64_t tiles = ceil_div(p.sizes.queries, kTile) * p.sizes.batches * p.sizes.heads;
    kKernel<<<grid_size(tiles), kThreads, kShared, stream>>>(p);
    return cudaGetLastError();
  });
}

template <typename T>
int64_t attention_backward_simple_workspace(const AttentionSizes& s) {
  return 2 * s.batches * s.heads * s.queries * static_cast<int64_t>(sizeof(accumulate_t<T>));
}

template <typename T>
Status attention_backward_simple(const AttentionBackward<T>& p, Stream stream) {
  using A = accumulate_t<T>;
  constexpr int kWarps = 4;
  const int64_t rows = p.sizes.batches * p.sizes.heads * p.sizes.queries;
  A* delta = static_cast<A*>(p.workspace);
  const RowStatistics<A> statistics = {delta, delta + rows};
  attention_backward_delta_kernel<T><<<grid_size(ceil_div(rows, kWarps)), 32 * kWarps, 0, stream>>>(p, delta);
  return for_shape<T>(p.sizes, [&]<typename S, int kColumns>() -> Status {
    constexpr auto kDquery = attention_backward_dquery_simple_kernel<T, S, kColumns>;
    constexpr auto kDkey = attention_backward_dkey_simple_kernel<T, S, kColumns>;
    constexpr int kShared = sizeof(Shared<A, kColumns, 2>);
    if (max_dynamic_shared_memory<kDquery>() < kShared || max_dynamic_shared_memory<kDkey>() < kShared)
      return cudaErrorInvalidConfiguration;
    const int64_t query_tiles = ceil_div(p.sizes.queries, kTile) * p.sizes.batches * p.sizes.heads;
    const int64_t key_tiles = ceil_div(p.sizes.keys, kTile) * p.sizes.batches * p.sizes.key_heads;
    kDquery<<<grid_size(query_tiles), kThreads, kShared, stream>>>(p, statistics);
    kDkey<<<grid_size(key_tiles), kThreads, kShared, stream>>>(p, statistics);
    return cudaGetLastError();
  });
}

#define GPTKERNELS_INSTANTIATE(T)                                                  \
  template int64_t attention_backward_simple_workspace<T>(const AttentionSizes&);  \
  template Status attention_forward_simple<T>(const AttentionForward<T>&, Stream); \
  template Status attention_backward_simple<T>(const AttentionBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)
#undef GPTKERNELS_INSTANTIATE

}  // namespace gptkernels::cuda
