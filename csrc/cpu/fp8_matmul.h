// What surrounds a product of float8 matrices on the CPU, which is a BLAS's product of the same numbers in float32.
#pragma once

#include "../fp8.h"

namespace gptkernels::cpu {

// out[i] = the number x[i].
Status fp8_widen(float* out, const uint8_t* x, int64_t size, Fp8Format format, Stream stream);

// out (rows, columns) = product * scale_a * scale_b + bias, rounded. bias (columns) may be null.
template <typename T>
struct Fp8Finish {
  T* out;
  const float* product;
  const float* scale_a;
  const float* scale_b;
  const T* bias;
  int64_t rows;
  int64_t columns;
};

template <typename T>
Status fp8_finish(const Fp8Finish<T>& p, Stream stream);

}  // namespace gptkernels::cpu
