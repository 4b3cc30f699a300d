// The encoder's backward, second half (the first: encoder_order.cuh): reads dout once, B * T * C * sizeof(T) bytes, and
// writes each row of dwte and dwpe once, zero where no token stands.
//
// Pieces of work of three kinds are cut so that all are of about one size: a position's rows over (a part of) the
// batch; the rows of dwte whose heads are in a unit of the items; of a long run (a token that occurs often) what lies
// in a window of the items. The sum of a run or of a batch that is cut in parts is added up, in order, by the warp
// whose part is the last to be done. Whichever that is, the order of the additions is the same, and so are the bits.
//
// A slab takes 256 bytes of a row, 16 lanes: wider ones do not stay in the L2 until dout is read for the second time,
// narrower ones cost the memory more, and with 16 bytes a lane there are half as many instructions as with 8.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../encoder.h"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "encoder_order.cuh"
#include "encoder_slab.cuh"

namespace gptkernels::cuda {

constexpr int kSumsThreads = 256;
constexpr int kSumsWarps = kSumsThreads / kWarp;
constexpr int kBackwardBlocks = 4;  // of a multiprocessor
constexpr int kGroup = 64;          // partial sums that are added at a time

template <int kVec>
constexpr int kAhead = kVec <= 4 ? 8 : 4;  // rows that a lane has under way at once, as registers allow

// The lanes of a warp that share a row. A warp works on as many rows at a time as it has such groups of lanes.
template <int kVec>
constexpr int kLanes = kVec == 1 ? kWarp : kWarp / 2;

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
__device__ Column<T> column_of(T* matrix, const Place<kVec, kLanes<kVec>>& at, const EncoderWorkspace<A>& w) {
  return {matrix + at.column, w.width * unsigned(sizeof(T))};
}

// sum = the rows row_at(0), ..., row_at(count - 1): each group of lanes adds up its share, and all get the whole.
template <int kVec, typename T, typename RowAt>
__device__ void sum_rows(accumulate_t<std::remove_const_t<T>> (&sum)[kVec], const Column<T>& column, int count,
                         const RowAt& row_at) {
  constexpr int kGroups = kWarp / kLanes<kVec>;
  const int group = threadIdx.x % kWarp / kLanes<kVec>;
#pragma unroll
  for (int k = 0; k < kVec; ++k) sum[k] = 0;
  for (int first = group; first < count; first += kAhead<kVec> * kGroups) {
    Packed<std::remove_const_t<T>, kVec> packs[kAhead<kVec>];
#pragma unroll
    for (int j = 0; j < kAhead<kVec>; ++j) {
      const int i = first + j * kGroups;
      packs[j] = {};
      if (i < count) packs[j] = load<kVec>(column.row(row_at(i)));
    }
    accumulate_t<std::remove_const_t<T>> some[kVec] = {};
#pragma unroll
    for (int j = 0; j < kAhead<kVec>; ++j) add_pack(some, packs[j]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[k] += some[k];
  }
  __syncwarp();
#pragma unroll
  for (int offset = kLanes<kVec>; offset < kWarp; offset *= 2)
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[k] += __shfl_xor_sync(kAll, sum[k], offset);
}

// Whether this warp, which has just written a partial sum, is the last of `count` that do.
__device__ inline bool last_to_arrive(int* arrived, int count) {
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
__device__ bool add_parts(accumulate_t<T> (&sum)[kVec], const Place<kVec, kLanes<kVec>>& at,
                          const EncoderWorkspace<T>& w, int part, int parts, const RowAt& partial_at,
                          const ArrivalAt& arrival_at) {
  const auto partials = column_of(w.partials, at, w);
  const auto keep = [&](int part) {
    accumulate_t<T>* p = partials.row(partial_at(part));
#pragma unroll
    for (int k = 0; k < kVec; ++k) p[k] = sum[k];
  };
  const int first = part / kGroup * kGroup;
  const int count = min(kGroup, parts - first);
  keep(part);
  if (!last_to_arrive(w.arrived + int64_t(arrival_at(first)) * w.slabs + at.slab, count)) return false;
  sum_rows<kVec>(sum, partials, count, [&](int i) { return partial_at(first + i); });
  if (parts <= kGroup) return true;
  const int groups = (parts + kGroup - 1) / kGroup;
  keep(first);
  if (!last_to_arrive(w.arrived + (int64_t(w.arrivals) + arrival_at(0)) * w.slabs + at.slab, groups)) return false;
  sum_rows<kVec>(sum, partials, groups, [&](int i) { return partial_at(i * kGroup); });
  return true;
}

// dwpe[t] = sum over b of dout[b, t].
template <typename T, typename Token, int kVec>
__device__ void sum_over_batch(const EncoderBackward<T, Token>& p, const EncoderWorkspace<T>& w,
                               const Place<kVec, kLanes<kVec>>& at, int t, int piece) {
  const int length = static_cast<int>(p.length);
  if (t >= length && piece > 0) return;
  accumulate_t<T> sum[kVec] = {};
  if (t < length) {
    const int first = piece * kBatchPiece;
    const int count = min(static_cast<int>(p.batch) - first, kBatchPiece);
    sum_rows<kVec>(sum, column_of(p.dout, at, w), count, [&](int i) { return (first + i) * length + t; });
    if (w.pieces > 1) {
      wait_for_previous_kernel();
      const auto row = [&](int part) { return part * length + t; };
      if (!add_parts<kVec, T>(
              sum, at, w, piece, w.pieces, [&](int i) { return 2 * w.windows + row(i); },
              [&](int i) { return w.windows + row(i); }))
        return;
    }
  }
  stream_narrow<kVec>(column_of(p.dwpe, at, w).row(t), sum);
}

// The rows of dwte whose heads are in a unit of the items, for each group of lanes its own. A row is written when the
// next head comes; the last one's entries end beyond the unit.
template <typename T, typename Token, int kVec>
__device__ void sum_slots(const EncoderBackward<T, Token>& p, const EncoderWorkspace<T>& w,
                          const Place<kVec, kLanes<kVec>>& at, int unit) {
  constexpr int kReach = kUnit + kWindow;
  constexpr int kRounds = kReach / kLanes<kVec>;
  __shared__ alignas(16) int staged[kSumsThreads / kLanes<kVec>][kReach + 8];  // 8: groups in banks of their own
  int* items = staged[threadIdx.x / kLanes<kVec>];
  const int lane = threadIdx.x % kLanes<kVec>;
  const int group_shift = threadIdx.x % kWarp - lane;
  int loaded[kRounds];
#pragma unroll
  for (int c = 0; c < kRounds; ++c) loaded[c] = w.items[unit * kUnit + c * kLanes<kVec> + lane];
  int first = kReach;
  int end = kReach;
#pragma unroll
  for (int c = 0; c < kRounds; ++c) {
    const unsigned heads = (__ballot_sync(kAll, loaded[c] < 0) >> group_shift) & (kAll >> (kWarp - kLanes<kVec>));
    const int head = c * kLanes<kVec> + __ffs(heads) - 1;
    if (c * kLanes<kVec> < kUnit)
      first = heads && first == kReach ? head : first;
    else
      end = heads && end == kReach ? head : end;
  }
  if (__all_sync(kAll, first == kReach)) return;
#pragma unroll
  for (int c = 0; c < kRounds; ++c) {
    const int i = c * kLanes<kVec> + lane;
    items[i] = i < first || i >= end ? kMark : loaded[c];
  }
  __syncwarp();

  const auto dwte = column_of(p.dwte, at, w);
  const auto dout = column_of(p.dout, at, w);
  const int all_end = __reduce_max_sync(kAll, first == kReach ? 0 : end);
  unsigned row = kNoRow;
  accumulate_t<T> sum[kVec] = {};
  for (int i = 0; i < all_end; i += kAhead<kVec>) {
    Packed<T, kVec> packs[kAhead<kVec>];
    int item[kAhead<kVec>];
#pragma unroll
    for (int j = 0; j < kAhead<kVec>; j += 4) {
      const int4 four = *reinterpret_cast<const int4*>(items + i + j);
      item[j] = four.x;
      item[j + 1] = four.y;
      item[j + 2] = four.z;
      item[j + 3] = four.w;
    }
#pragma unroll
    for (int j = 0; j < kAhead<kVec>; ++j) {
      const T* p = dout.row(item[j]);
      packs[j] = {};
      if (unsigned(item[j]) < unsigned(kMark)) packs[j] = load_last<kVec>(p);
    }
    // No branch but around the stores: the compiler would have the groups meet after each.
#pragma unroll
    for (int j = 0; j < kAhead<kVec>; ++j) {
      const bool head = item[j] < 0;
      if (head && row != kNoRow) stream_narrow<kVec>(dwte.row(row), sum);
      row = head ? ~item[j] : row;
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum[k] = head ? 0 : sum[k];
      add_pack(sum, packs[j]);
    }
  }
  if (row != kNoRow) stream_narrow<kVec>(dwte.row(row), sum);
  __syncwarp();  // what is staged has been read
}

// The pieces of long runs that lie in a window of the items.
template <typename T, typename Token, int kVec>
__device__ void sum_window(const EncoderBackward<T, Token>& p, const EncoderWorkspace<T>& w,
                           const Place<kVec, kLanes<kVec>>& at, int window) {
  for (int i = 0; i < 2; ++i) {
    const Run run = w.long_runs[2 * window + i];
    if (run.last == 0) continue;
    const int begin = max(run.first, window * kWindow);
    const int count = min(run.last + 1, (window + 1) * kWindow) - begin;
    accumulate_t<T> sum[kVec];
    sum_rows<kVec>(sum, column_of(p.dout, at, w), count, [&](int i) { return w.items[begin + i] & ~kMark; });
    const int first_window = run.first / kWindow;
    const int parts = run.last / kWindow - first_window + 1;
    if (!add_parts<kVec, T>(
            sum, at, w, window - first_window, parts, [&](int i) { return 2 * (first_window + i) + (i == 0); },
            [&](int i) { return first_window + i; }))
      continue;
    stream_narrow<kVec>(column_of(p.dwte, at, w).row(run.token), sum);
  }
}

template <typename T, typename Token, int kVec>
__global__ void __launch_bounds__(kSumsThreads, kBackwardBlocks)
    encoder_backward_sums_kernel(const EncoderBackward<T, Token> p, const EncoderWorkspace<T> w,
                                 const int64_t batch_blocks) {
  constexpr int kGroups = kWarp / kLanes<kVec>;
  const bool over_batch = blockIdx.x < batch_blocks;
  const int64_t warp = (int64_t(blockIdx.x) - (over_batch ? 0 : batch_blocks)) * kSumsWarps + threadIdx.x / kWarp;
  const int64_t unit = warp * kGroups;
  if (over_batch ? warp >= p.positions * w.pieces : unit >= w.windows * int64_t(kWindow / kUnit)) return;
  if (!over_batch) wait_for_previous_kernel();
  for (int64_t slab = blockIdx.y; slab < w.slabs; slab += gridDim.y) {
    const Place<kVec, kLanes<kVec>> at(slab, w.width);
    if (over_batch) {
      sum_over_batch<T, Token, kVec>(p, w, at, static_cast<int>(warp % p.positions),
                                     static_cast<int>(warp / p.positions));
      continue;
    }
    sum_slots<T, Token, kVec>(p, w, at, static_cast<int>(unit) + static_cast<int>(threadIdx.x % kWarp) / kLanes<kVec>);
    if (unit % (kWindow / kUnit) == 0) sum_window<T, Token, kVec>(p, w, at, static_cast<int>(unit / (kWindow / kUnit)));
  }
}

}  // namespace gptkernels::cuda
