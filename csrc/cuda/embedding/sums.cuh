// The second half of the encoder's backward, after order.cuh has sorted the positions by token. dout is read from
// memory once. Rows of dwte whose token does not occur become 0. With kAccumulate, the sums are added to dwte, and rows
// whose token does not occur stay unchanged.
//
// The work is divided into tasks of similar size, one per warp or half-warp:
//
//   sum_over_batch   one position's rows of dout, or kBatchPiece of them         dwpe
//   sum_short_runs   the tokens whose heads are in kUnit items                   dwte
//   sum_long_runs    the entries of long runs (frequent tokens) in one window    dwte
//
// The sum over a batch of more than kBatchPiece, and the sum of a long run, have several parts, each computed by one
// warp. The warp that finishes last adds the parts (add_parts); no warp waits for another. The order of the additions
// depends on the tokens alone, not on which warp is the last.
//
// A slab of packs is 256 bytes of a row, 16 lanes with 16 bytes each. Wider slabs do not stay in the L2 until dout is
// read again, and narrower slabs waste part of each memory transaction.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../encoder.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/random_delay.cuh"
#include "cuda/common/reduce.cuh"
#include "order.cuh"
#include "slab.cuh"

namespace gptkernels::cuda {

constexpr int kSumsThreads = 256;
constexpr int kSumsWarps = kSumsThreads / kWarp;
constexpr int kSumsBlocksPerSM = 4;
constexpr int kGroup = 64;

template <int kVec>
constexpr int kLoadsInFlight = kVec <= 4 ? 8 : 4;

template <int kVec>
constexpr int kLanes = kVec == 1 ? kWarp : kWarp / 2;

// With 32-bit row indices and sizes, an address takes one instruction.
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
__device__ Column<T> column_of(T* matrix, const SlabColumns<kVec, kLanes<kVec>>& at, const EncoderWorkspace<A>& w) {
  return {matrix + at.column, w.width * unsigned(sizeof(T))};
}

template <bool kAccumulate, int kVec, typename T, typename Total>
__device__ void write_sum(T* row, const Total (&sum)[kVec]) {
  accumulate_t<T> values[kVec];
#pragma unroll
  for (int k = 0; k < kVec; ++k) values[k] = static_cast<accumulate_t<T>>(sum[k]);
  if constexpr (kAccumulate) add_pack(values, load<kVec>(row));
  stream_narrow<kVec>(row, values);
}

// Every group of lanes gets the sum. For float32, the few rows of an iteration are added in float32, and the
// iterations' sums in float64.
template <int kVec, typename T, typename Total, typename RowAt>
__device__ void sum_rows(Total (&sum)[kVec], const Column<T>& column, int count, const RowAt& row_at) {
  constexpr int kGroups = kWarp / kLanes<kVec>;
  const int group = threadIdx.x % kWarp / kLanes<kVec>;
#pragma unroll
  for (int k = 0; k < kVec; ++k) sum[k] = 0;
  for (int first = group; first < count; first += kLoadsInFlight<kVec> * kGroups) {
    Packed<std::remove_const_t<T>, kVec> packs[kLoadsInFlight<kVec>];
#pragma unroll
    for (int j = 0; j < kLoadsInFlight<kVec>; ++j) {
      const int i = first + j * kGroups;
      packs[j] = {};
      if (i < count) packs[j] = load<kVec>(column.row(row_at(i)));
    }
    accumulate_t<std::remove_const_t<T>> some[kVec] = {};
#pragma unroll
    for (int j = 0; j < kLoadsInFlight<kVec>; ++j) add_pack(some, packs[j]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[k] += some[k];
  }
  __syncwarp();
#pragma unroll
  for (int offset = kLanes<kVec>; offset < kWarp; offset *= 2)
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[k] += __shfl_xor_sync(kAllLanes, sum[k], offset);
}

// ---- sums of several parts ----

// Each of `count` warps calls this function after it has written a partial sum. The function returns true in the last
// warp, which may then read all partial sums. Lane 0's fences, between warp barriers, order every lane's writes before
// the increment, and the increment before every lane's reads.
__device__ inline bool last_to_arrive(int* arrived, int count) {
  __syncwarp();
  random_delay();
  int before = 0;
  if (threadIdx.x % kWarp == 0) {
    __threadfence();
    before = atomicAdd(arrived, 1);
    __threadfence();
  }
  before = __shfl_sync(kAllLanes, before, 0);
  __syncwarp();
  return before == count - 1;
}

// Adds the parts of a sum. Part i owns row row_at(i) of the partials, and this row's counter. No other part of any sum
// has this row. On entry `sum` is part `part`. Returns true in the last warp to arrive, with the total in `sum`. The
// last warp of each group of kGroup parts adds the group's parts; the last of these warps adds the groups' sums. With
// 131 parts:
//
//   part                               0  1  2 ... 63 | 64  65 ... 127 | 128 129 130
//   counter of the group's parts       0              | 64             | 128            counts to 64, 64, 3
//   row with the group's sum           0              | 64             | 128
//   counter of the groups                 1                                             counts to 3
//
// Part 1 is never the first of a group, so each counter has one purpose. tests/ops/test_encoder.py models this protocol
// with the same indices (rows_of_partials, Arrivals): change both together.
template <int kVec, typename T, typename RowAt>
__device__ bool add_parts(sum_t<T> (&sum)[kVec], const SlabColumns<kVec, kLanes<kVec>>& at,
                          const EncoderWorkspace<T>& w, int part, int parts, const RowAt& row_at) {
  static_assert(kGroup > 1);
  const auto partials = column_of(w.partials, at, w);
  const auto write_partial = [&](int part) {
    accumulate_t<T>* p = partials.row(row_at(part));
#pragma unroll
    for (int k = 0; k < kVec; ++k) p[k] = static_cast<accumulate_t<T>>(sum[k]);
  };
  const auto counter = [&](int part) { return w.arrived + int64_t(row_at(part)) * w.slabs + at.slab; };
  const int first = part / kGroup * kGroup;
  const int count = min(kGroup, parts - first);
  write_partial(part);
  if (!last_to_arrive(counter(first), count)) return false;
  sum_rows<kVec>(sum, partials, count, [&](int i) { return row_at(first + i); });
  if (parts <= kGroup) return true;
  const int groups = (parts + kGroup - 1) / kGroup;
  write_partial(first);
  if (!last_to_arrive(counter(1), groups)) return false;
  sum_rows<kVec>(sum, partials, groups, [&](int i) { return row_at(i * kGroup); });
  return true;
}

// dwpe[t] = sum over b of dout[b, t], in pieces of at most kBatchPiece rows. In the partials, the pieces' rows follow
// those of the long runs.
template <typename T, int kVec>
__device__ void sum_over_batch(const EncoderSums<T>& p, const EncoderWorkspace<T>& w,
                               const SlabColumns<kVec, kLanes<kVec>>& at, int t, int piece) {
  const int length = static_cast<int>(p.length);
  if (t >= length && piece > 0) return;
  sum_t<T> sum[kVec] = {};
  if (t < length) {
    const int first = piece * kBatchPiece;
    const int count = min(static_cast<int>(p.batch) - first, kBatchPiece);
    sum_rows<kVec>(sum, column_of(p.dout, at, w), count, [&](int i) { return (first + i) * length + t; });
    if (w.pieces > 1) {
      wait_for_previous_kernel();
      const auto row_at = [&](int part) { return 2 * w.windows + part * length + t; };
      if (!add_parts<kVec, T>(sum, at, w, piece, w.pieces, row_at)) return;
    }
  }
  write_sum<false, kVec>(column_of(p.dwpe, at, w).row(t), sum);
}

// Each group of lanes computes the rows of dwte whose heads are in its unit. It writes a row when it reaches the next
// head. The entries of the unit's last head may extend up to a window beyond the unit.
template <typename T, int kVec, bool kAccumulate>
__device__ void sum_short_runs(const EncoderSums<T>& p, const EncoderWorkspace<T>& w,
                               const SlabColumns<kVec, kLanes<kVec>>& at, int unit) {
  constexpr int kReach = kUnit + kWindow;
  constexpr int kRounds = kReach / kLanes<kVec>;
  __shared__ alignas(16) int staged[kSumsThreads / kLanes<kVec>][kReach + 8];  // + 8: groups use different banks
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
    const unsigned heads =
        (__ballot_sync(kAllLanes, loaded[c] < 0) >> group_shift) & (kAllLanes >> (kWarp - kLanes<kVec>));
    const int head = c * kLanes<kVec> + __ffs(heads) - 1;
    if (c * kLanes<kVec> < kUnit)
      first = heads && first == kReach ? head : first;
    else
      end = heads && end == kReach ? head : end;
  }
  if (__all_sync(kAllLanes, first == kReach)) return;
#pragma unroll
  for (int c = 0; c < kRounds; ++c) {
    const int i = c * kLanes<kVec> + lane;
    items[i] = i < first || i >= end ? kLongRunMark : loaded[c];
  }
  __syncwarp();

  const auto dwte = column_of(p.dwte, at, w);
  const auto dout = column_of(p.dout, at, w);
  const int all_end = __reduce_max_sync(kAllLanes, first == kReach ? 0 : end);
  // For float32, an iteration whose items are all entries of one row adds them in pairs: a running sum of 64 terms has
  // several times the rounding error of torch's sum.
  constexpr bool kPairwise = std::is_same_v<T, float>;
  unsigned row = kNoRow;
  bool any = false;
  const auto write_row = [&](const accumulate_t<T>(&sum)[kVec]) {
    if (row != kNoRow && (!kAccumulate || (any && !at.repeats))) write_sum<kAccumulate, kVec>(dwte.row(row), sum);
  };
  accumulate_t<T> sum[kVec] = {};
  for (int i = 0; i < all_end; i += kLoadsInFlight<kVec>) {
    Packed<T, kVec> packs[kLoadsInFlight<kVec>];
    int item[kLoadsInFlight<kVec>];
#pragma unroll
    for (int j = 0; j < kLoadsInFlight<kVec>; j += 4) {
      const int4 four = *reinterpret_cast<const int4*>(items + i + j);
      item[j] = four.x;
      item[j + 1] = four.y;
      item[j + 2] = four.z;
      item[j + 3] = four.w;
    }
#pragma unroll
    for (int j = 0; j < kLoadsInFlight<kVec>; ++j) {
      const T* p = dout.row(item[j]);
      packs[j] = {};
      if (unsigned(item[j]) < unsigned(kLongRunMark)) packs[j] = load_evict_first<kVec>(p);
    }
    bool has_head = false;
#pragma unroll
    for (int j = 0; j < kLoadsInFlight<kVec>; ++j) has_head |= item[j] < 0;
    if (kPairwise && !has_head) {
#pragma unroll
      for (int half = kLoadsInFlight<kVec> / 2; half > 0; half /= 2)
#pragma unroll
        for (int j = 0; j < half; ++j)
#pragma unroll
          for (int k = 0; k < kVec; ++k) packs[j].v[k] += packs[j + half].v[k];
      add_pack(sum, packs[0]);
      if constexpr (kAccumulate)
#pragma unroll
        for (int j = 0; j < kLoadsInFlight<kVec>; ++j) any |= unsigned(item[j]) < unsigned(kLongRunMark);
      continue;
    }
    // In this loop, only write_row() is behind a branch. The other lines use selects, because the compiler would insert
    // a warp reconvergence point after each branch.
#pragma unroll
    for (int j = 0; j < kLoadsInFlight<kVec>; ++j) {
      const bool head = item[j] < 0;
      if (head) write_row(sum);
      any = !head && (any || unsigned(item[j]) < unsigned(kLongRunMark));
      row = head ? ~item[j] : row;
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum[k] = head ? 0 : sum[k];
      add_pack(sum, packs[j]);
    }
  }
  write_row(sum);
  __syncwarp();
}

// At most two long runs have entries in a window: one that began earlier, and one that begins in the window. Their
// partial sums are rows 2 * window and 2 * window + 1 of the partials.
template <typename T, int kVec, bool kAccumulate>
__device__ void sum_long_runs(const EncoderSums<T>& p, const EncoderWorkspace<T>& w,
                              const SlabColumns<kVec, kLanes<kVec>>& at, int window) {
  for (int i = 0; i < 2; ++i) {
    const Run run = w.long_runs[2 * window + i];
    if (run.last == 0) continue;
    const int begin = max(run.first, window * kWindow);
    const int count = min(run.last + 1, (window + 1) * kWindow) - begin;
    sum_t<T> sum[kVec];
    sum_rows<kVec>(sum, column_of(p.dout, at, w), count, [&](int i) { return w.items[begin + i] & ~kLongRunMark; });
    const int first_window = run.first / kWindow;
    const int parts = run.last / kWindow - first_window + 1;
    const auto row_at = [&](int part) { return 2 * (first_window + part) + (part == 0); };
    if (!add_parts<kVec, T>(sum, at, w, window - first_window, parts, row_at)) continue;
    // Every group of lanes has the sum. Only one lane may add it to memory.
    if (kAccumulate && (at.repeats || threadIdx.x % kWarp >= kLanes<kVec>)) continue;
    write_sum<kAccumulate, kVec>(column_of(p.dwte, at, w).row(run.token), sum);
  }
}

// The first `batch_blocks` thread blocks of a slab compute dwpe, which does not depend on the sort. They wait for the
// previous kernels only before they use the counters in `arrived`. The other thread blocks compute dwte.
template <typename T, int kVec, bool kAccumulate>
__global__ void __launch_bounds__(kSumsThreads, kSumsBlocksPerSM)
    encoder_backward_sums_kernel(const EncoderSums<T> p, const EncoderWorkspace<T> w, const int64_t batch_blocks) {
  constexpr int kGroups = kWarp / kLanes<kVec>;
  const bool over_batch = blockIdx.x < batch_blocks;
  const int64_t warp = (int64_t(blockIdx.x) - (over_batch ? 0 : batch_blocks)) * kSumsWarps + threadIdx.x / kWarp;
  const int64_t unit = warp * kGroups;
  if (over_batch ? warp >= p.positions * w.pieces : unit >= w.windows * int64_t(kWindow / kUnit)) return;
  if (!over_batch) wait_for_previous_kernel();
  for (int64_t slab = blockIdx.y; slab < w.slabs; slab += gridDim.y) {
    const SlabColumns<kVec, kLanes<kVec>> at(slab, w.width);
    if (over_batch) {
      sum_over_batch<T, kVec>(p, w, at, static_cast<int>(warp % p.positions), static_cast<int>(warp / p.positions));
      continue;
    }
    sum_short_runs<T, kVec, kAccumulate>(p, w, at,
                                         static_cast<int>(unit) + static_cast<int>(threadIdx.x % kWarp) / kLanes<kVec>);
    if (unit % (kWindow / kUnit) == 0)
      sum_long_runs<T, kVec, kAccumulate>(p, w, at, static_cast<int>(unit / (kWindow / kUnit)));
  }
}

}  // namespace gptkernels::cuda
