// Layer normalisation over the last dimension: out = (x - mean) * rstd * weight + bias, rstd = 1/sqrt(var + eps).
//
// If there is a residual, the op normalises sum = dropout(x + x_bias) + residual, rounded to T, and writes the sum.
// x_bias is the bias of the linear layer that computed x.
//
// T is the dtype of the residual stream and of the parameters; X is the dtype of x, out and their gradients. X is T, or
// a 16-bit type if T is float32.
#pragma once

#include "device.h"
#include "dropout.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T, typename X = T>
struct LayernormForward {
  X* out;                 // (N, C)
  accumulate_t<T>* mean;  // (N)
  accumulate_t<T>* rstd;  // (N)
  T* sum;                 // (N, C), with a residual
  const X* x;             // (N, C)
  const T* residual;      // (N, C) or null; required if X is not T
  const T* x_bias;        // (C) or null; only with a residual
  const T* weight;        // (C), or null for ones
  const T* bias;          // (C), or null for zeros
  int64_t rows;           // N
  int64_t width;          // C
  double eps;
};

template <typename T, typename X = T>
struct LayernormBackward {
  X* dx;                        // (N, C) or null; null outputs are not computed
  T* dweight;                   // (C) or null
  T* dbias;                     // (C) or null
  T* dx_bias;                   // (C) or null; requires dx
  T* dresidual;                 // (N, C) or null: dx before dropout and rounding to X
  const X* dout;                // (N, C)
  const T* dsum;                // (N, C) or null: the gradient that reaches the sum by other paths
  const T* x;                   // (N, C): the input, or the forward's sum
  const T* weight;              // (C), or null for ones
  const accumulate_t<T>* mean;  // (N)
  const accumulate_t<T>* rstd;  // (N)
  void* workspace;              // only for dweight, dbias, dx_bias
  int64_t rows;                 // N
  int64_t width;                // C
};

// Element (n, c) has index n * C + c in the dropout mask of x + x_bias. With probability 0, seed and offset are not
// read.
template <typename T, typename X>
Status layernorm_forward(const LayernormForward<T, X>& p, const DropoutArguments& dropout, Stream stream);

// Returns the size in bytes.
template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width);

// If dx is not null, dresidual is required with dropout and for an X narrower than T.
template <typename T, typename X>
Status layernorm_backward(const LayernormBackward<T, X>& p, const DropoutArguments& dropout, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
