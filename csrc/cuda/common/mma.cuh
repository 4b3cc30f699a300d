// One warp's tensor core instructions of sm_80 and later, and how their operands get to registers: ldmatrix, cp.async.
// Rows in shared memory are of 16-byte chunks; addresses are those of the shared window.
//
// A step of a product takes 32 bytes of a row: 16 elements of 16 bits, or 8 of float32 as TF32. Both then have the same
// fragments: lane 4 * g + t of a warp holds, of an accumulator tile (16 x 8), rows g and g + 8, columns 2 * t and
// 2 * t + 1.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../device.h"

namespace gptkernels::cuda {

__device__ inline uint32_t shared_window(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes from global to shared memory, both aligned to that; zeros where not `inside`.
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

// Ends a group of this thread's own copies.
__device__ inline void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the kPending groups committed last have arrived.
template <int kPending>
__device__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Of this thread's own copies.
__device__ inline void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Four matrices of 8 rows of 16 bytes, lanes 8 * i to 8 * i + 7 having the addresses of matrix i's rows.
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

// 16 bytes, aligned to that.
__device__ inline void load_words(uint32_t (&words)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

// float32 to the nearest TF32.
__device__ inline uint32_t round_to_tf32(float x) {
  uint32_t rounded = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
#endif
  return rounded;
}

// x = hi + lo within 2^-23 of x, both read as TF32: hi is x rounded to nearest, lo the rest, of which the tensor cores
// leave out the last bits. A NaN is NaN in both; an infinity's hi is the infinity, its lo a NaN. (By integers the
// rounding of a NaN could be 0.)
__device__ inline void split_tf32(uint32_t x, uint32_t& hi, uint32_t& lo) {
  const float value = __uint_as_float(x), power_of_2 = __uint_as_float(x & 0xFF800000u);
  hi = __float_as_uint(fmaf(power_of_2, 0x1p-11f, value)) & 0xFFFFE000u;
  lo = __float_as_uint(value - __uint_as_float(hi));
}

// d (16 x 8) += a (16 rows of 32 bytes) b (32 bytes of 8 columns).
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
