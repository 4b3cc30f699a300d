// mma.sync of one warp, and the copies of its operands to shared memory and registers (cp.async, ldmatrix). Shared
// memory addresses are 32-bit addresses of the shared window.
//
// Along k, one mma multiplies 32 bytes: 16 elements of 16 bits, or 8 float32 as TF32. A lane holds the same bytes of
// the operands A and B for 16-bit types as for float32. In an accumulator tile (16 x 8), lane 4 * g + t holds rows g
// and g + 8, columns 2 * t and 2 * t + 1.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device.h"

namespace gptkernels::cuda {

__device__ inline uint32_t shared_window(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// If `inside` is false, writes zeros and does not read `from`.
__device__ inline void copy_async_16(uint32_t to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
#endif
}

__device__ inline void copy_async_4(uint32_t to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0) : "memory");
#endif
}

__device__ inline void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kPending>
__device__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

__device__ inline void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ inline void load_matrices(uint32_t (&a)[4], uint32_t shared) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared)
               : "memory");
#endif
}

__device__ inline void load_matrices_transposed(uint32_t (&a)[4], uint32_t shared) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared)
               : "memory");
#endif
}

__device__ inline uint32_t load_word(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared) : "memory");
  return word;
}

__device__ inline void load_words(uint32_t (&words)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

__device__ inline uint32_t round_to_tf32(float x) {
  uint32_t rounded = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
#endif
  return rounded;
}

// Splits x into two TF32 operands. hi + lo, as the tensor cores read them (without the last bits of lo), differs from x
// by at most 2^-23 |x|. If x is NaN, hi and lo are NaN; if x is infinite, hi is x and lo is NaN. hi is rounded to
// nearest by a float32 addition, because integer arithmetic could turn a NaN into 0.
__device__ inline void split_tf32(uint32_t x, uint32_t& hi, uint32_t& lo) {
  const float value = __uint_as_float(x), power_of_2 = __uint_as_float(x & 0xFF800000u);
  hi = __float_as_uint(fmaf(power_of_2, 0x1p-11f, value)) & 0xFFFFE000u;
  lo = __float_as_uint(value - __uint_as_float(hi));
}

// d (16 x 8) += a (16 rows x 32 bytes of k) * b (32 bytes of k x 8 columns).
template <typename T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, float16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, float>);
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

}  // namespace gptkernels::cuda
