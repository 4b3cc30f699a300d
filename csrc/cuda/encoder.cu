#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "../encoder.h"
#include "assert.cuh"
#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// Whether a token may be used as an index; if it may not, `speaks` chooses the thread that says so and ends the kernel.
template <typename Token>
__device__ bool inside(Token token, int64_t vocabulary, const char* op, int64_t position, bool speaks) {
  if (token >= 0 && token < vocabulary) return true;
  if (speaks)
    device_fail(op, "a token is outside the vocabulary",
                "token %lld at position %lld is outside the vocabulary of %lld\n", static_cast<long long>(token),
                static_cast<long long>(position), static_cast<long long>(vocabulary));
  return false;
}

// A warp's share of rows of packs: `slab` counts runs of kWarp * kItems packs in a row.
template <int kVec, int kItems>
__host__ __device__ int64_t slabs(int64_t width) {
  return ceil_div(width, int64_t(kVec) * kWarp * kItems);
}

__device__ int64_t this_warp() {
  return (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
}

__device__ int64_t all_warps() {
  return int64_t(gridDim.x) * kWarps;
}

// ---------------------------------------------------------------------------------------------------------------
// Forward: writes out once, B * T * C * sizeof(T) bytes, and reads as much of wte; wpe stays in L2.

constexpr int kForwardItems = 4;

template <typename T, typename Token, int kVec>
__global__ void encoder_forward_gather_kernel(const EncoderForward<T, Token> p) {
  using A = accumulate_t<T>;
  const int lane = threadIdx.x % kWarp;
  const int64_t row_slabs = slabs<kVec, kForwardItems>(p.width);
  const int64_t work = p.batch * p.length * row_slabs;
  for (int64_t item = this_warp(); item < work; item += all_warps()) {
    const int64_t row = item / row_slabs;
    const int64_t first = (item % row_slabs * kForwardItems * kWarp + lane) * kVec;
    const Token token = p.tokens[row];
    if (!inside(token, p.vocabulary, p.wpe ? "encoder" : "embedding", row, lane == 0)) return;
    const T* wte = p.wte + token * p.width;
    const T* wpe = p.wpe ? p.wpe + row % p.length * p.width : nullptr;
    Packed<T, kVec> embedding[kForwardItems];
#pragma unroll
    for (int i = 0; i < kForwardItems; ++i) {
      const int64_t column = first + int64_t(i) * kWarp * kVec;
      if (column < p.width) embedding[i] = load<kVec>(wte + column);
    }
#pragma unroll
    for (int i = 0; i < kForwardItems; ++i) {
      const int64_t column = first + int64_t(i) * kWarp * kVec;
      if (column >= p.width) continue;
      if (wpe) {
        A position[kVec];
        load_wide<kVec>(position, wpe + column);
#pragma unroll
        for (int k = 0; k < kVec; ++k) embedding[i].v[k] = narrow<T>(widen(embedding[i].v[k]) + position[k]);
      }
      store<kVec>(p.out + row * p.width + column, embedding[i]);
    }
  }
}

template <typename T, typename Token, int kVec>
void launch_forward(const EncoderForward<T, Token>& p, Stream stream) {
  const int64_t work = p.batch * p.length * slabs<kVec, kForwardItems>(p.width);
  encoder_forward_gather_kernel<T, Token, kVec><<<grid_size(ceil_div(work, kWarps)), kThreads, 0, stream>>>(p);
}

// ---------------------------------------------------------------------------------------------------------------
// Backward, dwte: rows of dout are summed by token. The positions are sorted by token (a stable sort: equal tokens keep
// the order of their positions), the sorted list is cut in chunks of 32, and a warp adds the rows of a chunk. So the
// work is even however often a token occurs, and the order of every sum is the list's. A token whose run lies within
// one chunk is finished there. A run that crosses chunks leaves one partial row in each: in the `tail` of the chunk
// where it begins, in the `head` of those it goes on into; a second kernel adds these in order.

constexpr int64_t kChunk = kWarp;

template <typename T, typename Token>
struct Workspace {
  Token* tokens;              // (N) sorted
  int64_t* positions;         // (N) of those tokens
  int64_t* unsorted;          // (N) 0, 1, 2, ...
  accumulate_t<T>* partials;  // (chunks, 2, C): head and tail
  void* sort;                 // CUB's own
  size_t sort_bytes;
  int64_t bytes;  // all of it
};

template <typename Token>
cudaError_t sort_by_token(void* scratch, size_t& bytes, const Token* tokens, Token* sorted_tokens,
                          const int64_t* positions, int64_t* sorted_positions, int64_t n, int64_t vocabulary,
                          Stream stream) {
  const int bits = std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(vocabulary))));
  return cub::DeviceRadixSort::SortPairs(scratch, bytes, tokens, sorted_tokens, positions, sorted_positions, n, 0,
                                         std::min<int>(bits, 8 * sizeof(Token)), stream);
}

