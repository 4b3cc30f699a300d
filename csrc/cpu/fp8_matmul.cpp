#include "fp8_matmul.h"

#include <array>

#include "fp8_numbers.h"

namespace gptkernels::cpu {

Status fp8_widen(float* out, const uint8_t* x, int64_t rows, int64_t width, int64_t x_stride, Fp8Format format,
                 Stream stream) {
  std::array<float, 256> values;
  for (int bits = 0; bits < 256; ++bits) values[bits] = fp8_value(static_cast<uint8_t>(bits), format);
  parallel_for(stream, rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t i = 0; i < width; ++i) out[row * width + i] = values[x[row * x_stride + i]];
  });
  return {};
}

template <typename T>
Status fp8_epilogue(const Fp8Epilogue<T>& p, Stream stream) {
  const float scale = p.alpha * (p.scale_a ? *p.scale_a : 1.0f) * (p.scale_b ? *p.scale_b : 1.0f);
  parallel_for(stream, p.rows, p.columns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t i = 0; i < p.columns; ++i) {
        T& to = p.out[row * p.columns + i];
        const float value = p.product[row * p.columns + i] * scale + (p.bias ? float(p.bias[i]) : 0.0f);
        store(to, p.accumulate ? float(to) + value : value);
      }
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T) template Status fp8_epilogue<T>(const Fp8Epilogue<T>&, Stream);
GPTKERNELS_FOR_FP8(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
