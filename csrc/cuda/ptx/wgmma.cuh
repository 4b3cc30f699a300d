// wgmma multiplies matrices with a warpgroup (four warps) on sm_90a: D (64 x N) += A (64 x 16) * B (16 x N). B is read
// from shared memory, A from shared memory or registers.
//
// Accumulators: a warp holds 16 of the 64 rows. Of every 8 columns 8t..8t+7, lane l holds columns 8t + 2(l%4) and 8t +
// 2(l%4) + 1: row l/4 in d[4t] and d[4t+1], row l/4 + 8 in d[4t+2] and d[4t+3]. If A is in registers, a thread holds
// the same rows and columns of a 64 x 16 tile, so 16 columns of accumulators, rounded and packed in pairs, are one A
// operand.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device.h"

namespace gptkernels::cuda {

// ---- matrices in shared memory --------------------------------------------------------------------------------------
//
// A tile is stored in panels of 64 columns of 16 bits, so a panel's rows have 128 bytes. A panel is aligned to 1024
// bytes, 8 rows. It is swizzled as by TMA's CU_TENSOR_MAP_SWIZZLE_128B: 16-byte chunk c of row r is stored at chunk c ^
// (r % 8).

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GPTKERNELS_WGMMA 1
#else
#define GPTKERNELS_WGMMA 0
#endif

#if GPTKERNELS_WGMMA

__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to `registers` past this point. The compiler does not know that a wgmma
// accesses its registers asynchronously.
template <typename R, int N>
__device__ void pin_registers(R (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (std::is_same_v<R, float>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

// The wgmma descriptor of a panel. Its lowest bits are the address in units of 16 bytes, so a step through the panel is
// an addition to the descriptor. The layout depends on kRowsAreK (see wgmma()):
//
//   false ("K-major")    rows are m or n, columns are k; the next 16 columns are at + kStepK
//   true ("MN-major")    rows are k, columns are m or n; the next 16 rows are at + kStepRows,
//                        and the next 64 columns are a panel `panel_bytes` further
__device__ inline uint64_t panel_descriptor(uint32_t shared, uint32_t panel_bytes = 16) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kGroupStride = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kGroupStride | (panel_bytes >> 4 << 16 | shared >> 4);
}
constexpr int kStepK = 32 >> 4;
constexpr int kStepRows = 16 * kPanelRowBytes >> 4;

__device__ inline uint32_t panel_offset(int row, int chunk) {
  return row * kPanelRowBytes + ((chunk ^ (row % 8)) << 4);
}

// ---- matmuls --------------------------------------------------------------------------------------------------------

#define GPTKERNELS_ACCUMULATORS_64(d)                                                                         \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define GPTKERNELS_REGISTERS_64                                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31}, "

#define GPTKERNELS_ACCUMULATORS_128(d)                                                                        \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define GPTKERNELS_REGISTERS_128                                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "  \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "

#define GPTKERNELS_WGMMA_SS_64(TYPE, d, a, b, accumulate, transpose_b)                        \
  asm volatile(                                                                               \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " GPTKERNELS_REGISTERS_64 \
      "%32, %33, p, 1, 1, 0, %35;\n}"                                                         \
      : GPTKERNELS_ACCUMULATORS_64(d)                                                         \
      : "l"(a), "l"(b), "r"(accumulate), "n"(transpose_b)                                     \
      : "memory")

#define GPTKERNELS_WGMMA_RS_64(TYPE, d, a, b, accumulate, transpose_b)                                \
  asm volatile(                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                    \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " GPTKERNELS_REGISTERS_64         \
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"                                                   \
      : GPTKERNELS_ACCUMULATORS_64(d)                                                                 \
      : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(b), "r"(accumulate), "n"(transpose_b) \
      : "memory")

#define GPTKERNELS_WGMMA_SS_128(TYPE, d, a, b, accumulate, transpose_b)                         \
  asm volatile(                                                                                 \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                              \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " GPTKERNELS_REGISTERS_128 \
      "%64, %65, p, 1, 1, 0, %67;\n}"                                                           \
      : GPTKERNELS_ACCUMULATORS_128(d)                                                          \
      : "l"(a), "l"(b), "r"(accumulate), "n"(transpose_b)                                       \
      : "memory")

#define GPTKERNELS_WGMMA_RS_128(TYPE, d, a, b, accumulate, transpose_b)                               \
  asm volatile(                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                    \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " GPTKERNELS_REGISTERS_128       \
      "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"                                                   \
      : GPTKERNELS_ACCUMULATORS_128(d)                                                                \
      : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(b), "r"(accumulate), "n"(transpose_b) \
      : "memory")

// D (64 x 2n) = A * B, or D += A * B if `accumulate` is not 0, over 16 values of k. k is the column index in A's
// panels, and the row index in B's panels if kRowsAreK.
template <typename T, bool kRowsAreK, int n>
__device__ void wgmma(float (&d)[n], uint64_t a, uint64_t b, int accumulate) {
  static_assert(n == 32 || n == 64);
  constexpr int kTranspose = kRowsAreK ? 1 : 0;
  if constexpr (std::is_same_v<T, bfloat16> && n == 32) {
    GPTKERNELS_WGMMA_SS_64("bf16", d, a, b, accumulate, kTranspose);
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    GPTKERNELS_WGMMA_SS_128("bf16", d, a, b, accumulate, kTranspose);
  } else if constexpr (n == 32) {
    GPTKERNELS_WGMMA_SS_64("f16", d, a, b, accumulate, kTranspose);
  } else {
    GPTKERNELS_WGMMA_SS_128("f16", d, a, b, accumulate, kTranspose);
  }
}

template <typename T, bool kRowsAreK, int n>
__device__ void wgmma(float (&d)[n], const uint32_t* a, uint64_t b, int accumulate) {
  static_assert(n == 32 || n == 64);
  constexpr int kTranspose = kRowsAreK ? 1 : 0;
  if constexpr (std::is_same_v<T, bfloat16> && n == 32) {
    GPTKERNELS_WGMMA_RS_64("bf16", d, a, b, accumulate, kTranspose);
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    GPTKERNELS_WGMMA_RS_128("bf16", d, a, b, accumulate, kTranspose);
  } else if constexpr (n == 32) {
    GPTKERNELS_WGMMA_RS_64("f16", d, a, b, accumulate, kTranspose);
  } else {
    GPTKERNELS_WGMMA_RS_128("f16", d, a, b, accumulate, kTranspose);
  }
}

#define GPTKERNELS_WGMMA_FP8_64(TYPE, d, a, b, accumulate)                                                        \
  asm volatile(                                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                                \
      "wgmma.mma_async.sync.aligned.m64n64k32.f32." TYPE ".e4m3 " GPTKERNELS_REGISTERS_64 "%32, %33, p, 1, 1;\n}" \
      : GPTKERNELS_ACCUMULATORS_64(d)                                                                             \
      : "l"(a), "l"(b), "r"(accumulate)                                                                           \
      : "memory")

#define GPTKERNELS_WGMMA_FP8_128(TYPE, d, a, b, accumulate)                                                         \
  asm volatile(                                                                                                     \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." TYPE ".e4m3 " GPTKERNELS_REGISTERS_128 "%64, %65, p, 1, 1;\n}" \
      : GPTKERNELS_ACCUMULATORS_128(d)                                                                              \
      : "l"(a), "l"(b), "r"(accumulate)                                                                             \
      : "memory")

// Like wgmma(), but over 32 values of k, with elements of 8 bits. A is e4m3 if kE4M3, else e5m2; B is e4m3. The tensor
// cores' sums have 14 bits of significand. Descriptors are those of 16-bit panels whose rows are m or n; the next 32
// values of k are at + kStepK.
template <bool kE4M3, int n>
__device__ void wgmma_fp8(float (&d)[n], uint64_t a, uint64_t b, int accumulate) {
  static_assert(n == 32 || n == 64);
  if constexpr (kE4M3 && n == 64) {
    GPTKERNELS_WGMMA_FP8_128("e4m3", d, a, b, accumulate);
  } else if constexpr (kE4M3) {
    GPTKERNELS_WGMMA_FP8_64("e4m3", d, a, b, accumulate);
  } else if constexpr (n == 64) {
    GPTKERNELS_WGMMA_FP8_128("e5m2", d, a, b, accumulate);
  } else {
    GPTKERNELS_WGMMA_FP8_64("e5m2", d, a, b, accumulate);
  }
}

template <typename T>
__device__ uint32_t pack_pair(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

// Negative values become 0.
template <typename T>
__device__ uint32_t pack_positive(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

template <typename T>
__device__ float2 unpack_pair(uint32_t word) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
}

template <typename T, int n>
__device__ void accumulators_to_a(uint32_t (&a)[n / 2], const float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) a[i] = pack_pair<T>(d[2 * i], d[2 * i + 1]);
}

// Each warpgroup calls one of these functions once, at the start of its branch of the kernel.
template <int kRegisters>
__device__ void alloc_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void dealloc_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif

}  // namespace gptkernels::cuda