// Cuts `base` into its parts; with a null base this only counts the bytes.
template <typename T, typename Token>
Workspace<T, Token> carve(void* base, int64_t n, int64_t vocabulary, int64_t width) {
  Workspace<T, Token> w{};
  const auto take = [&](int64_t bytes) {
    constexpr int64_t kAlignment = 256;
    void* part = static_cast<char*>(base) + w.bytes;
    w.bytes += ceil_div(bytes, kAlignment) * kAlignment;
    return part;
  };
  sort_by_token<Token>(nullptr, w.sort_bytes, nullptr, nullptr, nullptr, nullptr, n, vocabulary, nullptr);
  w.tokens = static_cast<Token*>(take(n * int64_t(sizeof(Token))));
  w.positions = static_cast<int64_t*>(take(n * int64_t(sizeof(int64_t))));
  w.unsorted = static_cast<int64_t*>(take(n * int64_t(sizeof(int64_t))));
  w.partials = static_cast<accumulate_t<T>*>(take(ceil_div(n, kChunk) * 2 * width * int64_t(sizeof(accumulate_t<T>))));
  w.sort = take(static_cast<int64_t>(w.sort_bytes));
  return w;
}

template <typename T, typename Token>
__global__ void encoder_backward_positions_kernel(const EncoderBackward<T, Token> p, int64_t* positions) {
  const int64_t n = p.batch * p.length;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += int64_t(gridDim.x) * kThreads) {
    inside(p.tokens[i], p.vocabulary, p.dwpe ? "encoder_backward" : "embedding_backward", i, true);
    positions[i] = i;
  }
}

// The sum of a token's rows in one chunk goes to dwte when it is all of them, else to the workspace.
template <typename T, typename Token, int kVec>
__device__ void write_run(const EncoderBackward<T, Token>& p, const Workspace<T, Token>& w, int64_t chunk,
                          int64_t column, int64_t token, bool is_head, bool is_tail,
                          const accumulate_t<T> (&sum)[kVec]) {
  if (!is_head && !is_tail) return store_narrow<kVec>(p.dwte + token * p.width + column, sum);
  Packed<accumulate_t<T>, kVec> partial;
#pragma unroll
  for (int k = 0; k < kVec; ++k) partial.v[k] = sum[k];
  store(w.partials + (2 * chunk + (is_head ? 0 : 1)) * p.width + column, partial);
}

