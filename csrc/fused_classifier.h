// Softmax, cross-entropy and its gradient in one pass. With p = softmax(logits) over the first V columns of a row,
//   losses = -log p[target],   dlogits = (p - onehot(target)) * dlosses;
// both are 0 on a row whose target is ignore_index, and dlogits is 0 in the padded columns V..Vp, which are ignored.
//
// A target outside the vocabulary is never used as an index. The CPU's launcher returns an error before it writes
// anything; on CUDA, where the host does not see the targets, a device-side assertion ends the kernel.
#pragma once

#include <cstdint>

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// A gradient of a logit in float8, for a product on the tensor cores: 2^15 (p - onehot) in e5m2. That is from -2^15 to
// 2^15, the largest power of two that e5m2 has, so the scale is known before any gradient is.
struct Fp8Dlogit {
  static constexpr float kMultiplier = 32768;
  uint8_t bits;
};

// Out: T, or Fp8Dlogit, then without dlosses.
template <typename T, typename Out = T>
struct FusedClassifierForward {
  accumulate_t<T>* losses;  // (N)
  Out* dlogits;             // (N, Vp); may be `logits` itself
  const T* logits;          // (N, Vp)
  const void* targets;      // (N) int64 or int32
  bool targets_are_int64;
  const accumulate_t<T>* dlosses;  // (N), or one for all rows, or null: ones
  bool dlosses_per_row;
  int64_t rows;        // N
  int64_t width;       // Vp
  int64_t vocab_size;  // V, from 1 to Vp
  int64_t ignore_index;
  int64_t first_row = 0;  // the number of row 0 in an error, where these are some of a longer list
};

// scaled = dlogits * dlosses, row by row. A gradient of exactly 0 stays 0 even if dlosses is infinite or NaN. torch
// does the same on ignored rows: the mean over rows that are all ignored has an infinite gradient.
template <typename T>
struct FusedClassifierBackward {
  T* scaled;                       // (N, Vp)
  const T* dlogits;                // (N, Vp)
  const accumulate_t<T>* dlosses;  // (N), or one for all rows
  bool dlosses_per_row;
  int64_t rows;   // N
  int64_t width;  // Vp
};

template <typename T, typename Out = T>
Status fused_classifier_forward(const FusedClassifierForward<T, Out>& p, Stream stream);

template <typename T>
Status fused_classifier_backward(const FusedClassifierBackward<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
