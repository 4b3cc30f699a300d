// GELU over dense data: x * Phi(x), where Phi is the normal distribution function (kErf), or the tanh approximation of
// x * Phi(x) (kTanh). An output may overwrite an input.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

enum class GeluForm { kTanh, kErf };

template <typename T>
struct GeluForward {
  T* out;
  const T* x;
  int64_t size;
  GeluForm form;
};

template <typename T>
struct GeluBackward {
  T* dx;
  const T* dout;
  const T* x;
  int64_t size;
  GeluForm form;
};

template <typename T>
Status gelu_forward(const GeluForward<T>& p, Stream stream);

template <typename T>
Status gelu_backward(const GeluBackward<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
