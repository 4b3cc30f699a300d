// How many threads share a row in layernorm's fast kernels, and how many packs each thread holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/row.cuh"

namespace gptkernels::cuda {

constexpr int kLeastItems = 3;  // packs per thread where several warps share a row; fewer never are the least work
constexpr int kMostItems = 4;
constexpr int kMostWarpItems = 7;  // where one warp has a row

// Rows with more elements per thread than this keep 16-bit packs from one pass to the next, not float32 values, which
// would need too many registers.
template <typename R>
constexpr bool kMayStayPacked = R::kItems * R::kVec > 40;

// The most threads of a block with so many registers per thread. Each of an SM's four schedulers has a quarter of its
// 65536 registers, so block sizes are multiples of four warps.
constexpr int max_threads(int registers) {
  constexpr int kStep = 4 * kWarp;
  return std::min(1024, 65536 / registers / kStep * kStep);
}

// For `items` packs per thread. Forward: the registers of the packs, of their conversion, and 48 others.
template <typename T>
constexpr int forward_max_threads(int items) {
  return max_threads(48 + items * kPack<T> * (3 * sizeof(T) + 4) / 4);
}

// Backward: the weight in T, the float32 sums over the rows (kArrays of them), and between the two passes over a row
// its normalised values and gradients (packed in T beyond 40 elements), and 40 others, or 48.
template <typename T, bool kResidual, int kArrays>
constexpr int backward_max_threads(int items) {
  const int kept = items * kPack<T> > 40 ? sizeof(T) : 4;
  return max_threads((kResidual ? 48 : 40) + items * kPack<T> * (sizeof(T) + 4 * kArrays + 2 * kept) / 4);
}

struct RowShape {
  int threads;  // whole warps
  int items;    // packs per thread; 0: the row does not fit
  bool full;    // the row fills all packs of all threads; else some threads' last pack lies beyond its end
};

// The shape with the least work for a row of so many packs. A warp works on all its packs, also those beyond the row's
// end, and on the row's sums, which cost as much as about 20 elements. Where the rows of a block run in parts
// (BlockPart), a row also pays for its share of the warps that are left over.
template <typename T, typename Team, typename MaxThreads>
RowShape row_shape(int64_t packs, int most_warp_items, const MaxThreads& max_threads) {
  constexpr int kSumsCost = 20;
  RowShape best = {};
  int64_t least = 0;
  for (int items = most_warp_items; items > 0; --items) {
    const int64_t threads = ceil_div(ceil_div(packs, items), kWarp) * kWarp;
    if (threads * (items - 1) >= packs && items > 1) continue;  // the same threads need one item less
    const int64_t most = max_threads(items);
    if (threads > most || (threads > kWarp && (items < kLeastItems || items > kMostItems))) continue;
    const int64_t shared = std::is_same_v<Team, BlockPart> ? most / (most / threads) : threads;
    const int64_t cost = shared * (items * kPack<T> + kSumsCost);
    if (best.items == 0 || cost < least) best = {int(threads), items, packs == threads * items}, least = cost;
  }
  return best;
}

// Calls fn(std::type_identity<R>()) with the Row of this shape: a Warp's, or that of Team where several warps share a
// row.
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
