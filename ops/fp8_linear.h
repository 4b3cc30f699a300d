#pragma once

#include "fp8.h"

namespace gptkernels::GPTKERNELS_DEVICE {

void check_fp8_layer(const char* op, const char* x_name, const Tensor& x, int64_t inner, const char* name,
                     const Tensor& weight, const char* bias_name, const OptionalTensor& bias);

struct Fp8Product {
  Tensor out;
  Quantized weight;
};

// out = x @ weight^T + bias, in the weight's dtype. Quantises the weight, with a transposed copy if `transposed`.
Fp8Product fp8_forward(const Launcher& launcher, const Quantized& x, const Tensor& weight, const OptionalTensor& bias,
                       bool transposed);

struct Fp8Mlp {
  Tensor out;
  Tensor pre_gelu;
  Quantized fc;
  Quantized hidden;  // of GELU's output
  Quantized proj;
};

struct Fp8MlpTransposed {
  bool fc_weight = true;
  bool hidden = true;
  bool proj_weight = true;
};

Fp8Mlp fp8_mlp_forward(const Launcher& launcher, const Quantized& x, const Tensor& fc_weight,
                       const OptionalTensor& fc_bias, const Tensor& proj_weight, const OptionalTensor& proj_bias,
                       const OptionalTensor& hidden_history, const Fp8MlpTransposed& transposed = {});

std::tuple<Tensor, Tensor, Tensor> fp8_linear_backward_op(const Tensor& dout, const Tensor& x_t, const Tensor& weight_t,
                                                          const Tensor& x_scale, const Tensor& weight_scale,
                                                          const OptionalTensor& history,
                                                          const std::vector<bool>& output_mask);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fp8_mlp_backward_op(
    const Tensor& dout, const Tensor& pre_gelu, const Tensor& x_t, const Tensor& fc_weight_t, const Tensor& hidden_t,
    const Tensor& proj_weight_t, const Tensor& x_scale, const Tensor& fc_scale, const Tensor& hidden_scale,
    const Tensor& proj_scale, const OptionalTensor& dhidden_history, const OptionalTensor& dout_history,
    const std::vector<bool>& output_mask);

}  // namespace gptkernels::GPTKERNELS_DEVICE
