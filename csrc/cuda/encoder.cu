// The rows of the tables and of dout are cut into slabs of columns, one pack a lane of a warp, and every grid is done
// with all rows of one slab before it comes to the next. What is read more than once (the row of a token that occurs
// often; dout, which goes into two sums) then comes from memory once and from the L2 afterwards: there a slab of 64K
// rows fits, 16 or 32 MB, and whole rows do not.
#include <type_traits>

#include "../encoder.h"
#include "assert.cuh"
#include "counting_sort.cuh"
#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

template <int kVec>
int64_t slabs(int64_t width) {
  return ceil_div(width, int64_t(kVec) * kWarp);
}

// This lane's part of a slab.
template <int kVec>
struct Place {
  int64_t slab;
  int64_t column;  // of its pack
  bool has;        // whether rows are that wide

  __device__ Place(int64_t slab, int64_t width)
      : slab(slab), column((slab * kWarp + threadIdx.x % kWarp) * kVec), has(column < width) {}
};

// Whether a token may be used as an index; one that may not is said, and ends the kernel.
template <typename Token>
__device__ bool inside(Token token, int64_t vocabulary, const char* op, int64_t position) {
  if (token >= 0 && token < vocabulary) return true;
  device_fail(op, "a token is outside the vocabulary",
              "token %lld at position %lld is outside the vocabulary of %lld\n", static_cast<long long>(token),
              static_cast<long long>(position), static_cast<long long>(vocabulary));
  return false;
}

template <int kVec, typename T>
__device__ void add_pack(accumulate_t<T> (&sum)[kVec], const Packed<T, kVec>& pack) {
  accumulate_t<T> values[kVec];
  widen(values, pack);
#pragma unroll
  for (int k = 0; k < kVec; ++k) sum[k] += values[k];
}

// Evict-first: what is written is not read again here, so the L2 is left to what is.
template <int kVec, typename T>
__device__ void stream(T* p, const Packed<T, kVec>& value) {
  if constexpr (sizeof(value) == sizeof(uint4))
    __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&value));
  else if constexpr (sizeof(value) == sizeof(uint2))
    __stcs(reinterpret_cast<uint2*>(p), *reinterpret_cast<const uint2*>(&value));
  else
    store<kVec>(p, value);
}

template <int kVec, typename T>
__device__ void stream_narrow(T* p, const accumulate_t<T> (&values)[kVec]) {
  stream<kVec>(p, narrow<T>(values));
}

template <int kVec, typename A>
__device__ void set_zero(A (&values)[kVec]) {
#pragma unroll
  for (int k = 0; k < kVec; ++k) values[k] = 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Forward: writes out once, B * T * C * sizeof(T) bytes, and reads the rows of wte that occur, and wpe, once.
//
// Each warp of a grid that just fills the device takes units of four rows, all under way at once, and looks up the next
// unit's tokens meanwhile. A unit's rows are those of one position in several sequences, which share the row of wpe.
// Where there are fewer sequences than that its rows are neighbours, each with its own row of wpe.

constexpr int kForwardRows = 4;
constexpr int kForwardBlocks = 4;  // of a multiprocessor

struct Units {
  int64_t stride;  // from one row of a unit to the next: T, or 1
  int64_t count;
};

template <typename T, typename Token, int kVec, bool kOwnPositions>
__global__ void __launch_bounds__(kThreads, kOwnPositions ? kForwardBlocks - 1 : kForwardBlocks)
    encoder_forward_slab_kernel(const EncoderForward<T, Token> p, const Units units, const int64_t slab_count) {
  constexpr int kRows = kForwardRows;
  constexpr int kPositions = kOwnPositions ? kRows : 1;
  const int lane = threadIdx.x % kWarp;
  const int64_t rows = p.batch * p.length;
  const int64_t step = int64_t(gridDim.x) * kWarps;
  const auto first_row = [&](int64_t unit) { return unit + unit / units.stride * (kRows - 1) * units.stride; };
  const auto load_token = [&](int64_t first) {
    const int64_t row = first + lane * units.stride;
    return lane < kRows && row < rows ? p.tokens[row] : Token(0);
  };
  int64_t slab = 0;
  int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const auto settle = [&] {
    for (; unit >= units.count && slab < slab_count; ++slab) unit -= units.count;
  };
  settle();
  int64_t next_first = first_row(unit);
  Token next_token = slab < slab_count ? load_token(next_first) : Token(0);
  while (slab < slab_count) {
    const Place<kVec> at(slab, p.width);
    const int64_t first = next_first;
    const Token token = next_token;
    if (!__all_sync(kAll, inside(token, p.vocabulary, p.wpe ? "encoder" : "embedding", first + lane * units.stride)))
      return;
    unit += step;
    settle();
    next_first = first_row(unit);
    next_token = slab < slab_count ? load_token(next_first) : Token(0);

    Packed<T, kVec> embeddings[kRows], positions[kPositions];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row_token = __shfl_sync(kAll, token, r);
      if (at.has && first + r * units.stride < rows)
        embeddings[r] = load<kVec>(p.wte + row_token * p.width + at.column);
    }
    if (!at.has) continue;
    if (p.wpe)
#pragma unroll
      for (int r = 0; r < kPositions; ++r)
        if (first + r < rows) positions[r] = load<kVec>(p.wpe + (first + r) % p.length * p.width + at.column);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * units.stride;
      if (row >= rows) break;
      if (p.wpe) {
        accumulate_t<T> sum[kVec];
        widen(sum, embeddings[r]);
        add_pack(sum, positions[kOwnPositions ? r : 0]);
        embeddings[r] = narrow<T>(sum);
      }
      stream<kVec>(p.out + row * p.width + at.column, embeddings[r]);
    }
  }
}

