// The norm sqrt(sum of x^2) of a list of tensors. global_norm_squares() computes a partial sum for each chunk of a
// tensor, and global_norm_sum() adds the partial sums in a fixed order. Squares and sums are float64, so the squares of
// float32 values cannot overflow.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T>
struct GlobalNormSquares {
  double* partials;         // global_norm_partials(size) for each tensor in turn
  const T* const* tensors;  // host array of `count` pointers
  const int64_t* sizes;     // host array
  int64_t count;
};

int64_t global_norm_partials(int64_t size);

template <typename T>
Status global_norm_squares(const GlobalNormSquares<T>& p, Stream stream);

Status global_norm_sum(float* norm, const double* partials, int64_t count, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
