// Layer normalisation over the last dimension: out = (x - mean) * rstd * weight + bias, rstd = 1/sqrt(var + eps). With
// a residual it normalises sum = x + residual, rounded to T, and writes the sum too: the step between two blocks of a
// transformer in one pass.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T>
struct LayernormForward {
  T* out;                 // (N, C)
  accumulate_t<T>* mean;  // (N)
  accumulate_t<T>* rstd;  // (N)
  T* sum;                 // (N, C), where there is a residual
  const T* x;             // (N, C)
  const T* residual;      // (N, C) or null: none
  const T* weight;        // (C) or null: ones
  const T* bias;          // (C) or null: zeros
  int64_t rows;           // N
  int64_t width;          // C
  double eps;
};

template <typename T>
struct LayernormBackward {
  T* dx;                        // (N, C) or null: not wanted
  T* dweight;                   // (C) or null: not wanted
  T* dbias;                     // (C) or null: not wanted
  const T* dout;                // (N, C)
  const T* dsum;                // (N, C) or null: the gradient of the sum by other paths, added to dx
  const T* x;                   // (N, C)
  const T* weight;              // (C) or null: ones
  const accumulate_t<T>* mean;  // (N)
  const accumulate_t<T>* rstd;  // (N)
  void* workspace;              // layernorm_backward_workspace<T>(rows, width) bytes
  int64_t rows;                 // N
  int64_t width;                // C
};

template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, Stream stream);

// The size of the backward's workspace in bytes: partial sums of dweight and dbias over groups of rows.
template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width);

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