template <typename T, typename Token, int kVec>
void launch_forward(const EncoderForward<T, Token>& p, Stream stream) {
  const bool share = p.wpe && p.batch >= kForwardRows;
  const int64_t stride = share ? p.length : 1;
  const Units units{stride, ceil_div(p.batch * p.length / stride, kForwardRows) * stride};
  const int64_t slab_count = slabs<kVec>(p.width);
  const int64_t fill = int64_t(multiprocessors()) * kForwardBlocks;
  const unsigned grid = grid_size(std::min(ceil_div(units.count * slab_count, kWarps), fill));
  if (p.wpe && !share)
    encoder_forward_slab_kernel<T, Token, kVec, true><<<grid, kThreads, 0, stream>>>(p, units, slab_count);
  else
    encoder_forward_slab_kernel<T, Token, kVec, false><<<grid, kThreads, 0, stream>>>(p, units, slab_count);
}

// ---------------------------------------------------------------------------------------------------------------
// Backward, first half: the positions are put in order of their tokens, by two stable counting sorts.
//
// The first cuts the N positions in at most 128 tiles, a block each, and sorts a tile into bins by the low bits of its
// tokens (about sqrt(V) bins, so both sorts have about as many digits; low bits, so frequent tokens, which have small
// numbers, are spread). In the second a block gathers one bin from all tiles and sorts it by the other bits. A token's
// place in the order, bin after bin, is its slot. No atomics but those that count, so the order is the tokens' alone.
// It takes reading the tokens and a few times 4 N bytes, all in L2: this half is latency, not bytes. The next kernel of
// the three starts while one still runs (launch.cuh), and the sums over the batch need no order.

constexpr int kTileThreads = 1024;
constexpr int kBinThreads = 512;
constexpr int kMaxTiles = 128;
constexpr int kUnit = 32;           // slots and entries together that a warp sums
constexpr int kWindow = 2 * kUnit;  // a run of more entries is long; of those, what a warp sums
constexpr int kBatchPiece = 128;    // of a position's rows likewise
constexpr int kGroup = 64;          // partial sums that are added at a time

struct Entry {
  int position;
  int digit;  // the token's high bits
};