// Reads dout once. A warp takes a chunk of the list and 32 packs of its rows' columns; a lane keeps one list entry.
template <typename T, typename Token, int kVec>
__global__ void encoder_backward_chunks_kernel(const EncoderBackward<T, Token> p, const Workspace<T, Token> w) {
  using A = accumulate_t<T>;
  constexpr unsigned kAll = 0xFFFFFFFFu;
  constexpr int kAhead = 8;  // rows that are under way at once
  const int lane = threadIdx.x % kWarp;
  const int64_t n = p.batch * p.length;
  const int64_t row_slabs = slabs<kVec, 1>(p.width);
  const int64_t work = ceil_div(n, kChunk) * row_slabs;
  for (int64_t item = this_warp(); item < work; item += all_warps()) {
    const int64_t chunk = item / row_slabs;
    const int64_t column = (item % row_slabs * kWarp + lane) * kVec;
    const bool has_columns = column < p.width;
    const int64_t begin = chunk * kChunk;
    const int count = static_cast<int>(n - begin < kChunk ? n - begin : kChunk);
    const int64_t entry = begin + (lane < count ? lane : 0);
    const Token token = w.tokens[entry];
    const int64_t position = w.positions[entry];
    const bool from_before = begin > 0 && w.tokens[begin - 1] == w.tokens[begin];
    const bool goes_on = begin + count < n && w.tokens[begin + count] == w.tokens[begin + count - 1];
    // Bit i: entry i is the last of its token in this chunk.
    const Token next = __shfl_down_sync(kAll, token, 1);
    const unsigned last = __ballot_sync(kAll, lane < count && (lane == count - 1 || next != token));

    A sum[kVec] = {};
    for (int i = 0; i < count; i += kAhead) {
      Packed<T, kVec> rows[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int64_t row = __shfl_sync(kAll, position, i + j);
        if (i + j < count && has_columns) rows[j] = load<kVec>(p.dout + row * p.width + column);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int64_t row_token = __shfl_sync(kAll, token, i + j);
        if (i + j >= count || !has_columns) continue;
#pragma unroll
        for (int k = 0; k < kVec; ++k) sum[k] += widen(rows[j].v[k]);
        if (!(last >> (i + j) & 1u)) continue;
        const bool is_head = from_before && (last & ((1u << (i + j)) - 1)) == 0;  // no run has ended before
        const bool is_tail = goes_on && i + j == count - 1;
        write_run<T, Token, kVec>(p, w, chunk, column, row_token, is_head, is_tail, sum);
#pragma unroll
        for (int k = 0; k < kVec; ++k) sum[k] = 0;
      }
    }
  }
}

// A block a chunk whose tail begins a run that crosses chunks, and a slab of columns. The block's y threads take every
// 8th of the run's partial rows, then one of them adds the 8 sums.
constexpr int kSumRows = 8;

template <typename T, typename Token, int kVec>
__global__ void encoder_backward_partials_kernel(const EncoderBackward<T, Token> p, const Workspace<T, Token> w) {
  using A = accumulate_t<T>;
  __shared__ A sums[kSumRows][kVec][kWarp];
  const int64_t n = p.batch * p.length;
  const int64_t row_slabs = slabs<kVec, 1>(p.width);
  const int64_t chunk = blockIdx.x / row_slabs;
  const int64_t column = (blockIdx.x % row_slabs * kWarp + threadIdx.x) * kVec;
  const int64_t begin = chunk * kChunk;
  const int64_t end = begin + kChunk;
  const Token token = w.tokens[end - 1];
  const bool goes_on = w.tokens[end] == token;
  const bool begins_here = w.tokens[begin] != token || begin == 0 || w.tokens[begin - 1] != token;
  if (!goes_on || !begins_here) return;  // all threads of the block alike

  A sum[kVec] = {};
  for (int64_t c = chunk + threadIdx.y; column < p.width && c * kChunk < n; c += kSumRows) {
    if (c != chunk && w.tokens[c * kChunk] != token) break;
    const Packed<A, kVec> partial = load<kVec>(w.partials + (2 * c + (c == chunk ? 1 : 0)) * p.width + column);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[k] += partial.v[k];
  }
#pragma unroll
  for (int k = 0; k < kVec; ++k) sums[threadIdx.y][k][threadIdx.x] = sum[k];
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.width) return;
  for (int row = 1; row < kSumRows; ++row)
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[k] += sums[row][k][threadIdx.x];
  store_narrow<kVec>(p.dwte + token * p.width + column, sum);
}

// dwpe[t] = sum over b of dout[b, t], in runs of 32 as above; zero for the positions that no token has.
template <typename T, typename Token, int kVec>
__global__ void encoder_backward_positional_kernel(const EncoderBackward<T, Token> p) {
  using A = accumulate_t<T>;
  const int64_t packs = p.width / kVec;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.positions * packs;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t t = i / packs;
    const T* dout = p.dout + i * kVec;  // (t, column) of the first b
    const int64_t stride = p.length * p.width;
    const int64_t batch = t < p.length ? p.batch : 0;
    A total[kVec] = {};
    for (int64_t first = 0; first < batch; first += kChunk) {
      const int count = static_cast<int>(batch - first < kChunk ? batch - first : kChunk);
      A sum[kVec] = {};
#pragma unroll 8
      for (int b = 0; b < count; ++b) {
        A row[kVec];
        load_wide<kVec>(row, dout + (first + b) * stride);
#pragma unroll
        for (int k = 0; k < kVec; ++k) sum[k] += row[k];
      }
#pragma unroll
      for (int k = 0; k < kVec; ++k) total[k] += sum[k];
    }
    store_narrow<kVec>(p.dwpe + i * kVec, total);
  }
}

