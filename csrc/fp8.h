// Writes a matrix as float8, optionally also transposed, and records the largest magnitude (amax) for the scale of
// later calls.
#pragma once

#include <cstdint>

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// The maximum of e4m3 is 448, that of e5m2 57344.
enum class Fp8Format { kE4M3, kE5M2 };

// The operator quantises x, GELU(x) rounded to T, or x * GELU'(u) rounded to T.
enum class Fp8Source { kValues, kGelu, kGeluGradient };

// An amax history holds the largest finite magnitude of each of the last kFp8Calls calls, the newest last. Two working
// cells follow. They hold the largest magnitude so far and the number of finished thread blocks, and are 0 between
// calls. Magnitudes are stored as float32 bits in int32, because `module.to(dtype)` would convert floating-point
// buffers.
constexpr int kFp8Calls = 16;
constexpr int kFp8History = kFp8Calls + 2;

// The inner dimension of a float8 matmul must be a multiple of 16 on tensor cores, so the rows of a transposed matrix
// are padded with zeros.
constexpr int64_t kFp8Alignment = 16;

constexpr int64_t fp8_padded(int64_t rows) {
  return (rows + kFp8Alignment - 1) / kFp8Alignment * kFp8Alignment;
}

// On CUDA, if the scale is known beforehand, the epilogue of the matmul that computes the tensor may already have
// quantised it.
struct Fp8Fused {
  const int32_t* done = nullptr;  // not 0: already quantised, only the partial sums must be added
  void* partials = nullptr;       // (partial_rows, C) of sum_t<T>
  int64_t partial_rows = 0;
};

// out = y / scale, rounded to nearest even, where y is x or the function of x and u that `source` names. Values beyond
// the format's range saturate; infinities and NaN become NaN. The scale is the smallest power of two for which the
// history's largest magnitude does not saturate. Without a history, or with a history of zeros, the scale is computed
// from the largest magnitude of y; the CUDA kernels then read x and u twice.
template <typename T>
struct Fp8Quantize {
  uint8_t* out;             // (N, C); may be null on CUDA
  uint8_t* out_transposed;  // (C, fp8_padded(N)), or null
  float* scale;             // scalar: value = number * scale
  T* column_sums;           // (C), the sums of y over the rows, or null
  const T* x;               // (N, C)
  const T* u;
  int32_t* history;  // (kFp8History), or null
  void* workspace;
  int64_t rows;   // N
  int64_t width;  // C
  Fp8Format format;
  Fp8Source source;  // the CPU supports only kValues, without column_sums
  Fp8Fused fused = {};
};

template <typename T>
int64_t fp8_quantize_workspace(int64_t rows, int64_t width);

template <typename T>
Status fp8_quantize(const Fp8Quantize<T>& p, Stream stream);

// out (C, fp8_padded(N)) = x^T, padded with zeros. C is a multiple of kFp8Alignment, and x and out are aligned to
// kFp8Alignment bytes.
struct Fp8Transpose {
  uint8_t* out;
  const uint8_t* x;    // (N, C)
  int64_t rows;        // N
  int64_t width;       // C
  int64_t out_stride;  // a multiple of kFp8Alignment
};

Status fp8_transpose(const Fp8Transpose& p, Stream stream);

#define GPTKERNELS_FOR_FP8(MACRO) \
  MACRO(float)                    \
  MACRO(bfloat16)                 \
  MACRO(float16)

}  // namespace gptkernels::GPTKERNELS_DEVICE