// `starts[s]` is where slot s begins in the list, `first_slot[u]` the first slot s with starts[s] + s >= u * kUnit: to
// count an entry and a slot alike cuts reading and writing in units of one size.
template <typename T>
struct Workspace {
  Entry* tile_entries;        // (N) each tile in order of bins
  int* tile_starts;           // (bins + 1, tiles)
  int* list;                  // (N) positions in order
  int* starts;                // (slots + 1)
  int* first_slot;            // (units + 1)
  int* has_long;              // (windows) whether a piece of a long run lies there; followed by
  int* arrived;               // (2, arrivals, slabs) partial sums that are done
  accumulate_t<T>* partials;  // (2 * windows + pieces * T, C)
  int n;
  int shift;   // bins = 1 << shift
  int digits;  // of the second sort
  int slots;   // bins * digits
  int tiles;
  int tile_size;
  int units;
  int windows;
  int pieces;  // of a position's sum over the batch
  int arrivals;
  int slabs;
  int width;
  int64_t bytes;  // all of it

  __device__ int token_of(int slot) const { return slot / digits + (slot % digits << shift); }
};

// Cuts `base` into its parts; with a null base this only counts the bytes.
template <typename T>
Workspace<T> carve(void* base, int64_t batch, int64_t length, int64_t vocabulary, int64_t width, int64_t slabs) {
  Workspace<T> w{};
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
  w.units = static_cast<int>(windows * (kWindow / kUnit));
  w.pieces = static_cast<int>(pieces);
  w.arrivals = static_cast<int>(windows + piece_rows);
  w.slabs = static_cast<int>(slabs);
  w.width = static_cast<int>(width);
  take(w.tile_entries, n);
  take(w.tile_starts, ((1 << w.shift) + 1) * int64_t(w.tiles));
  take(w.list, n);
  take(w.starts, slots + 1);
  take(w.first_slot, w.units + 1);
  take(w.has_long, w.windows + 2 * w.arrivals * slabs);
  w.arrived = w.has_long + w.windows;
  take(w.partials, (2 * windows + piece_rows) * width);
  return w;
}

template <typename T, typename Token>
__global__ void __launch_bounds__(kTileThreads)
    encoder_backward_tiles_kernel(const EncoderBackward<T, Token> p, const Workspace<T> w) {
  extern __shared__ int shared[];
  let_next_kernel_start();
  const int lane = threadIdx.x % kWarp;
  const int bins = 1 << w.shift;
  const int tile_begin = blockIdx.x * w.tile_size;
  const int share = w.tile_size / static_cast<int>(blockDim.x / kWarp);  // a multiple of kWarp
  const int begin = tile_begin + threadIdx.x / kWarp * share;
  const int end = min(begin + share, w.n);
  const int64_t zeros = w.windows + 2 * int64_t(w.arrivals) * w.slabs;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < zeros; i += int64_t(gridDim.x) * blockDim.x)
    w.has_long[i] = 0;

  const CountingSort sort(shared, bins);
  for (int i = begin + lane; i < end; i += kWarp) {
    const Token token = p.tokens[i];
    if (inside(token, p.vocabulary, p.dwpe ? "encoder_backward" : "embedding_backward", i))
      sort.count(static_cast<int>(token) & (bins - 1));
  }
  sort.scan(bins);
  for (int bin = threadIdx.x; bin < bins; bin += blockDim.x)
    w.tile_starts[bin * w.tiles + blockIdx.x] = sort.start(bin);
  if (threadIdx.x == 0) w.tile_starts[bins * w.tiles + blockIdx.x] = min(w.n - tile_begin, w.tile_size);
  __syncthreads();
  for (int i = begin; i < end; i += kWarp) {
    const bool active = i + lane < end;
    const int token = active ? static_cast<int>(p.tokens[i + lane]) : 0;
    const int place = tile_begin + sort.place(active, token & (bins - 1));
    if (active) w.tile_entries[place] = {i + lane, token >> w.shift};
  }
}

