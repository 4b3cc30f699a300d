// out = exp(x - max(x)) / sum(exp(x - max(x))) over the last dimension.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T>
struct SoftmaxForward {
  T* out;         // (N, C); may be x
  const T* x;     // (N, C)
  int64_t rows;   // N
  int64_t width;  // C
};

template <typename T>
struct SoftmaxBackward {
  T* dx;          // (N, C); may be dout
  const T* dout;  // (N, C)
  const T* out;   // (N, C)
  int64_t rows;   // N
  int64_t width;  // C
};

template <typename T>
Status softmax_forward(const SoftmaxForward<T>& p, Stream stream);

template <typename T>
Status softmax_backward(const SoftmaxBackward<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
