// Softmax, cross-entropy and its gradient in one pass. With p = softmax(logits) over the first V columns of a row,
//   losses = -log p[target],   dlogits = (p - onehot(target)) * dlosses.
// The loss and dlogits are 0 in a row whose target is ignore_index. Padding (columns V to Vp - 1) is ignored in logits
// and 0 in dlogits.
//
// For a target outside the vocabulary, the CPU launcher returns an error before it writes anything. On CUDA the host
// does not read the targets, and the kernel fails a device-side assertion.
#pragma once

#include <cstdint>

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// 2^15 * (p - onehot) in e5m2. |p - onehot| is at most 1, and 2^15 is the largest power of two in e5m2, so the product
// never overflows.
struct Fp8Dlogit {
  static constexpr float kMultiplier = 32768;
  uint8_t bits;
};

// Out is T or Fp8Dlogit. With Fp8Dlogit, dlosses must be null.
template <typename T, typename Out = T>
struct FusedClassifierForward {
  accumulate_t<T>* losses;  // (N)
  Out* dlogits;             // (N, Vp); may be logits if Out is T
  const T* logits;          // (N, Vp)
  const void* targets;      // (N) int64 or int32
  bool targets_are_int64;
  const accumulate_t<T>* dlosses;  // (N) or scalar; null means 1
  bool dlosses_per_row;
  int64_t rows;        // N
  int64_t width;       // Vp
  int64_t vocab_size;  // V, from 1 to Vp
  int64_t ignore_index;
  int64_t first_row = 0;  // the number of row 0 in error messages
};

// scaled = dlogits * dlosses, row by row. A gradient of exactly 0 stays 0 even if dlosses is infinite or NaN, as in
// torch: if all rows are ignored, dlosses of the mean is infinite, but the gradient of the logits is 0.
template <typename T>
struct FusedClassifierBackward {
  T* scaled;                       // (N, Vp)
  const T* dlogits;                // (N, Vp)
  const accumulate_t<T>* dlosses;  // (N) or scalar
  bool dlosses_per_row;
  int64_t rows;   // N
  int64_t width;  // Vp
};

template <typename T, typename Out = T>
Status fused_classifier_forward(const FusedClassifierForward<T, Out>& p, Stream stream);

template <typename T>
Status fused_classifier_backward(const FusedClassifierBackward<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
