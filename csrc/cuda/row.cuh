// A row of a matrix in the registers of the threads that share it, and how many threads that are.
//
// threadIdx.x counts the threads of a row, threadIdx.y the rows of a block. A thread holds every kThreads-th pack, so
// that neighbours hold neighbouring packs. They stay in the dtype of memory, which is half of float32's registers for
// 16-bit types, and are widened anew in each pass. kThreads is kWarp where a row is one warp's, which makes the
// addresses constants and the sums shuffles alone; else kBlock: blockDim.x is only known at the launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {

template <typename T, int kVec, int kItems, int kThreads = kBlock>
struct Row {
  using A = accumulate_t<T>;
  Packed<T, kVec> packs[kItems];

  // The first column of a thread's pack i.
  static __device__ int column(int i) {
    const int threads = kThreads == kWarp ? kWarp : static_cast<int>(blockDim.x);
    return (i * threads + static_cast<int>(threadIdx.x)) * kVec;
  }

  // Whether a thread's pack i lies in the row.
  static __device__ bool has(int i, int width) { return kThreads == kWarp || column(i) < width; }

  // Every load is under way before anything waits for one: bandwidth is bytes in flight.
  __device__ void load(const T* row, int width) {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (has(i, width)) packs[i] = cuda::load<kVec>(row + column(i));
  }

  __device__ void store(T* row, int width) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (has(i, width)) cuda::store(row + column(i), packs[i]);
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
  bool full;    // one warp's, every pack in the row
};

// Calls fn with `items`, which is kMin..kMax, as a type: it sizes register arrays.
template <int kMin, int kMax, typename Fn>
void with_row_items(int items, const Fn& fn) {
  if constexpr (kMax > kMin)
    if (items != kMax) return with_row_items<kMin, kMax - 1>(items, fn);
  fn(Items<kMax>{});
}

// Of the shapes with kMin..kMax packs a thread that with the least work: each warp works on all its packs, whether they
// are in the row or beyond its end, and has the sums of a row besides, which cost as much as some 20 elements.
// A row of one warp may have up to kMaxWarp packs a thread. max_threads(items) is the most threads that so many packs
// each allow.
template <int kVec, int kMin, int kMax, int kMaxWarp, typename MaxThreads>
RowThreads row_threads(int64_t width, const MaxThreads& max_threads) {
  static_assert(kMaxWarp >= kMax);
  constexpr int kSumsCost = 20;
  const int64_t packs = std::max<int64_t>(ceil_div(width, kVec), 1);
  RowThreads best = {};
  int64_t least = 0;
  for (int items = kMaxWarp; items >= kMin; --items) {
    const int64_t warps = ceil_div(ceil_div(packs, items), kWarp);
    int64_t most = 0;
    with_row_items<kMin, kMaxWarp>(items, [&](auto known) { most = max_threads(known); });
    if (warps * kWarp > most || (items > kMax && warps > 1)) continue;
    const int64_t cost = warps * (items * kVec + kSumsCost);
    if (best.items == 0 || cost < least) best = {static_cast<int>(warps * kWarp), items, false}, least = cost;
  }
  best.full = best.threads == kWarp && width == int64_t(kWarp) * best.items * kVec;
  return best;
}

// Calls fn with kWarp, if a row fills one, or kMany, which is kBlock or kPart, and `items` as types.
template <int kMany, int kMin, int kMax, typename Fn>
void with_row_threads(const RowThreads& row, const Fn& fn) {
  with_row_items<kMin, kMax>(row.items, [&](auto items) {
    if (row.full)
      fn(Items<kWarp>{}, items);
    else
      fn(Items<kMany>{}, items);
  });
}

}  // namespace gptkernels::cuda
