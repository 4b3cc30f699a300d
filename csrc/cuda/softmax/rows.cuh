// Arguments of softmax's kernels, for whole rows and for rows under the causal mask.
#pragma once

#include <cstdint>

#include "../../device.h"

namespace gptkernels::cuda {

template <typename T>
struct SoftmaxRows {
  T* out;
  const T* x;
  int64_t rows;
  int64_t width;
  accumulate_t<T> scale;  // factor of x before the softmax
};

template <typename T>
struct SoftmaxBackwardRows {
  T* dx;
  const T* dout;
  const T* out;
  int64_t rows;
  int64_t width;
  accumulate_t<T> scale;
};

// Returns the number of columns of a row that are not masked: all columns or, under the causal mask, the columns up to
// the diagonal of the row's square matrix.
template <bool kCausal, typename Index>
__device__ Index unmasked_columns(Index row, Index width) {
  return kCausal ? row % width + 1 : width;
}

}  // namespace gptkernels::cuda
