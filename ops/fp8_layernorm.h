#pragma once

#include "fp8.h"
#include "layernorm.h"

namespace gptkernels::GPTKERNELS_DEVICE {

struct Fp8Layernorm {
  Quantized out;       // e4m3
  OptionalTensor sum;  // only with a residual
  Tensor mean;
  Tensor rstd;
};

// Computes run_layernorm(), and quantize() of its output, which is first rounded to x's dtype. One kernel computes both
// if it supports the arguments.
Fp8Layernorm run_fp8_layernorm(const char* op, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                               const OptionalTensor& x_bias, const LayernormDropout& dropout,
                               const OptionalTensor& history, bool transposed);

}  // namespace gptkernels::GPTKERNELS_DEVICE
