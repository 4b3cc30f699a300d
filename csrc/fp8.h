// Quantisation to eight bits: one pass over a matrix writes its values as float8, if wanted also transposed, and notes
// the largest of them for the scale of the next call.
#pragma once

#include <cstdint>

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// e4m3fn has 3 bits of significand and numbers up to 448; e5m2 has 2 and numbers up to 57344.
enum class Fp8Format { kE4M3, kE5M2 };

// What is quantised: x; GELU of x, rounded to T; x times the derivative of GELU at u, rounded to T.
enum class Fp8Source { kValues, kGelu, kGeluGradient };

// A tensor's history: the largest finite magnitudes of its last kFp8Calls calls, the newest last, as the bits of
// float32; then two cells that are 0 between calls, the largest magnitude of a call under way and how many of its
// blocks are done. (Bits, because a module's floating buffers change their dtype with the module's.)
constexpr int kFp8Calls = 16;
constexpr int kFp8History = kFp8Calls + 2;

// The transposed matrix's rows are padded with zeros to a multiple of this: a product on the tensor cores takes no
// other number of terms.
constexpr int64_t kFp8Alignment = 16;

constexpr int64_t fp8_padded(int64_t rows) {
  return (rows + kFp8Alignment - 1) / kFp8Alignment * kFp8Alignment;
}

// Of a pass that the kernel of the product before it makes, wherever there is a scale (CUDA).
struct Fp8Made {
  const int32_t* done = nullptr;  // not 0: all but the addition of the partial sums is done
  void* partials = nullptr;       // the partial sums are here, so many rows of sum_t<T>
  int64_t partial_rows = 0;
};

// out = x / scale, rounded to the nearest, ties to even. Values beyond the format's largest become that; NaN and
// infinities become NaN.
//
// The scale is a power of two, the least for which the largest magnitude in the history does not saturate. Without a
// history, or where that has none but zeros, it is that of x itself, for which x is read twice.
template <typename T>
struct Fp8Quantize {
  uint8_t* out;             // (N, C), or null beside out_transposed
  uint8_t* out_transposed;  // (C, fp8_padded(N)), or null
  float* scale;             // of one element: what the float8 numbers are to be multiplied by
  T* column_sums;           // (C): the sums over the rows of what is quantised, or null
  const T* x;               // (N, C)
  const T* u;               // (N, C) for kGeluGradient, else null
  int32_t* history;         // (kFp8History), or null
  void* workspace;          // fp8_quantize_workspace<T>(rows, width) bytes
  int64_t rows;             // N
  int64_t width;            // C
  Fp8Format format;
  Fp8Source source;  // the CPU's kernel takes kValues without column_sums
  Fp8Made made = {};
};

// The size of the workspace in bytes.
template <typename T>
int64_t fp8_quantize_workspace(int64_t rows, int64_t width);

template <typename T>
Status fp8_quantize(const Fp8Quantize<T>& p, Stream stream);

// out (C, fp8_padded(N)) = x^T, of float8 numbers; beyond the last row of x there are zeros. C is a multiple of
// kFp8Alignment, x and out begin at multiples of it.
struct Fp8Transpose {
  uint8_t* out;
  const uint8_t* x;    // (N, C)
  int64_t rows;        // N
  int64_t width;       // C
  int64_t out_stride;  // from row to row of out, a multiple of kFp8Alignment
};

Status fp8_transpose(const Fp8Transpose& p, Stream stream);

// MACRO(T) for every dtype that is quantised.
#define GPTKERNELS_FOR_FP8(MACRO) \
  MACRO(float)                    \
  MACRO(bfloat16)                 \
  MACRO(float16)

}  // namespace gptkernels::GPTKERNELS_DEVICE
