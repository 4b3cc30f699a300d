// out = x / (1 - probability) if the mask keeps the element, else 0 * x. The backward computes the mask again from seed
// and offset.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// An element is kept if its 16 random bits (philox.h) are at least round(probability * 65536). seed and offset are in
// device memory, so that a CUDA graph can be replayed with other values.
//
// If the call's data are a part of a larger tensor, the other members are the part's position, and the call's mask is
// this part of the larger tensor's mask.
struct DropoutArguments {
  double probability = 0;
  const int64_t* seed = nullptr;
  const int64_t* offset = nullptr;
  int64_t first_index = 0;  // dense data: the first element's flat index, a multiple of kDenseGroup (philox.h)
  int64_t first_query = 0;  // attention: a multiple of kGroupQueries
  int64_t first_head = 0;   // attention
  int64_t other_heads = 0;  // attention: the heads of the larger tensor that are not in the call
};

// The backward is the same function, applied to the gradient. `out` may be `x`.
template <typename T>
struct DropoutForward {
  T* out;
  const T* x;
  int64_t size;
  DropoutArguments arguments;
};

template <typename T>
Status dropout_forward(const DropoutForward<T>& p, Stream stream);

// For tests and debugging: true if the element is kept.
Status dropout_mask(bool* mask, int64_t size, const DropoutArguments& arguments, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
