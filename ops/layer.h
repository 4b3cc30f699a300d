// What the operators of a whole layer share: layer.cpp, fp8_layer.cpp.
#pragma once

#include "layernorm.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// What the mask's entries, and the outputs, are.
enum LayerGradient {
  kStream,
  kValues,
  kValuesBias,
  kNorm1Weight,
  kNorm1Bias,
  kQkvWeight,
  kQkvBias,
  kOutWeight,
  kOutBias,
  kNorm2Weight,
  kNorm2Bias,
  kFcWeight,
  kFcBias,
  kProjWeight,
  kGradients
};

// Whether the addend's gradient is another than the stream's: where it has another dtype, or elements were dropped.
inline bool is_apart(const Tensor& dout, const Tensor& sum, const LayernormDropout& dropout) {
  return is_mixed(dout, sum) || dropout.p > 0;
}

// The backward of an addition to the stream and the norm that follows it. Where the addend's gradient is the stream's,
// .dresidual has no elements.
inline LayernormGradients add_and_norm_backward(const char* op, const Tensor& dout, const OptionalTensor& dsum,
                                                const Tensor& sum, const OptionalTensor& weight, const Tensor& mean,
                                                const Tensor& rstd, bool need_dx, bool need_weight, bool need_bias,
                                                bool need_x_bias, bool need_dresidual,
                                                const LayernormDropout& dropout) {
  std::vector<bool> mask = {need_dx, need_weight, need_bias, need_x_bias, need_dresidual};
  if (!is_apart(dout, sum, dropout)) {
    mask[0] = need_dx || need_dresidual;
    mask.resize(4);
  }
  return run_layernorm_backward(op, dout, dsum, "sum", sum, weight, mean, rstd, mask, dropout);
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
