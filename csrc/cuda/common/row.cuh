// A row of a matrix in the registers of the threads that share it, and how many threads that are.
//
// threadIdx.x counts the threads of a row, threadIdx.y the rows of a block. A thread holds every kThreads-th pack, so
// that neighbours hold neighbouring packs. They stay in the dtype of memory, which is half of float32's registers for
// 16-bit types, and are widened anew in each pass. kThreads is kWarp where a row is one warp's, which makes the
// addresses constants and the sums shuffles alone; else kBlock or kPart: blockDim.x is only known at the launch. The
// first kSure packs of every thread lie in the row, only those behind them are compared with the width: to ask for each
// pack in each pass would take a tenth of the instructions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {

template <typename T_, int kVec_, int kItems_, int kThreads_ = kBlock, int kSure = 0>
struct Row {
  using T = T_;
  using A = accumulate_t<T>;
  static constexpr int kVec = kVec_;
  static constexpr int kItems = kItems_;
  static constexpr int kThreads = kThreads_;
  Packed<T, kVec> packs[kItems];

  // The first column of a thread's pack i.
  static __device__ int column(int i) {
    const int threads = kThreads == kWarp ? kWarp : static_cast<int>(blockDim.x);
    return (i * threads + static_cast<int>(threadIdx.x)) * kVec;
  }

  // Whether a thread's pack i lies in the row.
  static __device__ bool has(int i, int width) { return i < kSure || column(i) < width; }

  // Every load is under way before anything waits for one: bandwidth is bytes in flight.
  __device__ void load(const T* row, int width) {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (has(i, width)) packs[i] = cuda::load<kVec>(row + column(i));
  }

  // Whole words, as they are loaded: what is written by halves the compiler keeps by halves.
  __device__ void fill(A value) {
    A values[kVec];
#pragma unroll
    for (int k = 0; k < kVec; ++k) values[k] = value;
    const Packed<T, kVec> pack = narrow<T>(values);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if constexpr (sizeof(pack) == sizeof(uint4))
        reinterpret_cast<uint4&>(packs[i]) = reinterpret_cast<const uint4&>(pack);
      else
        packs[i] = pack;
    }
  }

  // Says that the packs may have changed, so that a loop which uses them widens them anew each time: the compiler would
  // rather do that once before the loop, and keep a 16-bit row in twice the registers.
  __device__ void stay_packed() {
    if constexpr (sizeof(packs[0]) == 16 && sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        uint4& words = reinterpret_cast<uint4&>(packs[i]);
        asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
      }
    }
  }

  // fn(i, x) with x the kVec elements of pack i, for the packs within the row.
  template <typename Fn>
  __device__ void each(int width, const Fn& fn) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!has(i, width)) continue;
      A x[kVec];
      widen(x, packs[i]);
      fn(i, x);
    }
  }

  // The same, and what fn leaves in x is what the row holds from then on.
  template <typename Fn>
  __device__ void update(int width, const Fn& fn) {
    each(width, [&](int i, A(&x)[kVec]) {
      fn(i, x);
      packs[i] = narrow<T>(x);
    });
  }
};

// The most elements a thread that stay widened from one pass to the next: beyond, 16-bit rows would fill the registers.
constexpr int kWidened = 40;

// The most threads of a block that may have so many registers each. Each of a multiprocessor's four schedulers has a
// quarter of the 65536, so blocks of whole quarters waste none.
constexpr int max_threads(int registers) {
  constexpr int kStep = 4 * kWarp;
  return std::min(1024, 65536 / registers / kStep * kStep);
}

// How many threads share a row and how many packs each of them holds.
struct RowThreads {
  int threads;  // whole warps
  int items;    // 0: the row does not fit
  bool whole;   // every thread has so many in the row; else all but the last of them
};

// Calls fn with `items`, which is kMin..kMax, as a type: it sizes register arrays.
template <int kMin, int kMax, typename Fn>
void with_row_items(int items, const Fn& fn) {
  if constexpr (kMax > kMin)
    if (items != kMax) return with_row_items<kMin, kMax - 1>(items, fn);
  fn(Items<kMax>{});
}

// Of the shapes with kMin..kMax packs a thread that with the least work: each warp works on all its packs, whether they
// are in the row or beyond its end, and has the sums of a row besides, which cost as much as some 20 elements. kPart: a
// block is full of rows, and a row pays for its part of the warps that are left over.
// A row of one warp may have up to kMaxWarp packs a thread. max_threads(items) is the most threads that so many packs
// each allow.
template <int kMany, int kVec, int kMin, int kMax, int kMaxWarp, typename MaxThreads>
RowThreads row_threads(int64_t width, const MaxThreads& max_threads) {
  static_assert(kMaxWarp >= kMax);
  constexpr int kSumsCost = 20;
  const int64_t packs = std::max<int64_t>(ceil_div(width, kVec), 1);
  RowThreads best = {};
  int64_t least = 0;
  for (int items = kMaxWarp; items >= kMin; --items) {
    const int64_t threads = ceil_div(ceil_div(packs, items), kWarp) * kWarp;
    if (items > kMin && threads * (items - 1) >= packs) continue;  // so many threads have enough with one less
    int64_t most = 0;
    with_row_items<kMin, kMaxWarp>(items, [&](auto known) { most = max_threads(known); });
    if (threads > most || (items > kMax && threads > kWarp)) continue;
    const int64_t cost = (kMany == kPart ? most / (most / threads) : threads) * (items * kVec + kSumsCost);
    if (best.items == 0 || cost < least) best = {static_cast<int>(threads), items, false}, least = cost;
  }
  best.whole = width == int64_t(best.threads) * best.items * kVec;
  return best;
}

// Calls fn with three types: kWarp, or kMany for a row of several warps, which is kBlock or kPart; Row's kSure, which
// is all packs of a thread, or all but the last, or 0 where there may be more packs than the row needs (kMin); and
// `items`, which is up to kMax, of one warp up to kMaxWarp.
template <int kMany, int kMin, int kMax, int kMaxWarp, typename Fn>
void with_row_threads(const RowThreads& row, const Fn& fn) {
  const auto with_sure = [&](auto threads, auto items) {
    constexpr int kItems = items.value;
    if (row.whole) return fn(threads, Items<kItems>{}, items);
    fn(threads, Items<(kItems > kMin || kMin == 1) ? kItems - 1 : 0>{}, items);
  };
  if (row.threads == kWarp)
    with_row_items<kMin, kMaxWarp>(row.items, [&](auto items) { with_sure(Items<kWarp>{}, items); });
  else
    with_row_items<kMin, kMax>(row.items, [&](auto items) { with_sure(Items<kMany>{}, items); });
}

}  // namespace gptkernels::cuda
