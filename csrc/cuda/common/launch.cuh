// Launch shapes that several kernels share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../device.h"

namespace gptkernels::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// What ask(device) answers for the current device, which must not be 0: asked for once a device. Every lambda is a type
// of its own, and so has its own memory here.
template <typename Ask>
int once_a_device(const Ask& ask) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];
  int device = 0;
  cudaGetDevice(&device);
  if (device >= kMaxDevices) return ask(device);
  int value = known[device].load(std::memory_order_relaxed);
  if (value == 0) {
    value = ask(device);
    known[device].store(value, std::memory_order_relaxed);
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

// Whether the code of a kernel that the current device runs is that for sm_90 and later (a device may run older code,
// translated anew): what __CUDA_ARCH__ >= 900 adds to it is there.
template <auto kKernel>
bool built_for_hopper() {
  return once_a_device([](int) {
           cudaFuncAttributes attributes = {};
           cudaFuncGetAttributes(&attributes, kKernel);
           return attributes.ptxVersion;
         }) >= 90;
}

// A grid for `blocks` units of work in a grid-stride loop.
inline unsigned grid_size(int64_t blocks) {
  constexpr int64_t kMaxGrid = 0x7FFFFFFF;
  return static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMaxGrid));
}

// The blocks of kThreads threads of this kernel that a multiprocessor of the current device holds at once.
template <auto kKernel, int kThreads>
int blocks_per_multiprocessor() {
  return once_a_device([](int) {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, kThreads, 0);
    return std::max(blocks, 1);
  });
}

// For __launch_bounds__: registers for two blocks of kThreads on a multiprocessor, for one where it does not hold so
// many threads (from sm_86 to sm_89, and from sm_110 on).
#if defined(__CUDA_ARCH__) && ((__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1100)
constexpr int kMultiprocessorThreads = 1536;
#else
constexpr int kMultiprocessorThreads = 2048;
#endif
template <int kThreads>
constexpr int kTwoBlocks = 2 * kThreads <= kMultiprocessorThreads ? 2 : 1;

// A number as a type, so that what is called with it can size register arrays.
template <int N>
struct Items {
  static constexpr int value = N;
};

// The dynamic shared memory that a block of this kernel may ask for on the current device, beside what the kernel
// declares itself. The first call on a device raises the kernel's own limit to that, from CUDA's 48 KB.
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

// For cudaLaunchKernelEx. The attribute, if there is one, must live as long.
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

// ---- kernels that follow each other ---------------------------------------------------------------------------------

// From sm_90 on a kernel may be set up while the one ahead of it in the stream still runs (in a graph's capture since
// CUDA 12.3), which saves the microsecond or two between them. It says by wait_for_previous_kernel() from where on it
// needs what that one wrote; the one ahead may say by let_next_kernel_start() that there is no need to wait for its
// end.

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
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gptkernels::cuda
