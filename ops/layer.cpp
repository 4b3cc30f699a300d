// A layer of GPT-2 in training: the operators that it is made of, called one after the other. What a call by Python
// costs the host is paid once, not for each of them; no kernel is another.
//
// The sum of the MLP and the stream is left to the next layer's first norm.
#include "layer.h"

#include "parts.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

bool is_tanh(const char* op, const std::string& approximate) {
  if (approximate != "tanh" && approximate != "none")
    fail(op, "approximate must be 'tanh' or 'none', got '", approximate, "'");
  return approximate == "tanh";
}

// The tensor in another dtype.
Tensor cast(const Tensor& t, ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  Tensor made = allocate(shape_of(t), dtype, t);
  torch::stable::copy_(made, t);
  return made;
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                           Tensor, Tensor, Tensor>;

Forward layer_op(const Tensor& stream, const OptionalTensor& values, const OptionalTensor& values_bias,
                 const OptionalTensor& norm_1_weight, const OptionalTensor& norm_1_bias, const Tensor& qkv_weight,
                 const OptionalTensor& qkv_bias, const Tensor& out_weight, const OptionalTensor& out_bias,
                 const OptionalTensor& norm_2_weight, const OptionalTensor& norm_2_bias, const Tensor& fc_weight,
                 const OptionalTensor& fc_bias, const Tensor& proj_weight, int64_t num_heads,
                 std::optional<double> scale, double eps_1, double eps_2, StringHandle approximate_name,
                 double values_dropout_p, const OptionalTensor& values_seed, const OptionalTensor& values_offset,
                 double attention_dropout_p, const OptionalTensor& attention_seed,
                 const OptionalTensor& attention_offset, double out_dropout_p, const OptionalTensor& out_seed,
                 const OptionalTensor& out_offset, bool keep_post_gelu) {
  constexpr const char* op = "layer";
  const std::string approximate = take_string(approximate_name);
  const bool tanh = is_tanh(op, approximate);
  if (!values && (values_bias || values_dropout_p != 0))
    fail(op, "values_bias and values_dropout_p are of values, which are not given");

  LayernormOutputs first = values ? run_layernorm(op, *values, stream, norm_1_weight, norm_1_bias, eps_1, values_bias,
                                                  {values_dropout_p, values_seed, values_offset})
                                  : run_layernorm(op, stream, std::nullopt, norm_1_weight, norm_1_bias, eps_1);
  if (!values) first.out = cast(first.out, qkv_weight.scalar_type());
  const Tensor qkv = linear_op(first.out, qkv_weight, qkv_bias);
  const auto [attended, logsumexp] =
      attention_op(qkv, num_heads, scale, attention_dropout_p, attention_seed, attention_offset);
  const LayernormOutputs second = [&] {
    const Tensor added = linear_op(attended, out_weight, std::nullopt);
    return run_layernorm(op, added, first.sum ? *first.sum : stream, norm_2_weight, norm_2_bias, eps_2, out_bias,
                         {out_dropout_p, out_seed, out_offset});
  }();
  const auto [out, pre_gelu, post_gelu] = [&]() -> std::tuple<Tensor, Tensor, Tensor> {
    if (tanh) return mlp_op(second.out, fc_weight, fc_bias, proj_weight, std::nullopt, keep_post_gelu);
    const Tensor pre = linear_op(second.out, fc_weight, fc_bias);
    const Tensor post = gelu_op(pre, approximate);
    return {linear_op(post, proj_weight, std::nullopt), pre, keep_post_gelu ? post : absent(post)};
  }();
  return {out,         first.sum ? *first.sum : absent(stream),
          first.mean,  first.rstd,
          first.out,   qkv,
          attended,    logsumexp,
          *second.sum, second.mean,
          second.rstd, second.out,
          pre_gelu,    post_gelu};
}

// ---- backward -------------------------------------------------------------------------------------------------------

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                            Tensor, Tensor, Tensor>;

Backward layer_backward_op(const Tensor& dout, const OptionalTensor& dsum, const Tensor& sum_1, const Tensor& mean_1,
                           const Tensor& rstd_1, const Tensor& norm_1, const Tensor& qkv, const Tensor& attended,
                           const Tensor& logsumexp, const Tensor& sum_2, const Tensor& mean_2, const Tensor& rstd_2,
                           const Tensor& norm_2, const Tensor& pre_gelu, const Tensor& post_gelu,
                           const OptionalTensor& norm_1_weight, const Tensor& qkv_weight, const Tensor& out_weight,
                           const OptionalTensor& norm_2_weight, const Tensor& fc_weight, const Tensor& proj_weight,
                           int64_t num_heads, std::optional<double> scale, StringHandle approximate_name,
                           const std::vector<bool>& mask, double values_dropout_p, const OptionalTensor& values_seed,
                           const OptionalTensor& values_offset, double attention_dropout_p,
                           const OptionalTensor& attention_seed, const OptionalTensor& attention_offset,
                           double out_dropout_p, const OptionalTensor& out_seed, const OptionalTensor& out_offset,
                           bool has_values, bool adds_past) {
  constexpr const char* op = "layer_backward";
  const std::string approximate = take_string(approximate_name);
  const bool tanh = is_tanh(op, approximate);
  if (has_values && !adds_past) fail(op, "adds_past must be true where there are values");
  const LayernormDropout values_dropout = {values_dropout_p, values_seed, values_offset};
  const LayernormDropout out_dropout = {out_dropout_p, out_seed, out_offset};
  const bool inputs = mask[kStream] || mask[kValues] || mask[kValuesBias];
  const bool through_norm_1 = inputs || mask[kNorm1Weight] || mask[kNorm1Bias];

  Tensor dnorm, dfc_weight, dfc_bias, dproj_weight, none;
  if (tanh) {
    std::tie(dnorm, dfc_weight, dfc_bias, dproj_weight, none) =
        mlp_backward_op(dout, norm_2, fc_weight, proj_weight, pre_gelu, post_gelu,
                        {true, mask[kFcWeight], mask[kFcBias], mask[kProjWeight]});
  } else {
    Tensor dpost;
    std::tie(dpost, dproj_weight, none) = linear_backward_op(dout, kept_or_again(post_gelu, pre_gelu, approximate),
                                                             proj_weight, {true, mask[kProjWeight]});
    std::tie(dnorm, dfc_weight, dfc_bias) = linear_backward_op(gelu_backward_op(dpost, pre_gelu, approximate), norm_2,
                                                               fc_weight, {true, mask[kFcWeight], mask[kFcBias]});
  }
  const LayernormGradients second =
      add_and_norm_backward(op, dnorm, dsum, sum_2, norm_2_weight, mean_2, rstd_2, true, mask[kNorm2Weight],
                            mask[kNorm2Bias], mask[kOutBias], true, out_dropout);
  const Tensor& dsum_1 = is_apart(dnorm, sum_2, out_dropout) ? second.dresidual : second.dx;
  Tensor dattended, dout_weight, dqkv, dqkv_weight, dqkv_bias;
  std::tie(dattended, dout_weight, none) =
      linear_backward_op(second.dx, attended, out_weight, {true, mask[kOutWeight]});
  dqkv = attention_backward_op(dattended, qkv, attended, logsumexp, num_heads, scale, attention_dropout_p,
                               attention_seed, attention_offset);
  dattended = none;
  std::tie(dnorm, dqkv_weight, dqkv_bias) =
      linear_backward_op(dqkv, norm_1, qkv_weight, {through_norm_1, mask[kQkvWeight], mask[kQkvBias]});
  dqkv = none;
  if (!has_values) dnorm = cast(dnorm, sum_1.scalar_type());
  const OptionalTensor past = adds_past ? OptionalTensor(dsum_1) : std::nullopt;
  const LayernormGradients first =
      through_norm_1 ? add_and_norm_backward(op, dnorm, past, sum_1, norm_1_weight, mean_1, rstd_1, mask[kValues],
                                             mask[kNorm1Weight], mask[kNorm1Bias], mask[kValuesBias], mask[kStream],
                                             values_dropout)
                     : LayernormGradients{absent(dnorm), absent(sum_1), absent(sum_1), absent(sum_1), absent(sum_1)};
  const bool apart = is_apart(dnorm, sum_1, values_dropout);
  const Tensor& dstream = adds_past ? apart ? first.dresidual : first.dx : dsum_1;
  const Tensor dvalues = apart || !adds_past ? first.dx : absent(dout);
  return {dstream,     dvalues,        first.dx_bias,  first.dweight, first.dbias, dqkv_weight, dqkv_bias,
          dout_weight, second.dx_bias, second.dweight, second.dbias,  dfc_weight,  dfc_bias,    dproj_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("layer", TORCH_BOX(&layer_op));
  m.impl("layer_backward", TORCH_BOX(&layer_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
