// Launch shapes that several kernels share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "device.h"
#include "reduce.cuh"

namespace gptkernels::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The multiprocessors of the current device, asked for once a device.
inline int multiprocessors() {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];
  int device = 0;
  cudaGetDevice(&device);
  int count = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (device < kMaxDevices) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

// A grid for `blocks` units of work in a grid-stride loop.
inline unsigned grid_size(int64_t blocks) {
  constexpr int64_t kMaxGrid = 0x7FFFFFFF;
  return static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMaxGrid));
}

// How one row of `packs` packs is laid over threads: `items` packs a thread, in registers. One warp a row with four
// rows a block while that suffices, then a block a row.
struct RowShape {
  int items;  // 1, 2, 4 or 8; 0 when the row does not fit
  dim3 block;
};

template <int kMaxItems>
RowShape row_shape(int64_t packs) {
  constexpr int kRowsPerBlock = 4;
  constexpr int kMaxThreads = 1024;
  for (int items = 1; items <= kMaxItems; items *= 2)
    if (packs <= kWarp * items) return {items, dim3(kWarp, kRowsPerBlock)};
  for (int items = std::min(4, kMaxItems); items <= kMaxItems; items *= 2) {
    const int64_t threads = ceil_div(ceil_div(packs, items), kWarp) * kWarp;
    if (threads <= kMaxThreads) return {items, dim3(static_cast<unsigned>(threads))};
  }
  return {0, dim3(kMaxThreads)};
}

// Calls fn with std::integral_constant-like `items` so that it can size register arrays.
template <int N>
struct Items {
  static constexpr int value = N;
};

template <int kMaxItems, typename Fn>
void with_items(int items, const Fn& fn) {
  if constexpr (kMaxItems >= 8)
    if (items == 8) return fn(Items<8>{});
  if constexpr (kMaxItems >= 4)
    if (items == 4) return fn(Items<4>{});
  if constexpr (kMaxItems >= 2)
    if (items == 2) return fn(Items<2>{});
  fn(Items<1>{});
}

}  // namespace gptkernels::cuda
