// The first half of the encoder's backward: sorts the positions (b, t) by token, with two stable counting sorts.
//
//   encoder_backward_tiles_kernel   one thread block per tile of the positions (at most 128 tiles): sorts the tile by
//                                   the low bits of the tokens, and leaves out other shards' tokens
//   encoder_backward_bins_kernel    one thread block per bin, which has the positions with the same low bits: collects
//                                   the bin from all tiles, and sorts it by the high bits
//
// There are about sqrt(V) bins, and about sqrt(V) values of the high bits (digits). The low bits select the bin,
// because frequent tokens have small numbers in most vocabularies, and are thus spread over the bins. All atomic
// operations are integer additions, so the order of the positions depends on the tokens alone.
//
// Latency determines the time of both kernels. Therefore encoder_backward_bins_kernel and encoder_backward_sums_kernel
// (sums.cuh) start while the previous kernel still runs (launch.cuh). They call wait_for_previous_kernel() before they
// access memory that the previous kernel writes, or write memory that it reads.
//
// The result is the array `items`. A token's slot is its index in the vocabulary sorted by low bits, then by high bits
// (token_of). For each slot in turn, `items` has one head and then the slot's run: the token's positions, in ascending
// order. A run of more than kWindow positions is long. Items have these values:
//
//   ~token                    the head of a short or empty run
//   kNoHead                   the head of a long run, the head of a slot without a token, or padding at the end
//   position                  an entry of a short run
//   position | kLongRunMark   an entry of a long run
//
// A window is kWindow items. long_runs[2 * w + 1] is the long run whose first entry is in window w. long_runs[2 * w] is
// the long run that has entries in window w and in earlier windows. Example, where `--` is kNoHead and `*` is
// kLongRunMark:
//
//   items     ~a 5 9 | ~b | ~c 0 2 7 | -- 1*3*4*6*8* ... * | ~e | -- ...     d and f have long runs
//
//   window               0          |          1          |          2
//   entries of d              ******|*********************|*****                 three parts of the sum of d
//   entries of f                    |                     |        *************|*** ...
//   long_runs     [1] = d           | [2] = d             | [4] = d, [5] = f
//
// A unit is kUnit items, half a window. In sums.cuh, a group of lanes sums the short runs whose heads are in its unit,
// and a warp sums the entries of long runs in its window.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "../../encoder.h"
#include "counting_sort.cuh"
#include "cuda/common/launch.cuh"
#include "token.cuh"

namespace gptkernels::cuda {

constexpr int kTileThreads = 512;
constexpr int kBinThreads = 1024;  // the bin of a frequent token may contain a tenth of all entries
constexpr int kMaxTiles = 128;
constexpr int kUnit = 32;
constexpr int kWindow = 2 * kUnit;
constexpr int kBatchPiece = 128;

struct Entry {
  int position;
  int digit;  // the token's high bits
};

constexpr int kNoHead = INT_MIN;
constexpr unsigned kNoRow = ~unsigned(kNoHead);
constexpr int kLongRunMark = 1 << 30;

struct Run {
  int first;
  int last;  // 0 if there is no run
  int token;
};

template <typename T>
struct EncoderWorkspace {
  Entry* tile_entries;        // (N), by tile and bin
  int* tile_starts;           // (bins + 1, tiles)
  int* items;                 // (windows + 1, kWindow)
  Run* long_runs;             // (windows, 2)
  accumulate_t<T>* partials;  // (partial_rows, C): 2 rows per window; then, if pieces > 1, one per piece and position
  int* arrived;               // (partial_rows, slabs)
  int n;
  int shift;  // bins = 1 << shift
  int digits;
  int slots;  // bins * digits
  int tiles;
  int tile_size;
  int windows;
  int pieces;
  int partial_rows;
  int slabs;
  int width;
  int64_t zeros;  // the number of ints from long_runs to the end of `arrived`, which are set to 0
  int64_t bytes;

