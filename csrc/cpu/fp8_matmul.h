// What surrounds a product of float8 matrices on the CPU, which is a BLAS's product of the same numbers in float32.
#pragma once

#include "../fp8.h"

namespace gptkernels::cpu {

// out (rows, width) = the numbers of x, whose rows are x_stride apart.
Status fp8_widen(float* out, const uint8_t* x, int64_t rows, int64_t width, int64_t x_stride, Fp8Format format,
                 Stream stream);

// out (rows, columns) = product * alpha * scale_a * scale_b + bias, rounded. The scales may be null, which is 1, and
// bias (columns). Added to what is in out if `accumulate`.
template <typename T>
struct Fp8Finish {
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
Status fp8_finish(const Fp8Finish<T>& p, Stream stream);

}  // namespace gptkernels::cpu
