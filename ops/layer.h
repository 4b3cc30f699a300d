// The backward of a whole layer, for layer.cpp and fp8_layer.cpp, which pass the backwards of the matmuls.
#pragma once

#include "calls.h"
#include "layernorm.h"

namespace gptkernels::GPTKERNELS_DEVICE {

enum LayerGradient {
  kStream,
  kValues,
  kValuesBias,
  kNorm1Weight,
  kNorm1Bias,
  kQkvWeight,
  kQkvBias,
  kAttnProjWeight,
  kAttnProjBias,
  kNorm2Weight,
  kNorm2Bias,
  kFcWeight,
  kFcBias,
  kMlpProjWeight,
  kGradients
};

inline void check_values(const char* op, const OptionalTensor& values, const OptionalTensor& values_bias,
                         double values_dropout_p) {
  if (!values && (values_bias || values_dropout_p != 0))
    fail(op, "values_bias and values_dropout_p are of values, which are not given");
}

// ---- backward -------------------------------------------------------------------------------------------------------

struct AddAndNorm {
  const Tensor& sum;
  const Tensor& mean;
  const Tensor& rstd;
  const OptionalTensor& weight;
  LayernormDropout dropout;  // of the addend

  bool has_separate_gradient(const Tensor& dout) const { return is_mixed(dout, sum) || dropout.p > 0; }

  // Without a separate gradient, .dx is the gradient of the addend and of the residual stream, and .dresidual is an
  // undefined tensor.
  LayernormGradients backward(const char* op, const Tensor& dout, const OptionalTensor& dsum, bool need_dx,
                              bool need_weight, bool need_bias, bool need_x_bias, bool need_dresidual) const {
    std::vector<bool> mask = {need_dx, need_weight, need_bias, need_x_bias, need_dresidual};
    if (!has_separate_gradient(dout)) {
      mask[0] = need_dx || need_dresidual;
      mask.resize(4);
    }
    return run_layernorm_backward(op, dout, dsum, "sum", sum, weight, mean, rstd, mask, dropout);
  }
};

struct Attention {
  const Tensor& qkv;
  const Tensor& attended;
  const Tensor& logsumexp;
  int64_t num_heads;
  std::optional<double> scale;
  double dropout_p;
  const OptionalTensor& seed;
  const OptionalTensor& offset;

  Tensor backward(const Tensor& dattended) const {
    return attention_backward_op(dattended, qkv, attended, logsumexp, num_heads, scale, dropout_p, seed, offset);
  }
};

struct LayerBackward {
  const Tensor& dout;
  const OptionalTensor& dresidual_2;
  AddAndNorm norm_1;
  Attention attention;
  AddAndNorm norm_2;
  bool adds_past;
  const std::vector<bool>& mask;
};

// Returns the gradients in the order of LayerGradient. The three functions are the backwards of the matmuls:
//   mlp_backward() -> dnorm_2, dfc_weight, dfc_bias, dmlp_proj_weight
//   attn_proj_backward(dadded) -> dattended, dattn_proj_weight
//   qkv_backward(dqkv, whether dnorm_1 is wanted) -> dnorm_1, dqkv_weight, dqkv_bias
template <typename MlpBackward, typename AttnProjBackward, typename QkvBackward>
auto layer_backward(const char* op, const LayerBackward& p, const MlpBackward& mlp_backward,
                    const AttnProjBackward& attn_proj_backward, const QkvBackward& qkv_backward) {
  const auto& [dout, dresidual_2, norm_1, attention, norm_2, adds_past, mask] = p;
  const bool inputs = mask[kStream] || mask[kValues] || mask[kValuesBias];
  const bool through_norm_1 = inputs || mask[kNorm1Weight] || mask[kNorm1Bias];
  const Tensor none;  // assigned to tensors that no later kernel reads, to free their memory

  auto [dnorm_2, dfc_weight, dfc_bias, dmlp_proj_weight] = mlp_backward();
  const LayernormGradients second =
      norm_2.backward(op, dnorm_2, dresidual_2, true, mask[kNorm2Weight], mask[kNorm2Bias], mask[kAttnProjBias], true);
  const Tensor& dresidual_1 = norm_2.has_separate_gradient(dnorm_2) ? second.dresidual : second.dx;
  dnorm_2 = none;
  auto [dattended, dattn_proj_weight] = attn_proj_backward(second.dx);
  Tensor dqkv = attention.backward(dattended);
  dattended = none;
  const auto [dnorm_1, dqkv_weight, dqkv_bias] = qkv_backward(dqkv, through_norm_1);
  dqkv = none;
  const OptionalTensor past = adds_past ? OptionalTensor(dresidual_1) : std::nullopt;
  const Tensor& sum = norm_1.sum;
  const LayernormGradients first =
      through_norm_1 ? norm_1.backward(op, dnorm_1, past, mask[kValues], mask[kNorm1Weight], mask[kNorm1Bias],
                                       mask[kValuesBias], mask[kStream])
                     : LayernormGradients{absent(dnorm_1), absent(sum), absent(sum), absent(sum), absent(sum)};
  const bool apart = norm_1.has_separate_gradient(dnorm_1);
  const Tensor& dstream = !adds_past ? dresidual_1 : apart ? first.dresidual : first.dx;
  const Tensor dvalues = apart || !adds_past ? first.dx : absent(dout);
  return std::make_tuple(dstream, dvalues, first.dx_bias, first.dweight, first.dbias, dqkv_weight, dqkv_bias,
                         dattn_proj_weight, second.dx_bias, second.dweight, second.dbias, dfc_weight, dfc_bias,
                         dmlp_proj_weight);
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
