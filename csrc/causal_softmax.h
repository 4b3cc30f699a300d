// Row t of a (T, T) output is the softmax of columns 0..t of the same row of scale * scores. Scores above the diagonal
// are ignored, and outputs above the diagonal are exactly 0.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T>
struct CausalSoftmaxForward {
  T* out;           // (matrices, T, T); may be scores
  const T* scores;  // (matrices, T, T)
  int64_t matrices;
  int64_t tokens;  // T
  double scale;    // multiplies the scores
};

template <typename T>
struct CausalSoftmaxBackward {
  T* dscores;     // (matrices, T, T); may be dout
  const T* dout;  // (matrices, T, T)
  const T* out;   // (matrices, T, T)
  int64_t matrices;
  int64_t tokens;  // T
  double scale;
};

template <typename T>
Status causal_softmax_forward(const CausalSoftmaxForward<T>& p, Stream stream);

template <typename T>
Status causal_softmax_backward(const CausalSoftmaxBackward<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
