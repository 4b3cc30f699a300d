#pragma once

#include <cstdint>

#include "cuda/common/random_delay.cuh"

namespace gptkernels::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define GPTKERNELS_HOPPER 1
#else
#define GPTKERNELS_HOPPER 0
#endif

#if GPTKERNELS_HOPPER

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// A phase completes after the one expected arrival and the bytes that this arrival has announced.
__device__ inline void mbarrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_expect(uint32_t barrier, unsigned bytes) {
  random_delay();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void mbarrier_expect(uint64_t* barrier, unsigned bytes) {
  mbarrier_expect(shared_address(barrier), bytes);
}

__device__ inline void mbarrier_wait(uint64_t* barrier, unsigned parity) {
  random_delay();
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Addresses and size are multiples of 16 bytes. The barrier counts the bytes as they arrive.
__device__ inline void bulk_load(uint32_t shared, const void* global, unsigned bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline unsigned cluster_blocks() {
  unsigned blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// The two halves of a barrier over the cluster. A thread may do independent work between them.
__device__ inline void cluster_arrive() {
  random_delay();
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ inline void cluster_wait() {
  random_delay();
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ inline void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

__device__ inline uint32_t in_block(const void* shared, unsigned rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  return address;
}

// Starts a store to the counterpart of `*shared` in thread block `rank`. The counterpart of `*barrier` in that thread
// block counts the bytes as they arrive. The cluster must have at least two thread blocks.
template <typename V>
__device__ void store_in_block(V* shared, const V& value, uint64_t* barrier, unsigned rank) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
  random_delay();
  const uint32_t to = in_block(shared, rank);
  const uint32_t counter = in_block(barrier, rank);
  if constexpr (sizeof(V) == 4) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(reinterpret_cast<const uint32_t&>(value)), "r"(counter)
                 : "memory");
  } else if constexpr (sizeof(V) == 8) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
                 "l"(reinterpret_cast<const uint64_t&>(value)), "r"(counter)
                 : "memory");
  } else {
    const auto& words = reinterpret_cast<const uint64_t (&)[2]>(value);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "l"(words[0]), "l"(words[1]), "r"(counter)
                 : "memory");
  }
}

#endif

}  // namespace gptkernels::cuda
