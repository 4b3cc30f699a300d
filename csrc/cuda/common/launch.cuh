#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device.h"
#include "random_delay.cuh"

namespace gptkernels::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// This function and CUDA's min() and max() replace those of <algorithm>, which would add 0.4 s to the compilation of
// every .cu file.
constexpr int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// Caches the result of ask(device), which must not be 0, for each device. Every lambda has its own type, so every call
// site has its own cache. <atomic> would take a third of the time to compile a small kernel.
template <typename Ask>
int once_a_device(const Ask& ask) {
  constexpr int kMaxDevices = 64;
  static int known[kMaxDevices];
  int device = 0;
  cudaGetDevice(&device);
  if (device >= kMaxDevices) return ask(device);
  int value = __atomic_load_n(&known[device], __ATOMIC_RELAXED);
  if (value == 0) {
    value = ask(device);
    __atomic_store_n(&known[device], value, __ATOMIC_RELAXED);
  }
  return value;
}

inline int multiprocessors() {
  return once_a_device([](int device) {
    int count = 0;
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  });
}

// True if the kernel's code was compiled for sm_90 or later. (A newer device may run code from PTX of an older
// architecture.)
template <auto kKernel>
bool built_for_hopper() {
  return once_a_device([](int) {
           cudaFuncAttributes attributes = {};
           cudaFuncGetAttributes(&attributes, kKernel);
           return attributes.ptxVersion;
         }) >= 90;
}

inline unsigned grid_size(int64_t blocks) {
  constexpr int64_t kMaxGrid = 0x7FFFFFFF;
  return static_cast<unsigned>(clamp(blocks, 1, kMaxGrid));
}

template <auto kKernel, int kThreads>
int blocks_per_multiprocessor() {
  return once_a_device([](int) {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, kThreads, 0);
    return max(blocks, 1);
  });
}

// The number of resident thread blocks for __launch_bounds__: 2, or 1 where an SM has too few threads for two. SMs of
// sm_86 to sm_89, and of sm_110 and later, have 1536 threads.
#if defined(__CUDA_ARCH__) && ((__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1100)
constexpr int kMultiprocessorThreads = 1536;
#else
constexpr int kMultiprocessorThreads = 2048;
#endif
template <int kThreads>
constexpr int kTwoBlocks = 2 * kThreads <= kMultiprocessorThreads ? 2 : 1;

template <int N>
using Constant = std::integral_constant<int, N>;

template <int kMin, int kMax, typename Fn>
void with_constant(int value, const Fn& fn) {
  if constexpr (kMax > kMin)
    if (value != kMax) return with_constant<kMin, kMax - 1>(value, fn);
  fn(Constant<kMax>{});
}

// Returns a number of bytes. The first call on a device raises the kernel's limit, which is 48 KB by default, to this
// number.
template <auto kKernel>
int64_t max_dynamic_shared_memory() {
  return once_a_device([](int device) {
    cudaFuncAttributes kernel = {};
    int bytes = 0;
    cudaFuncGetAttributes(&kernel, kKernel);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    bytes -= static_cast<int>(kernel.sharedSizeBytes);
    cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return bytes;
  });
}

// `attribute` may be null, and must outlive the configuration.
inline cudaLaunchConfig_t launch_config(dim3 grid, dim3 block, int64_t shared_bytes, Stream stream,
                                        cudaLaunchAttribute* attribute) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = attribute ? 1 : 0;
  return config;
}

inline cudaLaunchAttribute cluster_of(unsigned blocks) {
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  return cluster;
}

// ---- programmatic dependent launch ----------------------------------------------------------------------------------

// From sm_90 on, a kernel may start while the previous kernel of its stream still runs, which hides the 1 to 2 us
// between two kernels. Graph capture supports this from CUDA 12.3 on. Such a kernel starts when every thread block of
// the previous kernel has called let_next_kernel_start() or has ended. It must call wait_for_previous_kernel() before
// it reads what the previous kernel wrote.

// Before sm_90 or CUDA 12.3, this is an ordinary launch.
template <auto kKernel, typename... Arguments>
void launch_early(dim3 grid, dim3 block, int64_t shared_bytes, Stream stream, const Arguments&... arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  const bool can = CUDART_VERSION >= 12030 && built_for_hopper<kKernel>();
  const cudaLaunchConfig_t config = launch_config(grid, block, shared_bytes, stream, can ? &early : nullptr);
  cudaLaunchKernelEx(&config, kKernel, arguments...);
}

__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  random_delay();
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  random_delay();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gptkernels::cuda
