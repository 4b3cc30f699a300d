#pragma once

#include "cuda/common/launch.cuh"
#include "sm90.cuh"
#include "wgmma.cuh"

namespace gptkernels::cuda {

constexpr int kWarpgroup = 128;  // threads

constexpr int kStubThreads = 32;  // launch bound of the empty kernels for architectures other than sm_90a

template <auto kKernel>
bool built_for_wgmma() {
  return once_a_device([](int) {
           cudaFuncAttributes attributes = {};
           const bool found = cudaFuncGetAttributes(&attributes, kKernel) == cudaSuccess;
           if (!found) cudaGetLastError();
           return 1 + (found && attributes.maxThreadsPerBlock > kStubThreads);
         }) == 2;
}

#if GPTKERNELS_WGMMA

// ---- barriers in shared memory, by address --------------------------------------------------------------------------

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void barrier_arrive(uint32_t barrier) {
  random_delay();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void barrier_arrive_if(bool one, uint32_t barrier) {
  random_delay();
  asm volatile(
      "{\n.reg .pred one;\nsetp.ne.b32 one, %1, 0;\n"
      "@one mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(static_cast<int>(one))
      : "memory");
}

// The barrier may be in any thread block of the cluster. A release at cluster scope is not needed. It would wait for
// all of the thread's stores: with it, matmuls took 1.5 times as long.
__device__ inline void barrier_arrive_in_block(bool one, uint32_t barrier) {
  random_delay();
  asm volatile(
      "{\n.reg .pred one;\nsetp.ne.b32 one, %1, 0;\n"
      "@one mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(static_cast<int>(one))
      : "memory");
}

__device__ inline void barrier_wait(uint32_t barrier, unsigned parity) {
  random_delay();
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ inline void warpgroup_barrier(int id) {
  random_delay();
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

template <int kStages>
struct RingPosition {
  int slot = 0;
  unsigned phase = 0;
  __device__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1;
    }
  }
};

__device__ inline void store_matrices(uint32_t shared, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ inline void store_matrices_transposed(uint32_t shared, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

#endif

}  // namespace gptkernels::cuda