template <typename T>
__global__ void __launch_bounds__(kBinThreads) encoder_backward_bins_kernel(const Workspace<T> w) {
  extern __shared__ int shared[];
  __shared__ int firsts[kMaxTiles];   // the bin's entries in the tiles before
  __shared__ int origins[kMaxTiles];  // where its 0th would lie, were it in this tile
  __shared__ int before;              // entries in the bins before
  __shared__ int total;
  constexpr int kAhead = 4;  // entries that a lane loads at once
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
  const auto for_entries = [&](const auto& visit) {
    for (int first = begin; first < end; first += kAhead * kWarp) {
      Entry entries[kAhead] = {};
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (const int e = first + j * kWarp + lane; e < end) entries[j] = load_entry(e);
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (first + j * kWarp < end) visit(first + j * kWarp + lane < end, entries[j]);
    }
  };
  for_entries([&](bool active, Entry entry) {
    if (active) sort.count(entry.digit);
  });
  sort.scan(w.digits);
  for (int digit = threadIdx.x; digit < w.digits; digit += blockDim.x) {
    const int slot = bin * w.digits + digit;
    const int start = before + sort.start(digit);
    const int next = before + (digit + 1 < w.digits ? sort.start(digit + 1) : total);
    w.starts[slot] = start;
    for (int unit = (start + slot) / kUnit + 1; unit <= (next + slot + 1) / kUnit; ++unit)
      w.first_slot[unit] = slot + 1;
    if (next - start > kWindow)
      for (int window = (start + slot) / kWindow; window <= (next - 1 + slot) / kWindow; ++window)
        w.has_long[window] = 1;
  }
  if (bin == 0 && threadIdx.x == 0) {
    w.first_slot[0] = 0;
    w.starts[w.slots] = w.n;
  }
  if (bin == 0)
    for (int unit = (w.n + w.slots) / kUnit + 1 + threadIdx.x; unit <= w.units; unit += blockDim.x)
      w.first_slot[unit] = w.slots;
  __syncthreads();
  for_entries([&](bool active, Entry entry) {
    const int place = before + sort.place(active, entry.digit);
    if (active) w.list[place] = entry.position;
  });
}

// ---------------------------------------------------------------------------------------------------------------
// Backward, second half: reads dout once, B * T * C * sizeof(T) bytes, and writes each row of dwte and dwpe once, zero
// where no token stands.
//
// A warp takes one unit of work, and units of three kinds are cut so that all are of about one size: a position's rows
// over (a piece of) the batch; the rows of neighbouring slots; of a long run (a token that occurs often) what lies in a
// window of the list. The sum of a run or of a batch that is cut in pieces is added up, in order, by the warp whose
// piece is the last to be done. Whichever that is, the order of the additions is the same, and so are the bits.

constexpr int kBackwardBlocks = 4;  // of a multiprocessor

// Slabs of 256 bytes (16 MB of 64K rows) for what has 4 bytes an element. With 2 bytes an element there is twice as
// much to do a byte, and packs of 16 bytes, half as many, are worth more than the L2's room.
template <typename T>
constexpr int kBackwardVec = sizeof(T) == 2 ? 8 : 8 / sizeof(T);

template <int kVec>
constexpr int kAhead = kVec <= 2 ? 8 : 4;  // rows that a warp has under way at once

// A lane's column of a matrix. Rows and their bytes in 32 bits: then an address is one instruction.
template <typename T>
struct Column {
  T* top;
  unsigned row_bytes;

  __device__ T* row(unsigned row) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(top) + uint64_t(row) * row_bytes);
  }
};

template <int kVec, typename T, typename A>
__device__ Column<T> column_of(T* matrix, const Place<kVec>& at, const Workspace<A>& w) {
  return {matrix + at.column, w.width * unsigned(sizeof(T))};
}

