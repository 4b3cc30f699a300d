// The shape of a row in layernorm's fast kernels: how many threads share it, and how many packs each thread holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/row.cuh"

namespace gptkernels::cuda {

constexpr int kLeastItems = 3;  // packs per thread if several warps share a row; fewer are never the cheapest
constexpr int kMostItems = 4;
constexpr int kMostWarpItems = 7;  // packs per thread if one warp has a row

// True for rows with more than 40 elements per thread. Their 16-bit packs stay packed from one pass to the next,
// because the float32 values would need too many registers.
template <typename R>
constexpr bool kMayStayPacked = R::kItems * R::kVec > 40;

// Returns the largest block, in threads, with `registers` registers per thread. Each of an SM's four schedulers has a
// quarter of its 65536 registers, so block sizes are multiples of four warps.
constexpr int max_threads(int registers) {
  constexpr int kStep = 4 * kWarp;
  return std::min(1024, 65536 / registers / kStep * kStep);
}

// Returns the largest block of a forward kernel with `items` packs per thread. A thread needs registers for the packs,
// for their conversion to float32, and 48 others.
template <typename T>
constexpr int forward_max_threads(int items) {
  return max_threads(48 + items * kPack<T> * (3 * sizeof(T) + 4) / 4);
}

// The same for the backward. A thread needs registers for the weight in T, for kArrays float32 sums over the rows, for
// the row's normalised values and gradients between the two passes (packed in T beyond 40 elements), and 40 others, or
// 48 with a residual.
template <typename T, bool kResidual, int kArrays>
constexpr int backward_max_threads(int items) {
  const int kept = items * kPack<T> > 40 ? sizeof(T) : 4;
  return max_threads((kResidual ? 48 : 40) + items * kPack<T> * (sizeof(T) + 4 * kArrays + 2 * kept) / 4);
}

struct RowShape {
  int threads;  // whole warps
  int items;    // packs per thread; 0 if the row does not fit
  bool full;    // the row fills all packs of all threads; if not, the last pack of some threads is out of bounds
};

// Returns the cheapest shape for a row of `packs` packs. A warp spends time on all its packs, even those beyond the
// row's end, and on the row's sums, which cost as much as about 20 elements. If a block has several multi-warp rows
// (BlockPart), a row also pays for its share of the warps that are left over.
template <typename T, typename Team, typename MaxThreads>
RowShape row_shape(int64_t packs, int most_warp_items, const MaxThreads& max_threads) {
  constexpr int kSumsCost = 20;
  RowShape best = {};
  int64_t least = 0;
  for (int items = most_warp_items; items > 0; --items) {
    const int64_t threads = ceil_div(ceil_div(packs, items), kWarp) * kWarp;
    if (threads * (items - 1) >= packs && items > 1)
      continue;  // with one item less, these threads would still hold the row
    const int64_t most = max_threads(items);
    if (threads > most || (threads > kWarp && (items < kLeastItems || items > kMostItems))) continue;
    const int64_t shared = std::is_same_v<Team, BlockPart> ? most / (most / threads) : threads;
    const int64_t cost = shared * (items * kPack<T> + kSumsCost);
    if (best.items == 0 || cost < least) best = {int(threads), items, packs == threads * items}, least = cost;
  }
  return best;
}

// Calls fn(std::type_identity<R>()), where R is the Row of this shape: with the team Warp if one warp has a row, else
// with Team.
template <typename T, typename Team, int kMostWarpItems, typename Fn>
void with_row(const RowShape& shape, const Fn& fn) {
  const auto with_items = [&](auto team, auto items) {
    using RowTeam = typename decltype(team)::type;
    if (shape.full)
      fn(std::type_identity<Row<T, RowTeam, items.value, items.value>>());
    else
      fn(std::type_identity<Row<T, RowTeam, items.value, items.value - 1>>());
  };
  if (shape.threads == kWarp)
    with_constant<1, kMostWarpItems>(shape.items, [&](auto i) { with_items(std::type_identity<Warp>(), i); });
  else
    with_constant<kLeastItems, kMostItems>(shape.items, [&](auto i) { with_items(std::type_identity<Team>(), i); });
}

}  // namespace gptkernels::cuda
