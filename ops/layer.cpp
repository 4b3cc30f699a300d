// A layer of GPT-2 in training. One call from Python runs the single operators' kernels for the whole layer. The next
// layer's first norm adds the MLP's output to the stream.
#include "layer.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

bool is_tanh(const char* op, const std::string& approximate) {
  if (approximate != "tanh" && approximate != "none")
    fail(op, "approximate must be 'tanh' or 'none', got '", approximate, "'");
  return approximate == "tanh";
}

Tensor cast(const Tensor& t, ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  Tensor converted = allocate(shape_of(t), dtype, t);
  torch::stable::copy_(converted, t);
  return converted;
}

auto layer_op(const Tensor& stream, const OptionalTensor& values, const OptionalTensor& values_bias,
              const OptionalTensor& norm_1_weight, const OptionalTensor& norm_1_bias, const Tensor& qkv_weight,
              const OptionalTensor& qkv_bias, const Tensor& attn_proj_weight, const OptionalTensor& attn_proj_bias,
              const OptionalTensor& norm_2_weight, const OptionalTensor& norm_2_bias, const Tensor& fc_weight,
              const OptionalTensor& fc_bias, const Tensor& mlp_proj_weight, int64_t num_heads,
              std::optional<double> scale, double eps_1, double eps_2, StringHandle approximate_name,
              double values_dropout_p, const OptionalTensor& values_seed, const OptionalTensor& values_offset,
              double attention_dropout_p, const OptionalTensor& attention_seed, const OptionalTensor& attention_offset,
              double out_dropout_p, const OptionalTensor& out_seed, const OptionalTensor& out_offset,
              bool keep_post_gelu) {
  constexpr const char* op = "layer";
  const std::string approximate = take_string(approximate_name);
  const bool tanh = is_tanh(op, approximate);
  check_values(op, values, values_bias, values_dropout_p);

  LayernormOutputs first = values ? run_layernorm(op, *values, stream, norm_1_weight, norm_1_bias, eps_1, values_bias,
                                                  {values_dropout_p, values_seed, values_offset})
                                  : run_layernorm(op, stream, std::nullopt, norm_1_weight, norm_1_bias, eps_1);
  if (!values) first.out = cast(first.out, qkv_weight.scalar_type());
  const Tensor qkv = linear_op(first.out, qkv_weight, qkv_bias);
  const auto [attended, logsumexp] =
      attention_op(qkv, num_heads, scale, attention_dropout_p, attention_seed, attention_offset);
  const LayernormOutputs second = [&] {
    const Tensor added = linear_op(attended, attn_proj_weight, std::nullopt);
    return run_layernorm(op, added, first.sum ? *first.sum : stream, norm_2_weight, norm_2_bias, eps_2, attn_proj_bias,
                         {out_dropout_p, out_seed, out_offset});
  }();
  const auto [out, pre_gelu, post_gelu] = [&]() -> std::tuple<Tensor, Tensor, Tensor> {
    if (tanh) return mlp_op(second.out, fc_weight, fc_bias, mlp_proj_weight, std::nullopt, keep_post_gelu);
    const Tensor pre = linear_op(second.out, fc_weight, fc_bias);
    const Tensor post = gelu_op(pre, approximate);
    return {linear_op(post, mlp_proj_weight, std::nullopt), pre, keep_post_gelu ? post : absent(post)};
  }();
  const Tensor residual_1 = first.sum ? *first.sum : absent(stream);
  return std::make_tuple(out, residual_1, first.mean, first.rstd, first.out, qkv, attended, logsumexp, *second.sum,
                         second.mean, second.rstd, second.out, pre_gelu, post_gelu);
}

// ---- backward -------------------------------------------------------------------------------------------------------

auto layer_backward_op(const Tensor& dout, const OptionalTensor& dresidual_2, const Tensor& residual_1,
                       const Tensor& mean_1, const Tensor& rstd_1, const Tensor& norm_1, const Tensor& qkv,
                       const Tensor& attended, const Tensor& logsumexp, const Tensor& residual_2, const Tensor& mean_2,
                       const Tensor& rstd_2, const Tensor& norm_2, const Tensor& pre_gelu, const Tensor& post_gelu,
                       const OptionalTensor& norm_1_weight, const Tensor& qkv_weight, const Tensor& attn_proj_weight,
                       const OptionalTensor& norm_2_weight, const Tensor& fc_weight, const Tensor& mlp_proj_weight,
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
  return layer_backward(
      op,
      {.dout = dout,
       .dresidual_2 = dresidual_2,
       .norm_1 = {residual_1, mean_1, rstd_1, norm_1_weight, {values_dropout_p, values_seed, values_offset}},
       .attention = {qkv, attended, logsumexp, num_heads, scale, attention_dropout_p, attention_seed, attention_offset},
       .norm_2 = {residual_2, mean_2, rstd_2, norm_2_weight, {out_dropout_p, out_seed, out_offset}},
       .adds_past = adds_past,
       .mask = mask},
      [&] {
        if (tanh) {
          const auto [dnorm_2, dfc_weight, dfc_bias, dmlp_proj_weight, _] =
              mlp_backward_op(dout, norm_2, fc_weight, mlp_proj_weight, pre_gelu, post_gelu,
                              {true, mask[kFcWeight], mask[kFcBias], mask[kMlpProjWeight]});
          return std::make_tuple(dnorm_2, dfc_weight, dfc_bias, dmlp_proj_weight);
        }
        const auto [dpost, dmlp_proj_weight, _] = linear_backward_op(
            dout, saved_or_recomputed(post_gelu, pre_gelu, approximate), mlp_proj_weight, {true, mask[kMlpProjWeight]});
        const auto [dnorm_2, dfc_weight, dfc_bias] = linear_backward_op(
            gelu_backward_op(dpost, pre_gelu, approximate), norm_2, fc_weight, {true, mask[kFcWeight], mask[kFcBias]});
        return std::make_tuple(dnorm_2, dfc_weight, dfc_bias, dmlp_proj_weight);
      },
      [&](const Tensor& dadded) {
        const auto [dattended, dattn_proj_weight, _] =
            linear_backward_op(dadded, attended, attn_proj_weight, {true, mask[kAttnProjWeight]});
        return std::make_tuple(dattended, dattn_proj_weight);
      },
      [&](const Tensor& dqkv, bool dnorm_wanted) {
        const auto [dnorm_1, dqkv_weight, dqkv_bias] =
            linear_backward_op(dqkv, norm_1, qkv_weight, {dnorm_wanted, mask[kQkvWeight], mask[kQkvBias]});
        return std::make_tuple(has_values ? dnorm_1 : cast(dnorm_1, residual_1.scalar_type()), dqkv_weight, dqkv_bias);
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("layer", TORCH_BOX(&layer_op));
  m.impl("layer_backward", TORCH_BOX(&layer_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
