// A layer of GPT-2 in training, with float8 matmuls and tanh GELU. The results have the same bits as those of the ops
// fp8_linear, fp8_mlp, attention and layernorm. The norms' outputs are saved in float8 only.
#include "fp8_layernorm.h"
#include "fp8_linear.h"
#include "layer.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

constexpr ScalarType kForward = ScalarType::Float8_e4m3fn;

// The outputs of fp8_layer from mean_1 on, in their order. They are the argument `saved` of fp8_layer_backward. Members
// whose names end in _t are transposed float8 operands.
struct Saved {
  Tensor mean_1, rstd_1, norm_1_t, norm_1_scale, qkv_weight_t, qkv_weight_scale, qkv, attended, logsumexp, attended_t;
  Tensor attended_scale, attn_proj_weight_t, attn_proj_weight_scale, mean_2, rstd_2, norm_2_t, norm_2_scale;
  Tensor fc_weight_t, fc_weight_scale, pre_gelu, hidden_t, hidden_scale, mlp_proj_weight_t, mlp_proj_weight_scale;

  auto members() {
    return std::tie(mean_1, rstd_1, norm_1_t, norm_1_scale, qkv_weight_t, qkv_weight_scale, qkv, attended, logsumexp,
                    attended_t, attended_scale, attn_proj_weight_t, attn_proj_weight_scale, mean_2, rstd_2, norm_2_t,
                    norm_2_scale, fc_weight_t, fc_weight_scale, pre_gelu, hidden_t, hidden_scale, mlp_proj_weight_t,
                    mlp_proj_weight_scale);
  }
};

template <typename... T>
std::tuple<T...> copied(const std::tuple<T&...>& references) {
  return references;
}

Saved check_saved(const char* op, const std::vector<Tensor>& tensors) {
  constexpr size_t kCount = std::tuple_size_v<decltype(std::declval<Saved&>().members())>;
  if (tensors.size() != kCount)
    fail(op, "saved must be the ", int64_t(kCount), " tensors of the forward, got ", tensors.size());
  const auto name = [&]<size_t... i>(std::index_sequence<i...>) { return Saved{tensors[i]...}; };
  return name(std::make_index_sequence<kCount>());
}

// Indices of the amax histories: those of the matmuls' inputs in the forward, and of their outputs' gradients in the
// backward.
enum Layers { kQkv, kAttnProj, kFc, kMlpProj, kLayers };

void check_histories(const char* op, const char* name, const std::vector<Tensor>& histories, const char* like_name,
                     const Tensor& like) {
  if (histories.size() != kLayers) fail(op, name, " must be ", int64_t(kLayers), " tensors, got ", histories.size());
  for (const Tensor& history : histories) check_history(op, name, history, like_name, like);
}

auto fp8_layer_op(const Tensor& stream, const OptionalTensor& values, const OptionalTensor& values_bias,
                  const OptionalTensor& norm_1_weight, const OptionalTensor& norm_1_bias, const Tensor& qkv_weight,
                  const OptionalTensor& qkv_bias, const Tensor& attn_proj_weight, const OptionalTensor& attn_proj_bias,
                  const OptionalTensor& norm_2_weight, const OptionalTensor& norm_2_bias, const Tensor& fc_weight,
                  const OptionalTensor& fc_bias, const Tensor& mlp_proj_weight, const std::vector<Tensor>& histories,
                  const std::vector<Tensor>& dout_histories, int64_t num_heads, std::optional<double> scale,
                  double eps_1, double eps_2, double values_dropout_p, const OptionalTensor& values_seed,
                  const OptionalTensor& values_offset, double attention_dropout_p, const OptionalTensor& attention_seed,
                  const OptionalTensor& attention_offset, double out_dropout_p, const OptionalTensor& out_seed,
                  const OptionalTensor& out_offset) {
  constexpr const char* op = "fp8_layer";
  check_values(op, values, values_bias, values_dropout_p);
  const Tensor& x = values ? *values : stream;
  const char* x_name = values ? "values" : "stream";
  check_dim_at_least(op, x_name, x, 1);
  const int64_t width = width_of(x);
  check_fp8_layer(op, x_name, x, width, "qkv_weight", qkv_weight, "qkv_bias", qkv_bias);
  check_fp8_layer(op, x_name, x, width, "attn_proj_weight", attn_proj_weight, "attn_proj_bias", std::nullopt);
  check_fp8_layer(op, x_name, x, width, "fc_weight", fc_weight, "fc_bias", fc_bias);
  check_fp8_layer(op, x_name, x, fc_weight.size(0), "mlp_proj_weight", mlp_proj_weight, "mlp_proj_bias", std::nullopt);
  check_histories(op, "histories", histories, x_name, x);
  check_histories(op, "dout_histories", dout_histories, x_name, x);

  const Launcher launcher(op, x);
  const Tensor none;  // assigned to tensors that no later kernel reads, to free their memory
  Fp8Layernorm first = values ? run_fp8_layernorm(op, *values, stream, norm_1_weight, norm_1_bias, eps_1, values_bias,
                                                  {values_dropout_p, values_seed, values_offset}, histories[kQkv], true)
                              : run_fp8_layernorm(op, stream, std::nullopt, norm_1_weight, norm_1_bias, eps_1,
                                                  std::nullopt, {}, histories[kQkv], true);
  const Fp8Product qkv = fp8_forward(launcher, first.out, qkv_weight, qkv_bias, true);
  first.out.values = none;
  const auto [attended, logsumexp] =
      attention_op(qkv.out, num_heads, scale, attention_dropout_p, attention_seed, attention_offset);
  Quantized attended_8 = quantize(launcher, attended, histories[kAttnProj], kForward, {.transposed = true});
  Fp8Product out = fp8_forward(launcher, attended_8, attn_proj_weight, std::nullopt, true);
  attended_8.values = none;
  const Fp8Layernorm second =
      run_fp8_layernorm(op, out.out, first.sum ? *first.sum : stream, norm_2_weight, norm_2_bias, eps_2, attn_proj_bias,
                        {out_dropout_p, out_seed, out_offset}, histories[kFc], true);
  out.out = none;
  const Fp8Mlp mlp =
      fp8_mlp_forward(launcher, second.out, fc_weight, fc_bias, mlp_proj_weight, std::nullopt, histories[kMlpProj]);
  Saved saved = {.mean_1 = first.mean,
                 .rstd_1 = first.rstd,
                 .norm_1_t = first.out.transposed,
                 .norm_1_scale = first.out.scale,
                 .qkv_weight_t = qkv.weight.transposed,
                 .qkv_weight_scale = qkv.weight.scale,
                 .qkv = qkv.out,
                 .attended = attended,
                 .logsumexp = logsumexp,
                 .attended_t = attended_8.transposed,
                 .attended_scale = attended_8.scale,
                 .attn_proj_weight_t = out.weight.transposed,
                 .attn_proj_weight_scale = out.weight.scale,
                 .mean_2 = second.mean,
                 .rstd_2 = second.rstd,
                 .norm_2_t = second.out.transposed,
                 .norm_2_scale = second.out.scale,
                 .fc_weight_t = mlp.fc.transposed,
                 .fc_weight_scale = mlp.fc.scale,
                 .pre_gelu = mlp.pre_gelu,
                 .hidden_t = mlp.hidden.transposed,
                 .hidden_scale = mlp.hidden.scale,
                 .mlp_proj_weight_t = mlp.proj.transposed,
                 .mlp_proj_weight_scale = mlp.proj.scale};
  const Tensor residual_1 = first.sum ? *first.sum : absent(stream);
  return std::tuple_cat(std::make_tuple(mlp.out, residual_1, *second.sum), copied(saved.members()));
}