template <typename T, typename Token, int kVec>
void launch_backward(const EncoderBackward<T, Token>& p, const Workspace<T, Token>& w, Stream stream) {
  const int64_t chunks = ceil_div(p.batch * p.length, kChunk);
  const int64_t work = chunks * slabs<kVec, 1>(p.width);
  encoder_backward_chunks_kernel<T, Token, kVec><<<grid_size(ceil_div(work, kWarps)), kThreads, 0, stream>>>(p, w);
  if (chunks > 1) {
    constexpr int kWide = kVec == 1 ? 1 : kPack<accumulate_t<T>>;  // 16 bytes of a partial row
    const unsigned blocks = grid_size((chunks - 1) * slabs<kWide, 1>(p.width));
    encoder_backward_partials_kernel<T, Token, kWide><<<blocks, dim3(kWarp, kSumRows), 0, stream>>>(p, w);
  }
}

}  // namespace

template <typename T, typename Token>
Status encoder_forward(const EncoderForward<T, Token>& p, Stream stream) {
  if (p.batch * p.length == 0) return cudaSuccess;
  if (packs<T>(p.width, p.out, p.wte, p.wpe))
    launch_forward<T, Token, kPack<T>>(p, stream);
  else
    launch_forward<T, Token, 1>(p, stream);
  return cudaGetLastError();
}

template <typename T, typename Token>
int64_t encoder_backward_workspace(int64_t batch, int64_t length, int64_t vocabulary, int64_t width) {
  return carve<T, Token>(nullptr, batch * length, vocabulary, width).bytes;
}

template <typename T, typename Token>
Status encoder_backward(const EncoderBackward<T, Token>& p, Stream stream) {
  const int64_t n = p.batch * p.length;
  const bool packed = packs<T>(p.width, p.dwte, p.dwpe, p.dout);
  const int64_t row_bytes = p.width * int64_t(sizeof(T));
  if (p.dwpe) {
    constexpr int kPacked = kPack<T>;
    const unsigned grid = grid_size(ceil_div(p.positions * p.width / (packed ? kPacked : 1), kThreads));
    if (packed)
      encoder_backward_positional_kernel<T, Token, kPacked><<<grid, kThreads, 0, stream>>>(p);
    else
      encoder_backward_positional_kernel<T, Token, 1><<<grid, kThreads, 0, stream>>>(p);
  }
  if (p.dwte)
    if (Status status = cudaMemsetAsync(p.dwte, 0, p.vocabulary * row_bytes, stream); status != cudaSuccess)
      return status;
  if (n == 0 || p.width == 0) return cudaGetLastError();

  Workspace<T, Token> w = carve<T, Token>(p.workspace, n, p.vocabulary, p.width);
  encoder_backward_positions_kernel<T, Token><<<grid_size(ceil_div(n, kThreads)), kThreads, 0, stream>>>(p, w.unsorted);
  if (Status status =
          sort_by_token(w.sort, w.sort_bytes, p.tokens, w.tokens, w.unsorted, w.positions, n, p.vocabulary, stream);
      status != cudaSuccess)
    return status;
  if (packed)
    launch_backward<T, Token, kPack<T>>(p, w, stream);
  else
    launch_backward<T, Token, 1>(p, w, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T, Token)                                                     \
  template Status encoder_forward<T, Token>(const EncoderForward<T, Token>&, Stream);        \
  template int64_t encoder_backward_workspace<T, Token>(int64_t, int64_t, int64_t, int64_t); \
  template Status encoder_backward<T, Token>(const EncoderBackward<T, Token>&, Stream);
GPTKERNELS_INSTANTIATE(double, int32_t)
GPTKERNELS_INSTANTIATE(float, int32_t)
GPTKERNELS_INSTANTIATE(bfloat16, int32_t)
GPTKERNELS_INSTANTIATE(float16, int32_t)
GPTKERNELS_INSTANTIATE(double, int64_t)
GPTKERNELS_INSTANTIATE(float, int64_t)
GPTKERNELS_INSTANTIATE(bfloat16, int64_t)
GPTKERNELS_INSTANTIATE(float16, int64_t)

}  // namespace gptkernels::cuda
