// Helpers for float8 matmuls on the CPU: the operands are widened to float32, a BLAS multiplies them, and
// fp8_epilogue applies the scales and the bias.
#pragma once

#include "../fp8.h"

namespace gptkernels::cpu {

// out (rows, width) = x converted to float32, without a scale. The rows of x are x_stride apart.
Status fp8_widen(float* out, const uint8_t* x, int64_t rows, int64_t width, int64_t x_stride, Fp8Format format,
                 Stream stream);

// out (rows, columns) = product * alpha * scale_a * scale_b + bias, rounded to T. With `accumulate`, the result is
// added to out. A null scale is 1, and a null bias (columns) is 0.
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
