// The Euclidean norm of all elements of a list of tensors, sqrt(sum of x^2), in two stages: first one partial sum per
// chunk of a tensor, then the sum of the partial sums in a fixed order.
//
// Squares and sums are float64, so the squares of float32 values cannot overflow, and the float32 result is accurate to
// its last digit. The square of a float64 element above 1e154 is infinite.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T>
struct GlobalNormSquares {
  double* partials;         // concatenated over the tensors, global_norm_partials(size) for each
  const T* const* tensors;  // host array of `count` pointers
  const int64_t* sizes;     // host array
  int64_t count;
};

// Returns the number of partial sums of a tensor of this size.
int64_t global_norm_partials(int64_t size);

template <typename T>
Status global_norm_squares(const GlobalNormSquares<T>& p, Stream stream);

// norm[0] = sqrt(partials[0] + ... + partials[count - 1]).
Status global_norm_sum(float* norm, const double* partials, int64_t count, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
