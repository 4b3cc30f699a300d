// A layer of GPT-2 in training with float8 products, as layer.cpp's without: what fp8_linear, fp8_mlp, attention and
// the norms compute, with the same bits. The norms' outputs are quantised where they are computed, and exist in float8
// alone. GELU is the tanh form.
#include "fp8_layernorm.h"
#include "fp8_linear.h"
#include "layer.h"
#include "parts.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

constexpr ScalarType kForward = ScalarType::Float8_e4m3fn;

// What the forward keeps for the backward besides the two sums: _t are transposed float8 operands.
enum Saved {
  kMean1,
  kRstd1,
  kNorm1T,
  kNorm1Scale,
  kQkvWeightT,
  kQkvWeightScale,
  kQkv,
  kAttended,
  kLogsumexp,
  kAttendedT,
  kAttendedScale,
  kOutWeightT,
  kOutWeightScale,
  kMean2,
  kRstd2,
  kNorm2T,
  kNorm2Scale,
  kFcWeightT,
  kFcWeightScale,
  kPreGelu,
  kHiddenT,
  kHiddenScale,
  kProjWeightT,
  kProjWeightScale,
  kSavedTensors
};

// Histories are those of c_attn, attention's c_proj, c_fc and the MLP's c_proj: of their inputs in the forward, of
// their outputs' gradients in the backward.
enum Layers { kOfQkv, kOfOut, kOfFc, kOfProj, kLayers };