// sum = the rows row_at(0), ..., row_at(count - 1).
template <int kVec, typename T, typename RowAt>
__device__ void sum_rows(accumulate_t<std::remove_const_t<T>> (&sum)[kVec], bool has, const Column<T>& column,
                         int count, const RowAt& row_at) {
  constexpr int kRows = kAhead<kVec>;
  set_zero(sum);
  for (int first = 0; first < count; first += kRows) {
    Packed<std::remove_const_t<T>, kVec> packs[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const T* p = column.row(row_at(first + j));
      packs[j] = {};
      if (has && first + j < count) packs[j] = load<kVec>(p);
    }
    accumulate_t<std::remove_const_t<T>> some[kVec] = {};
#pragma unroll
    for (int j = 0; j < kRows; ++j) add_pack(some, packs[j]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[k] += some[k];
  }
}

// Whether this warp, which has just written a partial sum, is the last of `count` that do.
__device__ bool last_to_arrive(int* arrived, int count) {
  __threadfence();
  __syncwarp();
  int before = 0;
  if (threadIdx.x % kWarp == 0) before = atomicAdd(arrived, 1);
  before = __shfl_sync(kAll, before, 0);
  __threadfence();
  return before == count - 1;
}

// `sum` is part `part` of `parts`. The last warp to come here returns with the sum of all: those of each group of parts
// are added first, then the groups' sums. `partial_at` says in which row of the partials a part lies, `arrival_at` who
// counts for the group that begins with it.
template <int kVec, typename T, typename RowAt, typename ArrivalAt>
__device__ bool add_parts(accumulate_t<T> (&sum)[kVec], const Place<kVec>& at, const Workspace<T>& w, int part,
                          int parts, const RowAt& partial_at, const ArrivalAt& arrival_at) {
  const auto partials = column_of(w.partials, at, w);
  const auto keep = [&](int part) {
    accumulate_t<T>* p = partials.row(partial_at(part));
#pragma unroll
    for (int k = 0; k < kVec; ++k)
      if (at.has) p[k] = sum[k];
  };
  const int first = part / kGroup * kGroup;
  const int count = min(kGroup, parts - first);
  keep(part);
  if (!last_to_arrive(w.arrived + int64_t(arrival_at(first)) * w.slabs + at.slab, count)) return false;
  sum_rows<kVec>(sum, at.has, partials, count, [&](int i) { return partial_at(first + i); });
  if (parts <= kGroup) return true;
  const int groups = (parts + kGroup - 1) / kGroup;
  keep(first);
  if (!last_to_arrive(w.arrived + (int64_t(w.arrivals) + arrival_at(0)) * w.slabs + at.slab, groups)) return false;
  sum_rows<kVec>(sum, at.has, partials, groups, [&](int i) { return partial_at(i * kGroup); });
  return true;
}

// dwpe[t] = sum over b of dout[b, t].
template <typename T, typename Token, int kVec>
__device__ void sum_over_batch(const EncoderBackward<T, Token>& p, const Workspace<T>& w, const Place<kVec>& at, int t,
                               int piece) {
  const int length = static_cast<int>(p.length);
  if (t >= length && piece > 0) return;
  accumulate_t<T> sum[kVec] = {};
  if (t < length) {
    const int first = piece * kBatchPiece;
    const int count = min(static_cast<int>(p.batch) - first, kBatchPiece);
    sum_rows<kVec>(sum, at.has, column_of(p.dout, at, w), count, [&](int i) { return (first + i) * length + t; });
    if (w.pieces > 1) {
      wait_for_previous_kernel();
      const auto row = [&](int part) { return part * length + t; };
      if (!add_parts<kVec, T>(
              sum, at, w, piece, w.pieces, [&](int i) { return 2 * w.windows + row(i); },
              [&](int i) { return w.windows + row(i); }))
        return;
    }
  }
  if (at.has) stream_narrow<kVec>(column_of(p.dwpe, at, w).row(t), sum);
}

// The rows of dwte of a unit's slots, but for those of long runs.
template <typename T, typename Token, int kVec>
__device__ void sum_slots(const EncoderBackward<T, Token>& p, const Workspace<T>& w, const Place<kVec>& at, int unit) {
  constexpr int kRows = kAhead<kVec>;
  const int lane = threadIdx.x % kWarp;
  const auto dwte = column_of(p.dwte, at, w);
  const auto dout = column_of(p.dout, at, w);
  const int slot = w.first_slot[unit] + lane;
  const int token = w.token_of(slot);
  const bool exists = slot < w.first_slot[unit + 1] && token < p.vocabulary;
  const int start = exists ? w.starts[slot] : 0;
  const int run = exists ? w.starts[slot + 1] - start : 0;

  accumulate_t<T> sum[kVec] = {};
  for (unsigned empty = __ballot_sync(kAll, exists && run == 0); empty != 0; empty &= empty - 1) {
    const int row = __shfl_sync(kAll, token, __ffs(empty) - 1);
    if (at.has) stream_narrow<kVec>(dwte.row(row), sum);
  }

  // The entries of all the short runs, counted through: each lane finds the place of one.
  const int count = run > kWindow ? 0 : run;
  const int end = inclusive_scan(count);
  const int origin = start + count - end;
  const int total = __shfl_sync(kAll, end, kWarp - 1);
  for (int first = 0; first < total; first += kWarp) {
    const int entry = first + lane;
    int owner = 0;  // the first lane whose run ends beyond the entry
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2)
      if (__shfl_sync(kAll, end, owner + step - 1) <= entry) owner += step;
    const int owner_end = __shfl_sync(kAll, end, owner);
    const int place = __shfl_sync(kAll, origin, owner) + entry;
    const int owner_token = __shfl_sync(kAll, token, owner);
    const int position = entry < total ? w.list[place] : 0;
    const unsigned last = __ballot_sync(kAll, entry + 1 == owner_end);  // bit i: entry i is the last of its run
    const int here = min(total - first, kWarp);
    for (int i = 0; i < here; i += kRows) {
      // No branch but around the stores, and no shuffle between them: the compiler would have the warp meet for each.
      Packed<T, kVec> packs[kRows];
      int rows[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const T* p = dout.row(__shfl_sync(kAll, position, i + j));
        rows[j] = __shfl_sync(kAll, owner_token, i + j);
        packs[j] = {};
        if (at.has && i + j < here) packs[j] = load<kVec>(p);
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const bool ends = last >> (i + j) & 1u;
        add_pack(sum, packs[j]);
        if (ends && at.has) stream_narrow<kVec>(dwte.row(rows[j]), sum);
#pragma unroll
        for (int k = 0; k < kVec; ++k) sum[k] = ends ? 0 : sum[k];
      }
    }
  }
}

