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

// An attribute of the current device, asked for once a device.
template <cudaDeviceAttr kAttribute>
int device_attribute() {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];
  int device = 0;
  cudaGetDevice(&device);
  int value = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (value == 0) {
    cudaDeviceGetAttribute(&value, kAttribute, device);
    if (device < kMaxDevices) known[device].store(value, std::memory_order_relaxed);
  }
  return value;
}

inline int multiprocessors() {
  return device_attribute<cudaDevAttrMultiProcessorCount>();
}

// Hopper or later: thread-block clusters, bulk copies and dependent launches.
inline bool is_hopper() {
  return device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 9;
}

// A grid for `blocks` units of work in a grid-stride loop.
inline unsigned grid_size(int64_t blocks) {
  constexpr int64_t kMaxGrid = 0x7FFFFFFF;
  return static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMaxGrid));
}

// The blocks of so many threads of this kernel that a multiprocessor of the current device holds at once, as a
// persistent grid needs to know. Asked for again only when the device or the threads change.
template <auto kKernel>
int blocks_per_multiprocessor(unsigned threads) {
  static std::atomic<uint64_t> known;  // device, threads, blocks
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t asked = uint64_t(device) << 48 | uint64_t(threads) << 16;
  const uint64_t last = known.load(std::memory_order_relaxed);
  if (last >> 16 == asked >> 16 && last != 0) return static_cast<int>(last & 0xFFFF);
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, static_cast<int>(threads), 0);
  blocks = std::max(blocks, 1);
  known.store(asked | static_cast<uint64_t>(blocks), std::memory_order_relaxed);
  return blocks;
}

// How one row is laid over threads: `items` packs of kVec elements a thread, in registers. One warp a row with four
// rows a block while that suffices, then a block a row.
struct RowShape {
  int items;  // 1, 2, 4 or 8; 0 when the row does not fit
  dim3 block;
};

// The most threads of a block in which each keeps kArrays arrays of kItems packs: they may fill a third of the register
// file (65536), the rest is for everything else. A kernel declares it as its __launch_bounds__.
template <typename T, int kVec, int kItems, int kArrays = 1>
constexpr int kMaxRowThreads =
    std::min<int>(1024, 20480 / (kVec * kItems * kArrays * (sizeof(accumulate_t<T>) / 4)) / kWarp * kWarp);

template <typename T, int kVec, int kMaxItems, int kArrays = 1>
RowShape row_shape(int64_t width) {
  constexpr int kRowsPerBlock = 4;
  const int64_t packs = ceil_div(width, kVec);
  for (int items = 1; items <= kMaxItems; items *= 2)
    if (packs <= kWarp * items) return {items, dim3(kWarp, kRowsPerBlock)};
  constexpr int kFew = std::min(4, kMaxItems);
  const int64_t few = ceil_div(ceil_div(packs, kFew), kWarp) * kWarp;
  if (few <= kMaxRowThreads<T, kVec, kFew, kArrays>) return {kFew, dim3(static_cast<unsigned>(few))};
  const int64_t many = ceil_div(ceil_div(packs, kMaxItems), kWarp) * kWarp;
  if (many <= kMaxRowThreads<T, kVec, kMaxItems, kArrays>) return {kMaxItems, dim3(static_cast<unsigned>(many))};
  return {0, dim3(1024)};
}

// Calls fn with `items` as a type, so that it can size register arrays.
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

// The dynamic shared memory that a block of this kernel may ask for on the current device, beside what the kernel
// declares itself. The first call on a device raises the kernel's own limit to that, from CUDA's 48 KB.
template <auto kKernel>
int64_t max_dynamic_shared_memory() {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];
  int device = 0;
  cudaGetDevice(&device);
  int bytes = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (bytes == 0) {
    cudaFuncAttributes kernel = {};
    cudaFuncGetAttributes(&kernel, kKernel);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    bytes -= static_cast<int>(kernel.sharedSizeBytes);
    cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (device < kMaxDevices) known[device].store(bytes, std::memory_order_relaxed);
  }
  return bytes;
}

// Launches a second stage whose blocks may be set up while the first still runs, where the device can (in a graph's
// capture since CUDA 12.3): the kernel calls wait_for_first_stage() before it reads what that has written. Saves the
// microsecond or two between launches.
template <typename... Parameters, typename... Arguments>
void launch_second_stage(void (*kernel)(Parameters...), dim3 grid, dim3 block, Stream stream, Arguments... arguments) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = CUDART_VERSION >= 12030 && is_hopper() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

// In the first stage: what follows has time to be set up from here on.
__device__ inline void let_second_stage_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ inline void wait_for_first_stage() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace gptkernels::cuda
