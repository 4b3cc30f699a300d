// max(x, 0)^2 over dense data of any shape. An output may overwrite an input.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T>
struct SquaredReluForward {
  T* out;
  const T* x;
  int64_t size;
};

template <typename T>
struct SquaredReluBackward {
  T* dx;
  const T* dout;
  const T* x;
  int64_t size;
};

template <typename T>
Status squared_relu_forward(const SquaredReluForward<T>& p, Stream stream);

template <typename T>
Status squared_relu_backward(const SquaredReluBackward<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