void check_histories(const char* op, const char* name, const std::vector<Tensor>& histories, const char* like_name,
                     const Tensor& like) {
  if (histories.size() != kLayers) fail(op, name, " must be ", int64_t(kLayers), " tensors, got ", histories.size());
  for (const Tensor& history : histories) check_history(op, name, history, like_name, like);
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                           Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                           Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward fp8_layer_op(const Tensor& stream, const OptionalTensor& values, const OptionalTensor& values_bias,
                     const OptionalTensor& norm_1_weight, const OptionalTensor& norm_1_bias, const Tensor& qkv_weight,
                     const OptionalTensor& qkv_bias, const Tensor& out_weight, const OptionalTensor& out_bias,
                     const OptionalTensor& norm_2_weight, const OptionalTensor& norm_2_bias, const Tensor& fc_weight,
                     const OptionalTensor& fc_bias, const Tensor& proj_weight, const std::vector<Tensor>& histories,
                     const std::vector<Tensor>& dout_histories, int64_t num_heads, std::optional<double> scale,
                     double eps_1, double eps_2, double values_dropout_p, const OptionalTensor& values_seed,
                     const OptionalTensor& values_offset, double attention_dropout_p,
                     const OptionalTensor& attention_seed, const OptionalTensor& attention_offset, double out_dropout_p,
                     const OptionalTensor& out_seed, const OptionalTensor& out_offset) {
  constexpr const char* op = "fp8_layer";
  if (!values && (values_bias || values_dropout_p != 0))
    fail(op, "values_bias and values_dropout_p are of values, which are not given");
  const Tensor& x = values ? *values : stream;
  const char* x_name = values ? "values" : "stream";
  check_dim_at_least(op, x_name, x, 1);
  const int64_t width = width_of(x);
  check_fp8_layer(op, x_name, x, width, "qkv_weight", qkv_weight, "qkv_bias", qkv_bias);
  check_fp8_layer(op, x_name, x, width, "out_weight", out_weight, "out_bias", std::nullopt);
  check_fp8_layer(op, x_name, x, width, "fc_weight", fc_weight, "fc_bias", fc_bias);
  check_fp8_layer(op, x_name, x, fc_weight.size(0), "proj_weight", proj_weight, "proj_bias", std::nullopt);
  check_histories(op, "histories", histories, x_name, x);
  check_histories(op, "dout_histories", dout_histories, x_name, x);  // the backward's

  const Launcher launcher(op, x);
  const Tensor none;  // takes the place of what no later kernel reads, whose memory is then used again
  Fp8Layernorm first = values
                           ? run_fp8_layernorm(op, *values, stream, norm_1_weight, norm_1_bias, eps_1, values_bias,
                                               {values_dropout_p, values_seed, values_offset}, histories[kOfQkv], true)
                           : run_fp8_layernorm(op, stream, std::nullopt, norm_1_weight, norm_1_bias, eps_1,
                                               std::nullopt, {}, histories[kOfQkv], true);
  const Fp8Product qkv = fp8_forward(launcher, first.out, qkv_weight, qkv_bias, true);
  first.out.values = none;
  const auto [attended, logsumexp] =
      attention_op(qkv.out, num_heads, scale, attention_dropout_p, attention_seed, attention_offset);
  Quantized attended_8 = quantize(launcher, attended, histories[kOfOut], kForward, {.transposed = true});
  Fp8Product out = fp8_forward(launcher, attended_8, out_weight, std::nullopt, true);
  attended_8.values = none;
  const Fp8Layernorm second =
      run_fp8_layernorm(op, out.out, first.sum ? *first.sum : stream, norm_2_weight, norm_2_bias, eps_2, out_bias,
                        {out_dropout_p, out_seed, out_offset}, histories[kOfFc], true);
  out.out = none;
  const Fp8Mlp mlp =
      fp8_mlp_forward(launcher, second.out, fc_weight, fc_bias, proj_weight, std::nullopt, histories[kOfProj]);
  return {mlp.out,
          first.sum ? *first.sum : absent(stream),
          *second.sum,
          first.mean,
          first.rstd,
          first.out.transposed,
          first.out.scale,
          qkv.weight.transposed,
          qkv.weight.scale,
          qkv.out,
          attended,
          logsumexp,
          attended_8.transposed,
          attended_8.scale,
          out.weight.transposed,
          out.weight.scale,
          second.mean,
          second.rstd,
          second.out.transposed,
          second.out.scale,
          mlp.fc.transposed,
          mlp.fc.scale,
          mlp.pre_gelu,
          mlp.hidden.transposed,
          mlp.hidden.scale,
          mlp.proj.transposed,
          mlp.proj.scale};
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                            Tensor, Tensor, Tensor>;

Backward fp8_layer_backward_op(const Tensor& dout, const OptionalTensor& dsum, const Tensor& sum_1, const Tensor& sum_2,
                               const std::vector<Tensor>& saved, const OptionalTensor& norm_1_weight,
                               const OptionalTensor& norm_2_weight, const std::vector<Tensor>& histories,
                               int64_t num_heads, std::optional<double> scale, bool adds_past,
                               const std::vector<bool>& mask, double values_dropout_p,
                               const OptionalTensor& values_seed, const OptionalTensor& values_offset,
                               double attention_dropout_p, const OptionalTensor& attention_seed,
                               const OptionalTensor& attention_offset, double out_dropout_p,
                               const OptionalTensor& out_seed, const OptionalTensor& out_offset) {
  constexpr const char* op = "fp8_layer_backward";
  if (saved.size() != kSavedTensors)
    fail(op, "saved must be the ", int64_t(kSavedTensors), " tensors of the forward, got ", saved.size());
  check_histories(op, "histories", histories, "dout", dout);
  const LayernormDropout values_dropout = {values_dropout_p, values_seed, values_offset};
  const LayernormDropout out_dropout = {out_dropout_p, out_seed, out_offset};
  const bool inputs = mask[kStream] || mask[kValues] || mask[kValuesBias];
  const bool through_norm_1 = inputs || mask[kNorm1Weight] || mask[kNorm1Bias];

  Tensor dnorm, dfc_weight, dfc_bias, dproj_weight, none;
  std::tie(dnorm, dfc_weight, dfc_bias, dproj_weight, none) = fp8_mlp_backward_op(
      dout, saved[kPreGelu], saved[kNorm2T], saved[kFcWeightT], saved[kHiddenT], saved[kProjWeightT],
      saved[kNorm2Scale], saved[kFcWeightScale], saved[kHiddenScale], saved[kProjWeightScale], histories[kOfFc],
      histories[kOfProj], {true, mask[kFcWeight], mask[kFcBias], mask[kProjWeight], false});
  const LayernormGradients second =
      add_and_norm_backward(op, dnorm, dsum, sum_2, norm_2_weight, saved[kMean2], saved[kRstd2], true,
                            mask[kNorm2Weight], mask[kNorm2Bias], mask[kOutBias], true, out_dropout);
  const Tensor& dsum_1 = is_apart(dnorm, sum_2, out_dropout) ? second.dresidual : second.dx;
  Tensor dattended, dout_weight, dqkv, dqkv_weight, dqkv_bias;
  std::tie(dattended, dout_weight, none) =
      fp8_linear_backward_op(second.dx, saved[kAttendedT], saved[kOutWeightT], saved[kAttendedScale],
                             saved[kOutWeightScale], histories[kOfOut], {true, mask[kOutWeight], false});
  dqkv = attention_backward_op(dattended, saved[kQkv], saved[kAttended], saved[kLogsumexp], num_heads, scale,
                               attention_dropout_p, attention_seed, attention_offset);
  dattended = none;
  std::tie(dnorm, dqkv_weight, dqkv_bias) =
      fp8_linear_backward_op(dqkv, saved[kNorm1T], saved[kQkvWeightT], saved[kNorm1Scale], saved[kQkvWeightScale],
                             histories[kOfQkv], {through_norm_1, mask[kQkvWeight], mask[kQkvBias]});
  dqkv = none;
  LayernormGradients first = {absent(dout), absent(sum_1), absent(sum_1), absent(sum_1), absent(sum_1)};
  if (through_norm_1)
    first = add_and_norm_backward(op, dnorm, adds_past ? OptionalTensor(dsum_1) : std::nullopt, sum_1, norm_1_weight,
                                  saved[kMean1], saved[kRstd1], mask[kValues], mask[kNorm1Weight], mask[kNorm1Bias],
                                  mask[kValuesBias], mask[kStream], values_dropout);
  const bool apart = is_apart(dnorm, sum_1, values_dropout);
  return {apart ? first.dresidual : first.dx,
          !adds_past ? dsum_1
          : apart    ? first.dx
                     : absent(dout),
          first.dx_bias,
          first.dweight,
          first.dbias,
          dqkv_weight,
          dqkv_bias,
          dout_weight,
          second.dx_bias,
          second.dweight,
          second.dbias,
          dfc_weight,
          dfc_bias,
          dproj_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("fp8_layer", TORCH_BOX(&fp8_layer_op));
  m.impl("fp8_layer_backward", TORCH_BOX(&fp8_layer_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