auto fp8_layer_backward_op(const Tensor& dout, const OptionalTensor& dresidual_2, const Tensor& residual_1,
                           const Tensor& residual_2, const std::vector<Tensor>& tensors,
                           const OptionalTensor& norm_1_weight, const OptionalTensor& norm_2_weight,
                           const std::vector<Tensor>& histories, int64_t num_heads, std::optional<double> scale,
                           bool adds_past, const std::vector<bool>& mask, double values_dropout_p,
                           const OptionalTensor& values_seed, const OptionalTensor& values_offset,
                           double attention_dropout_p, const OptionalTensor& attention_seed,
                           const OptionalTensor& attention_offset, double out_dropout_p, const OptionalTensor& out_seed,
                           const OptionalTensor& out_offset) {
  constexpr const char* op = "fp8_layer_backward";
  const Saved saved = check_saved(op, tensors);
  check_histories(op, "histories", histories, "dout", dout);
  return layer_backward(
      op,
      {.dout = dout,
       .dresidual_2 = dresidual_2,
       .norm_1 =
           {residual_1, saved.mean_1, saved.rstd_1, norm_1_weight, {values_dropout_p, values_seed, values_offset}},
       .attention = {saved.qkv, saved.attended, saved.logsumexp, num_heads, scale, attention_dropout_p, attention_seed,
                     attention_offset},
       .norm_2 = {residual_2, saved.mean_2, saved.rstd_2, norm_2_weight, {out_dropout_p, out_seed, out_offset}},
       .adds_past = adds_past,
       .mask = mask},
      [&] {
        const auto [dnorm_2, dfc_weight, dfc_bias, dmlp_proj_weight, _] = fp8_mlp_backward_op(
            dout, saved.pre_gelu, saved.norm_2_t, saved.fc_weight_t, saved.hidden_t, saved.mlp_proj_weight_t,
            saved.norm_2_scale, saved.fc_weight_scale, saved.hidden_scale, saved.mlp_proj_weight_scale, histories[kFc],
            histories[kMlpProj], {true, mask[kFcWeight], mask[kFcBias], mask[kMlpProjWeight], false});
        return std::make_tuple(dnorm_2, dfc_weight, dfc_bias, dmlp_proj_weight);
      },
      [&](const Tensor& dadded) {
        const auto [dattended, dattn_proj_weight, _] = fp8_linear_backward_op(
            dadded, saved.attended_t, saved.attn_proj_weight_t, saved.attended_scale, saved.attn_proj_weight_scale,
            histories[kAttnProj], {true, mask[kAttnProjWeight], false});
        return std::make_tuple(dattended, dattn_proj_weight);
      },
      [&](const Tensor& dqkv, bool dnorm_wanted) {
        return fp8_linear_backward_op(dqkv, saved.norm_1_t, saved.qkv_weight_t, saved.norm_1_scale,
                                      saved.qkv_weight_scale, histories[kQkv],
                                      {dnorm_wanted, mask[kQkvWeight], mask[kQkvBias]});
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("fp8_layer", TORCH_BOX(&fp8_layer_op));
  m.impl("fp8_layer_backward", TORCH_BOX(&fp8_layer_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