  __device__ int token_of(int slot) const { return slot / digits + (slot % digits << shift); }
};

template <typename T>
EncoderWorkspace<T> carve(void* base, int64_t batch, int64_t length, int64_t vocabulary, int64_t width, int64_t slabs) {
  EncoderWorkspace<T> w{};
  const auto take = [&](auto*& part, int64_t count) {
    constexpr int64_t kAlignment = 256;
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(static_cast<char*>(base) + w.bytes);
    w.bytes += ceil_div(count * int64_t(sizeof(*part)), kAlignment) * kAlignment;
  };
  const int64_t n = batch * length;
  while (int64_t(1) << 2 * w.shift < vocabulary) ++w.shift;
  const int64_t digits = ceil_div(vocabulary, int64_t(1) << w.shift);
  const int64_t slots = digits << w.shift;
  const int64_t tile_size = ceil_div(ceil_div(n, kMaxTiles), kTileThreads) * kTileThreads;
  const int64_t windows = ceil_div(n + slots, kWindow);
  const int64_t pieces = ceil_div(batch, kBatchPiece);
  const int64_t piece_rows = pieces > 1 ? pieces * length : 0;
  w.n = static_cast<int>(n);
  w.digits = static_cast<int>(digits);
  w.slots = static_cast<int>(slots);
  w.tile_size = static_cast<int>(tile_size);
  w.tiles = static_cast<int>(ceil_div(n, tile_size));
  w.windows = static_cast<int>(windows);
  w.pieces = static_cast<int>(pieces);
  w.partial_rows = static_cast<int>(2 * windows + piece_rows);
  w.slabs = static_cast<int>(slabs);
  w.width = static_cast<int>(width);
  take(w.tile_entries, n);
  take(w.tile_starts, ((1 << w.shift) + 1) * int64_t(w.tiles));
  take(w.items, (windows + 1) * kWindow);
  const int64_t zeros_begin = w.bytes;
  take(w.long_runs, 2 * windows);
  take(w.arrived, w.partial_rows * slabs);
  w.zeros = (w.bytes - zeros_begin) / int64_t(sizeof(int));
  take(w.partials, w.partial_rows * width);
  return w;
}

template <typename T, typename Token>
__global__ void __launch_bounds__(kTileThreads)
    encoder_backward_tiles_kernel(const EncoderBackward<T, Token> p, const EncoderWorkspace<T> w) {
  extern __shared__ int shared[];
  let_next_kernel_start();
  const int lane = threadIdx.x % kWarp;
  const int bins = 1 << w.shift;
  const int tile_begin = blockIdx.x * w.tile_size;
  const int share = w.tile_size / static_cast<int>(blockDim.x / kWarp);  // a multiple of kWarp
  const int begin = tile_begin + threadIdx.x / kWarp * share;
  const int end = min(begin + share, w.n);
  const Token first = begin + lane < end ? p.tokens[begin + lane] : Token(0);
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < w.zeros; i += int64_t(gridDim.x) * blockDim.x)
    reinterpret_cast<int*>(w.long_runs)[i] = 0;
  // The token's row of dwte. The rows of other shards' tokens are outside of [0, vocabulary).
  const auto local_at = [&](int i) { return (i == begin + lane ? first : p.tokens[i]) - p.first_token; };
  const auto is_here = [&](int64_t local) { return local >= 0 && local < p.vocabulary; };
  const CountingSort sort(shared, bins);
  for (int i = begin + lane; i < end; i += kWarp) {
    const int64_t local = local_at(i);
    if (p.is_shard ? is_here(local)
                   : in_vocabulary(local, p.vocabulary, p.dwpe ? "encoder_backward" : "embedding_backward", i))
      sort.count(static_cast<int>(local) & (bins - 1));
  }
  sort.scan(bins);
  for (int bin = threadIdx.x; bin < bins; bin += blockDim.x)
    w.tile_starts[bin * w.tiles + blockIdx.x] = sort.start(bin);
  if (threadIdx.x == 0) w.tile_starts[bins * w.tiles + blockIdx.x] = sort.end(bins - 1);
  __syncthreads();
  for (int i = begin; i < end; i += kWarp) {
    const int64_t local = i + lane < end ? local_at(i + lane) : -1;
    const bool active = is_here(local);
    const int token = static_cast<int>(local);
    const int place = tile_begin + sort.place(active, token & (bins - 1));
    if (active) w.tile_entries[place] = {i + lane, token >> w.shift};
  }
}

