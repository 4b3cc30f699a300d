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
  accumulate_t<T> scale;
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

// Under the causal mask, the number of columns up to the diagonal of the row's square matrix.
template <bool kCausal, typename Index>
__device__ Index unmasked_columns(Index row, Index width) {
  return kCausal ? row % width + 1 : width;
}

}  // namespace gptkernels::cuda
