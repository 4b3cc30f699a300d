#pragma once

#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/common/launch.cuh"
#include "cuda/common/row.cuh"

namespace gptkernels::cuda {

constexpr int kMinItems = 3;  // packs per thread, if several warps share a row; fewer are never cheaper
constexpr int kMaxItems = 4;
constexpr int kMaxWarpItems = 7;

// With more than 40 elements per thread, the float32 values of 16-bit packs take too many registers between two passes.
template <typename R>
constexpr bool kMayStayPacked = R::kItems * R::kVec > 40;

// Each of an SM's four schedulers has a quarter of the 65536 registers, so threads come in multiples of four warps.
constexpr int max_threads(int registers) {
  constexpr int kStep = 4 * kWarp;
  const int most = 65536 / registers / kStep * kStep;
  return most < 1024 ? most : 1024;
}

// A thread needs registers for three arrays of packs in T, for one in float32, and 48 others.
template <typename T>
constexpr int forward_max_threads(int items) {
  return max_threads(48 + items * kPack<T> * (3 * sizeof(T) + 4) / 4);
}

// A thread needs registers for the weight in T, for kArrays arrays of float32 sums over the rows, for two arrays that
// the first pass keeps for the second (in float32, or in T beyond 40 elements per thread), and 48 others.
template <typename T, int kArrays>
constexpr int backward_max_threads(int items) {
  const int kept = items * kPack<T> > 40 ? sizeof(T) : 4;
  return max_threads(48 + items * kPack<T> * (sizeof(T) + 4 * kArrays + 2 * kept) / 4);
}

struct RowShape {
  int threads;  // whole warps
  int items;    // 0 if the row does not fit
  bool full;    // the row fills all packs of all threads
};

// Returns the cheapest shape. A thread spends time on all its packs, even beyond the row's end, and on the row's sums,
// which cost as much as about 20 elements. For BlockPart, a row's cost includes a share of the warps that the thread
// block cannot use.
template <typename T, typename Team, typename MaxThreads>
RowShape row_shape(int64_t packs, int max_warp_items, const MaxThreads& max_threads) {
  constexpr int kSumsCost = 20;
  RowShape best = {};
  int64_t least = 0;
  for (int items = max_warp_items; items > 0; --items) {
    const int64_t threads = ceil_div(ceil_div(packs, items), kWarp) * kWarp;
    if (threads * (items - 1) >= packs && items > 1) continue;  // these threads can hold the row with fewer packs each
    const int64_t most = max_threads(items);
    if (threads > most || (threads > kWarp && (items < kMinItems || items > kMaxItems))) continue;
    const int64_t shared = std::is_same_v<Team, BlockPart> ? most / (most / threads) : threads;
    const int64_t cost = shared * (items * kPack<T> + kSumsCost);
    if (best.items == 0 || cost < least) best = {int(threads), items, packs == threads * items}, least = cost;
  }
  return best;
}

// An instance is for rows of up to `items` packs per thread, of which the first `unguarded` packs are within the row in
// every thread.
struct RowInstance {
  int items;
  int unguarded;
};

// Instances for rows that one warp holds. The first instance that supports a row is used. The instances with items ==
// unguarded are for GPT-2's widths: 768, 1024 and 1280 in 16 bits, and 768 in float32. The last 16-bit instance is for
// the width 1600.
template <typename T>
constexpr auto kWarpInstances = std::to_array<RowInstance>({{1, 0}, {2, 1}, {4, 2}, {6, 6}, {7, 4}});
template <typename T>
  requires(sizeof(T) == 2)
constexpr auto kWarpInstances<T> =
    std::to_array<RowInstance>({{1, 0}, {2, 1}, {3, 3}, {4, 4}, {4, 2}, {5, 5}, {5, 4}, {7, 5}});

constexpr auto kTeamInstances = std::to_array<RowInstance>({{kMinItems, 2}, {kMaxItems, 3}});

// Calls fn(std::type_identity<R>()), where R is the Row of the first instance that supports the shape. Instances of
// more than kMax packs per thread are not compiled.
template <typename T, typename Team, const auto& kInstances, int kMax, typename Fn>
void with_instance(const RowShape& shape, const Fn& fn) {
  const int within = shape.full ? shape.items : shape.items - 1;
  bool found = false;
  const auto try_instance = [&](auto i) {
    constexpr RowInstance kInstance = kInstances[i.value];
    if constexpr (kInstance.items <= kMax) {
      if (found || kInstance.items < shape.items || kInstance.unguarded > within) return;
      found = true;
      fn(std::type_identity<Row<T, Team, kInstance.items, kInstance.unguarded>>());
    }
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (try_instance(Constant<i>()), ...);
  }(std::make_index_sequence<kInstances.size()>());
}

template <typename T, int kMaxWarpItems, typename Fn>
void with_warp_row(const RowShape& shape, const Fn& fn) {
  with_instance<T, Warp, kWarpInstances<T>, kMaxWarpItems>(shape, fn);
}

template <typename T, typename Team, int kMaxWarpItems, typename Fn>
void with_row(const RowShape& shape, const Fn& fn) {
  if (shape.threads == kWarp)
    with_warp_row<T, kMaxWarpItems>(shape, fn);
  else
    with_instance<T, Team, kTeamInstances, kMaxItems>(shape, fn);
}

}  // namespace gptkernels::cuda
