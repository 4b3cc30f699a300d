// L2 eviction priorities: *_once accesses are evict-first, and kept_* accesses are evict-last.
#pragma once

#include <cstdint>

#include "tma.cuh"

namespace gptkernels::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The policies that createpolicy.fractional returns for a fraction of 1.
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictLast = 0x14F0000000000000;

__device__ inline void tma_load_once(uint32_t shared, const CUtensorMap& map, int column, int row, int head, int batch,
                                     uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(kEvictFirst)
      : "memory");
}

__device__ inline void tma_store_once(const CUtensorMap& map, uint32_t shared, int column, int row, int head,
                                      int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(
          &map),
      "r"(shared), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(kEvictFirst)
      : "memory");
}

// Accesses to 16 aligned bytes. They bypass L1, so a thread's store, addition and load of an element take effect in
// program order.
__device__ inline void kept_store(float* at, const float* x) {
  asm volatile("st.relaxed.gpu.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(at), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3]), "l"(kEvictLast)
               : "memory");
}
__device__ inline void kept_add(float* at, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(at), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3]), "l"(kEvictLast)
               : "memory");
}
__device__ inline void kept_load(float* x, const float* at) {
  asm volatile("ld.relaxed.gpu.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(at), "l"(kEvictLast)
               : "memory");
}

#endif

}  // namespace gptkernels::cuda
