// Dropout: out = x / (1 - probability) where the mask keeps an element, else 0 * x. The mask is not stored:
// the backward computes it again from the seed.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// An element is kept if its 16 random bits (philox.h says which) are not below probability * 65536, rounded. seed and
// offset lie on the device, so that a CUDA graph can replay with other numbers.
struct DropoutArguments {
  double probability = 0;
  const int64_t* seed = nullptr;
  const int64_t* offset = nullptr;
};

// Over dense data of any shape. The gradient is the same function of the gradient. `out` may be `x`.
template <typename T>
struct DropoutForward {
  T* out;
  const T* x;
  int64_t size;
  DropoutArguments arguments;
};

template <typename T>
Status dropout_forward(const DropoutForward<T>& p, Stream stream);

// mask (size): true where an element is kept. For tests and debugging.
Status dropout_mask(bool* mask, int64_t size, const DropoutArguments& arguments, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