template <typename T>
__global__ void __launch_bounds__(kBinThreads)
    encoder_backward_bins_kernel(const EncoderWorkspace<T> w, const int64_t vocabulary) {
  extern __shared__ int shared[];
  __shared__ int firsts[kMaxTiles];
  __shared__ int origins[kMaxTiles];  // entry e of the bin, if tile t has it, is tile_entries[origins[t] + e]
  __shared__ int before;              // entries in earlier bins
  __shared__ int total;               // entries in this bin
  constexpr int kAhead = 2;           // loads in flight per lane
  const int lane = threadIdx.x % kWarp;
  const int bin = blockIdx.x;
  let_next_kernel_start();
  if (threadIdx.x == 0) before = 0;
  const CountingSort sort(shared, w.digits);
  wait_for_previous_kernel();
  for (int tile = threadIdx.x; tile < w.tiles; tile += blockDim.x) {
    const int start = w.tile_starts[bin * w.tiles + tile];
    atomicAdd(&before, start);
    origins[tile] = tile * w.tile_size + start;
    firsts[tile] = w.tile_starts[(bin + 1) * w.tiles + tile] - start;
    if (tile == w.tiles - 1) total = firsts[tile];
  }
  exclusive_scan(firsts, w.tiles);
  for (int tile = threadIdx.x; tile < w.tiles; tile += blockDim.x) {
    origins[tile] -= firsts[tile];
    if (tile == w.tiles - 1) total += firsts[tile];
  }
  __syncthreads();
  const auto load_entry = [&](int e) {
    int tile = 0;
#pragma unroll
    for (int step = kMaxTiles / 2; step > 0; step /= 2)
      if (tile + step < w.tiles && firsts[tile + step] <= e) tile += step;
    return w.tile_entries[origins[tile] + e];
  };
  const int share = (total + blockDim.x - 1) / blockDim.x * kWarp;
  const int begin = threadIdx.x / kWarp * share;
  const int end = min(begin + share, total);
  const auto load_entries = [&](Entry(&entries)[kAhead], int first) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (const int e = first + j * kWarp + lane; e < end) entries[j] = load_entry(e);
  };
  Entry kept[kAhead] = {};  // in most bins, these are all of the lane's entries
  load_entries(kept, begin);
  const auto for_entries = [&](const auto& visit) {
    const auto visit_all = [&](const Entry(&entries)[kAhead], int first) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (first + j * kWarp < end) visit(first + j * kWarp + lane < end, entries[j]);
    };
    visit_all(kept, begin);
    for (int first = begin + kAhead * kWarp; first < end; first += kAhead * kWarp) {
      Entry entries[kAhead] = {};
      load_entries(entries, first);
      visit_all(entries, first);
    }
  };
  for_entries([&](bool active, Entry entry) {
    if (active) sort.count(entry.digit);
  });
  sort.scan(w.digits);
  const int first_slot = bin * w.digits;
  const int origin = before + first_slot;
  for (int digit = threadIdx.x; digit < w.digits; digit += blockDim.x) {
    const int token = w.token_of(first_slot + digit);
    w.items[origin + digit + sort.start(digit)] =
        token < vocabulary && sort.length(digit) <= kWindow ? ~token : kNoHead;
  }
  if (bin == static_cast<int>(gridDim.x) - 1)  // all entries are in this bin or in earlier bins
    for (int i = before + total + w.slots + threadIdx.x; i < (w.windows + 1) * kWindow; i += blockDim.x)
      w.items[i] = kNoHead;
  __syncthreads();
  for_entries([&](bool active, Entry entry) {
    const int place_in_bin = sort.place(active, entry.digit);
    if (!active) return;
    const int shift = origin + entry.digit + 1;
    const int place = shift + place_in_bin;
    const int begin = shift + sort.start(entry.digit);
    const bool is_long = sort.length(entry.digit) > kWindow;
    w.items[place] = entry.position | (is_long ? kLongRunMark : 0);
    if (is_long && (place == begin || place % kWindow == 0))
      w.long_runs[2 * (place / kWindow) + (place == begin)] = {begin, shift + sort.end(entry.digit) - 1,
                                                               w.token_of(first_slot + entry.digit)};
  });
}

}  // namespace gptkernels::cuda
