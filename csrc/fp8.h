// Quantisation to float8: one pass over a matrix writes its values as float8, optionally also transposed, and records
// the largest magnitude (amax) for the scale of later calls.
#pragma once

#include <cstdint>

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// e4m3fn has 3 bits of significand and a maximum of 448; e5m2 has 2 bits and a maximum of 57344.
enum class Fp8Format { kE4M3, kE5M2 };

// The values to quantise: x (kValues), GELU(x) rounded to T (kGelu), or x * GELU'(u) rounded to T (kGeluGradient).
enum class Fp8Source { kValues, kGelu, kGeluGradient };

// A tensor's amax history holds the largest finite magnitudes of the last kFp8Calls calls, the newest last. Two working
// cells follow, which are 0 between calls: the largest magnitude so far in the current call, and the number of thread
// blocks that have finished. Magnitudes are stored as the bits of float32 in int32, because `module.to(dtype)` converts
// floating-point buffers.
constexpr int kFp8Calls = 16;
constexpr int kFp8History = kFp8Calls + 2;

// The rows of the transposed matrix are padded with zeros to a multiple of 16 elements, because the inner dimension of
// a float8 matmul on tensor cores must be a multiple of 16.
constexpr int64_t kFp8Alignment = 16;

constexpr int64_t fp8_padded(int64_t rows) {
  return (rows + kFp8Alignment - 1) / kFp8Alignment * kFp8Alignment;
}

// Describes the work of a preceding matmul that may already have quantised this tensor in its epilogue. The CUDA matmul
// does so if the tensor's scale is known.
struct Fp8Fused {
  const int32_t* done = nullptr;  // in device memory; not 0 if the tensor is quantised and only sums must be added
  void* partials = nullptr;       // (partial_rows, C) of sum_t<T>: the matmul's partial column sums
  int64_t partial_rows = 0;
};

// out = x / scale, rounded to nearest even. Values beyond the format's range saturate; infinities and NaN become NaN.
//
// The scale is the smallest power of two for which the largest magnitude in the history does not saturate. If there is
// no history, or the history is all zero, the scale is computed from x itself, which is then read twice.
template <typename T>
struct Fp8Quantize {
  uint8_t* out;             // (N, C), or null if only out_transposed is needed
  uint8_t* out_transposed;  // (C, fp8_padded(N)), or null
  float* scale;             // scalar: value = float8 number * scale
  T* column_sums;           // (C): sums over the rows, before quantisation; or null
  const T* x;               // (N, C)
  const T* u;               // (N, C) for kGeluGradient, else null
  int32_t* history;         // (kFp8History), or null
  void* workspace;          // fp8_quantize_workspace<T>(rows, width) bytes
  int64_t rows;             // N
  int64_t width;            // C
  Fp8Format format;
  Fp8Source source;  // the CPU supports only kValues, and no column_sums
  Fp8Fused fused = {};
};

// Returns the size of the workspace in bytes.
template <typename T>
int64_t fp8_quantize_workspace(int64_t rows, int64_t width);

template <typename T>
Status fp8_quantize(const Fp8Quantize<T>& p, Stream stream);

// out (C, fp8_padded(N)) = x^T, float8; the padded columns of out are zeros. C is a multiple of kFp8Alignment, and x
// and out are aligned to kFp8Alignment bytes.
struct Fp8Transpose {
  uint8_t* out;
  const uint8_t* x;    // (N, C)
  int64_t rows;        // N
  int64_t width;       // C
  int64_t out_stride;  // distance between rows of out, a multiple of kFp8Alignment
};

Status fp8_transpose(const Fp8Transpose& p, Stream stream);

// Calls MACRO(T) for every dtype that can be quantised.
#define GPTKERNELS_FOR_FP8(MACRO) \
  MACRO(float)                    \
  MACRO(bfloat16)                 \
  MACRO(float16)

}  // namespace gptkernels::GPTKERNELS_DEVICE
