// Layer normalisation over the last dimension: out = (x - mean) * rstd * weight + bias, rstd = 1/sqrt(var + eps). With
// a residual it normalises sum = dropout(x + x_bias) + residual, rounded to T, and writes the sum too: the step between
// two blocks of a transformer in one pass. x_bias is that of the linear layer which made x. Added here it costs
// nothing, and neither does its gradient, the sums of dx over the rows.
//
// T is the dtype of the stream and of the parameters, X that of x, out and their gradients: T, or beside a float32
// stream 16 bits, as what matrix products in 16 bits make and take. `out` is then rounded to X, and the sum is not.
#pragma once

#include "device.h"
#include "dropout.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T, typename X = T>
struct LayernormForward {
  X* out;                 // (N, C)
  accumulate_t<T>* mean;  // (N)
  accumulate_t<T>* rstd;  // (N)
  T* sum;                 // (N, C), where there is a residual
  const X* x;             // (N, C)
  const T* residual;      // (N, C) or null: none; not null where X is not T
  const T* x_bias;        // (C) or null: zeros; only with a residual
  const T* weight;        // (C) or null: ones
  const T* bias;          // (C) or null: zeros
  int64_t rows;           // N
  int64_t width;          // C
  double eps;
};

template <typename T, typename X = T>
struct LayernormBackward {
  X* dx;                        // (N, C) or null: not wanted
  T* dweight;                   // (C) or null: not wanted
  T* dbias;                     // (C) or null: not wanted
  T* dx_bias;                   // (C) or null: not wanted; dx then is not null
  const X* dout;                // (N, C)
  const T* dsum;                // (N, C) or null: the gradient of the sum by other paths, added to dx
  const T* x;                   // (N, C)
  const T* weight;              // (C) or null: ones
  const accumulate_t<T>* mean;  // (N)
  const accumulate_t<T>* rstd;  // (N)
  void* workspace;              // layernorm_backward_workspace<T>(rows, width) bytes; null: no sums are wanted
  int64_t rows;                 // N
  int64_t width;                // C
};

// What a dropout of x + x_bias adds to the backward. The gradient of the residual is then not dx, which is its dropout.
// It is not dx either where X is not T.
template <typename T>
struct LayernormDropoutBackward {
  T* dresidual;  // (N, C) or null, as dx
  DropoutArguments arguments;
};

template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, Stream stream);

// With dropout of x + x_bias: element (n, c) is element n * C + c of the dropout's data.
template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, const DropoutArguments& dropout, Stream stream);

// The size of the backward's workspace in bytes: partial sums of dweight, dbias and dx_bias over groups of rows.
template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width);

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, Stream stream);

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, const LayernormDropoutBackward<T>& dropout, Stream stream);

// X of 16 bits beside a float32 stream; with a probability of 0 seed and offset are not read.
template <typename X>
Status layernorm_forward_mixed(const LayernormForward<float, X>& p, const DropoutArguments& dropout, Stream stream);

template <typename X>
Status layernorm_backward_mixed(const LayernormBackward<float, X>& p, const LayernormDropoutBackward<float>& dropout,
                                Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