// The pieces of long runs that lie in a window: of the run that reaches into it, and of the last that begins in it. (A
// run between the two is shorter than the window.)
template <typename T, typename Token, int kVec>
__device__ void sum_window(const EncoderBackward<T, Token>& p, const Workspace<T>& w, const Place<kVec>& at,
                           int window) {
  const int lane = threadIdx.x % kWarp;
  const int begin = window * kWindow;
  const int reaches_in = w.first_slot[window * (kWindow / kUnit)] - 1;
  const int begins_last = w.first_slot[(window + 1) * (kWindow / kUnit)] - 1;
  for (int i = 0; i < 2; ++i) {
    const int slot = i == 0 ? reaches_in : begins_last;
    if (slot < 0 || (i == 1 && slot == reaches_in)) continue;
    const int run_begin = w.starts[slot];
    const int run_end = w.starts[slot + 1];
    const int piece_begin = max(run_begin, begin - slot);
    const int piece_end = min(run_end, begin + kWindow - slot);
    if (run_end - run_begin <= kWindow || piece_begin >= piece_end) continue;
    const int count = piece_end - piece_begin;
    const int positions[2] = {w.list[piece_begin + min(lane, count - 1)],
                              w.list[piece_begin + min(kWarp + lane, count - 1)]};
    accumulate_t<T> sum[kVec];
    sum_rows<kVec>(sum, at.has, column_of(p.dout, at, w), count, [&](int i) {
      const int low = __shfl_sync(kAll, positions[0], i);
      const int high = __shfl_sync(kAll, positions[1], i);
      return i < kWarp ? low : high;
    });
    const int first_window = (run_begin + slot) / kWindow;
    const int parts = (run_end - 1 + slot) / kWindow - first_window + 1;
    if (!add_parts<kVec, T>(
            sum, at, w, window - first_window, parts, [&](int i) { return 2 * (first_window + i) + (i == 0); },
            [&](int i) { return first_window + i; }))
      continue;
    if (at.has) stream_narrow<kVec>(column_of(p.dwte, at, w).row(w.token_of(slot)), sum);
  }
}

