// The Euclidean norm of all elements of a list of tensors, sqrt(sum of x^2), in two stages: a partial sum for each
// chunk of a tensor, then the partial sums in order.
//
// Squares and sums are float64: no float32 value overflows, however long the list, and the float32 result has all its
// digits. The square of a float64 element above 1e154 is infinite.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T>
struct GlobalNormSquares {
  double* partials;         // of all tensors, one after another: global_norm_partials(size) for each
  const T* const* tensors;  // host array of `count` pointers
  const int64_t* sizes;     // host array
  int64_t count;
};

// The number of partial sums of a tensor of this size.
int64_t global_norm_partials(int64_t size);

template <typename T>
Status global_norm_squares(const GlobalNormSquares<T>& p, Stream stream);

// norm[0] = sqrt(partials[0] + ... + partials[count - 1]).
Status global_norm_sum(float* norm, const double* partials, int64_t count, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
