// For a float8 matmul, ops/fp8.cpp widens the operands (fp8_widen), multiplies them in float32, and applies scales and
// bias (fp8_epilogue).
#pragma once

#include "../fp8.h"

namespace gptkernels::cpu {

Status fp8_widen(float* out, const uint8_t* x, int64_t rows, int64_t width, int64_t x_stride, Fp8Format format,
                 Stream stream);

// out (rows, columns) = product * alpha * scale_a * scale_b + bias, added to out with `accumulate`. A null scale is 1,
// and a null bias is 0.
template <typename T>
struct Fp8Epilogue {
  T* out;
  const float* product;
  const float* scale_a;
  const float* scale_b;
  const T* bias;
  int64_t rows;
  int64_t columns;
  float alpha;
  bool accumulate;
};

template <typename T>
Status fp8_epilogue(const Fp8Epilogue<T>& p, Stream stream);

}  // namespace gptkernels::cpu