template <typename T, typename Token, int kVec>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    encoder_backward_sums_kernel(const EncoderBackward<T, Token> p, const Workspace<T> w, const int64_t batch_blocks) {
  const int warp = threadIdx.x / kWarp;
  const bool over_batch = blockIdx.x < batch_blocks;
  const int64_t unit = (int64_t(blockIdx.x) - (over_batch ? 0 : batch_blocks)) * kWarps + warp;
  if (unit >= (over_batch ? p.positions * w.pieces : w.units)) return;
  if (!over_batch) wait_for_previous_kernel();
  for (int64_t slab = blockIdx.y; slab < w.slabs; slab += gridDim.y) {
    const Place<kVec> at(slab, w.width);
    if (over_batch) {
      sum_over_batch<T, Token, kVec>(p, w, at, static_cast<int>(unit % p.positions),
                                     static_cast<int>(unit / p.positions));
      continue;
    }
    sum_slots<T, Token, kVec>(p, w, at, static_cast<int>(unit));
    const int window = static_cast<int>(unit / (kWindow / kUnit));
    if (unit % (kWindow / kUnit) == 0 && w.has_long[window]) sum_window<T, Token, kVec>(p, w, at, window);
  }
}

template <typename T, typename Token, int kVec>
void launch_backward(const EncoderBackward<T, Token>& p, const Workspace<T>& w, Stream stream) {
  const int bins = 1 << w.shift;
  const int tile_threads = CountingSort::threads(kTileThreads, bins);
  const int bin_threads = CountingSort::threads(kBinThreads, w.digits);
  encoder_backward_tiles_kernel<T, Token>
      <<<w.tiles, tile_threads, CountingSort::shared_bytes(tile_threads, bins), stream>>>(p, w);
  launch_early<encoder_backward_bins_kernel<T>>(bins, bin_threads, CountingSort::shared_bytes(bin_threads, w.digits),
                                                stream, w);
  constexpr int kMaxGridY = 65535;
  const int64_t batch_blocks = p.dwpe ? ceil_div(p.positions * w.pieces, kWarps) : 0;
  const int64_t slot_blocks = ceil_div(w.units, kWarps);
  launch_early<encoder_backward_sums_kernel<T, Token, kVec>>(
      dim3(grid_size(batch_blocks + slot_blocks), std::min(w.slabs, kMaxGridY)), kThreads, 0, stream, p, w,
      batch_blocks);
}

}  // namespace

template <typename T, typename Token>
Status encoder_forward(const EncoderForward<T, Token>& p, Stream stream) {
  if (p.batch * p.length == 0 || p.width == 0) return cudaSuccess;
  if (packs<T>(p.width, p.out, p.wte, p.wpe))
    launch_forward<T, Token, kPack<T>>(p, stream);
  else
    launch_forward<T, Token, 1>(p, stream);
  return cudaGetLastError();
}

template <typename T, typename Token>
int64_t encoder_backward_workspace(int64_t batch, int64_t length, int64_t vocabulary, int64_t width) {
  if (batch * length == 0) return 0;
  return carve<T>(nullptr, batch, length, vocabulary, width, slabs<1>(width)).bytes;  // slabs of packs are fewer
}

template <typename T, typename Token>
Status encoder_backward(const EncoderBackward<T, Token>& p, Stream stream) {
  const int64_t n = p.batch * p.length;
  if (p.width == 0) return cudaSuccess;
  if (n == 0) {
    const int64_t row_bytes = p.width * int64_t(sizeof(T));
    if (p.dwpe)
      if (Status status = cudaMemsetAsync(p.dwpe, 0, p.positions * row_bytes, stream); status != cudaSuccess)
        return status;
    return p.dwte ? cudaMemsetAsync(p.dwte, 0, p.vocabulary * row_bytes, stream) : cudaSuccess;
  }
  if (n > kEncoderMostRows || p.positions > kEncoderMostRows || p.vocabulary > kEncoderMostWords ||
      p.width > kEncoderMostColumns)
    return cudaErrorInvalidValue;
  const bool packed = packs<T>(p.width, p.dwte, p.dwpe, p.dout);
  constexpr int kVec = kBackwardVec<T>;
  const int64_t slab_count = packed ? slabs<kVec>(p.width) : slabs<1>(p.width);
  const Workspace<T> w = carve<T>(p.workspace, p.batch, p.length, p.vocabulary, p.width, slab_count);
  if (packed)
    launch_backward<T, Token, kVec>(p, w, stream);
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
