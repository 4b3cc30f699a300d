#include "../fp8.h"

#include <algorithm>

#include "../fp8_scale.h"
#include "fp8_numbers.h"
#include "simd.h"

namespace gptkernels::cpu {
namespace {

constexpr int64_t kChunks = 64;

inline int32_t finite_magnitude(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x) & 0x7FFFFFFF;
  return bits < 0x7F800000 ? bits : 0;
}

template <typename T>
int32_t largest(const Fp8Quantize<T>& p, Stream stream) {
  auto* found = static_cast<int32_t*>(p.workspace);
  const int64_t size = p.rows * p.width;
  parallel_for(stream, kChunks, size / kChunks + 1, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        int32_t bits = 0;
#pragma omp simd reduction(max : bits)
        for (int64_t i = size * chunk / kChunks; i < size * (chunk + 1) / kChunks; ++i)
          bits = std::max(bits, finite_magnitude(float(p.x[i])));
        found[chunk] = bits;
      }
    });
  });
  return *std::max_element(found, found + kChunks);
}

template <typename Rounding, typename T>
void quantize(const Fp8Quantize<T>& p, float multiplier, Stream stream) {
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t i = begin * p.width; i < end * p.width; ++i) {
        const float x = float(p.x[i]);
        p.out[i] = Rounding::round((x + x * 0.0f) * multiplier);  // x + x * 0 turns infinities into NaN
      }
    });
  });
}

}  // namespace

Status fp8_transpose(const Fp8Transpose& p, Stream stream) {
  const int64_t padded = fp8_padded(p.rows);
  parallel_for(stream, p.width, padded, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; ++column) {
      uint8_t* to = p.out + column * p.out_stride;
      for (int64_t row = 0; row < p.rows; ++row) to[row] = p.x[row * p.width + column];
      std::fill(to + p.rows, to + padded, uint8_t(0));
    }
  });
  return {};
}

template <typename T>
int64_t fp8_quantize_workspace(int64_t, int64_t) {
  return kChunks * sizeof(int32_t);
}

template <typename T>
Status fp8_quantize(const Fp8Quantize<T>& p, Stream stream) {
  const int32_t now = largest(p, stream);
  int32_t bits = p.history ? *std::max_element(p.history, p.history + kFp8Calls) : 0;
  if (bits == 0) bits = now;
  const bool e4m3 = p.format == Fp8Format::kE4M3;
  const Fp8Scale scale = fp8_scale(static_cast<uint32_t>(bits), e4m3 ? 8 : 15);
  *p.scale = std::bit_cast<float>(scale.scale);
  const float multiplier = std::bit_cast<float>(scale.multiplier);
  if (e4m3)
    quantize<Fp8E4M3>(p, multiplier, stream);
  else
    quantize<Fp8E5M2>(p, multiplier, stream);
  if (p.history) {
    std::copy(p.history + 1, p.history + kFp8Calls, p.history);
    p.history[kFp8Calls - 1] = now;
  }
  if (p.out_transposed) return fp8_transpose({p.out_transposed, p.out, p.rows, p.width, fp8_padded(p.rows)}, stream);
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                               \
  template int64_t fp8_quantize_workspace<T>(int64_t, int64_t); \
  template Status fp8_quantize<T>(const Fp8Quantize<T>&, Stream);
GPTKERNELS_FOR_FP8(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
