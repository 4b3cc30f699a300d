// With TMA (Tensor Memory Accelerator), one thread starts the copy of a box of a tensor between global and shared
// memory. The hardware swizzles the box in shared memory. Elements beyond the tensor's end are loaded as 0 and not
// stored.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/device.h"

namespace gptkernels::cuda {

// Null if the driver does not have the function. The CUDA runtime looks it up, so that no driver library has to be
// linked.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const bool found = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                                        &result) == cudaSuccess &&
                       result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
  }();
  return encode;
}

// The address must be a multiple of 16 bytes. The stride of every dimension whose size is more than 1 must be positive,
// a multiple of 16 bytes, and less than 2^40 bytes. Strides are in elements.
template <typename T>
bool tma_supports(const void* data, int64_t row_stride, int64_t tokens, int64_t head_stride, int64_t heads,
                  int64_t batch_stride, int64_t batches) {
  constexpr int64_t kLargest = int64_t{1} << 40;
  const auto aligned = [&](int64_t stride, int64_t count) {
    const int64_t bytes = stride * static_cast<int64_t>(sizeof(T));
    return count <= 1 || (bytes > 0 && bytes < kLargest && bytes % 16 == 0);
  };
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && aligned(row_stride, tokens) && aligned(head_stride, heads) &&
         aligned(batch_stride, batches);
}

// Strides are in elements. A box is 64 columns of `rows` tokens of one head: a panel (wgmma.cuh), swizzled by 128
// bytes.
template <typename T>
CUtensorMap panel_map(const void* data, int64_t head_size, int64_t row_stride, int64_t tokens, int64_t head_stride,
                      int64_t heads, int64_t batch_stride, int64_t batches, int rows) {
  const auto bytes = [](int64_t stride, int64_t count) {
    return static_cast<cuuint64_t>(count > 1 ? stride * static_cast<int64_t>(sizeof(T)) : 16);
  };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(head_size), static_cast<cuuint64_t>(max(tokens, int64_t{1})),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batches)};
  const cuuint64_t strides[3] = {bytes(row_stride, tokens), bytes(head_stride, heads), bytes(batch_stride, batches)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  tensor_map_encoder()(
      &map, std::is_same_v<T, bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

// A box is `box_rows` rows of 64 columns (a panel, swizzled by 128 bytes) or of 32 columns (swizzled by 64 bytes).
template <typename T>
CUtensorMap matrix_map(const void* data, int64_t rows, int64_t columns, int64_t ld, int box_rows, int box_columns) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(ld) * sizeof(T)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap map;
  tensor_map_encoder()(&map,
                       std::is_same_v<T, bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                       2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                       box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ inline void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ inline void tma_load(uint32_t shared, const CUtensorMap& map, int column, int row, int head, int batch,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

__device__ inline void tma_load(uint32_t shared, const CUtensorMap& map, int c0, int c1, int c2, int c3, int c4,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

__device__ inline void tma_store(const CUtensorMap& map, uint32_t shared, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

__device__ inline void tma_load(uint32_t shared, const CUtensorMap& map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// Loads the box into every thread block of the cluster whose bit is set in `blocks`, at the same shared memory address.
// In each of these thread blocks, the mbarrier at the same address counts the bytes.
__device__ inline void tma_load_multicast(uint32_t shared, const CUtensorMap& map, int column, int row,
                                          uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

__device__ inline void tma_store(const CUtensorMap& map, uint32_t shared, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(shared),
               "r"(column), "r"(row)
               : "memory");
}

__device__ inline void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int kPending = 0>
__device__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders this thread's ordinary stores to shared memory before reads by TMA and wgmma (the async proxy).
__device__ inline void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#endif

}  // namespace gptkernels::cuda
