#include "fp8_linear.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

constexpr ScalarType kForward = ScalarType::Float8_e4m3fn;
constexpr ScalarType kGradient = ScalarType::Float8_e5m2;  // a wider range, but fewer significand bits

Shape with_width(const Tensor& x, int64_t width) {
  Shape shape = shape_of(x);
  shape.back() = width;
  return shape;
}

void check_input(const char* op, const Tensor& x) {
  check_dim_at_least(op, "x", x, 1);
  check_quantizable(op, "x", x);
}

// `saved` has no elements if it is not needed.
void check_saved(const char* op, const char* name, const Tensor& saved, bool needed, const Shape& shape,
                 const Tensor& dout) {
  check_dtype(op, name, saved, kForward);
  check_same_device(op, name, saved, "dout", dout);
  if (needed) check_shape(op, name, saved, shape);
}

void check_saved_scale(const char* op, const char* name, const Tensor& scale, const Tensor& dout) {
  check_dtype(op, name, scale, ScalarType::Float);
  check_shape(op, name, scale, {});
  check_same_device(op, name, scale, "dout", dout);
}

Quantized quantize_weight(const Launcher& launcher, const Tensor& weight, bool transposed) {
  return quantize(launcher, dense(weight), std::nullopt, kForward, {.transposed = transposed});
}

// dx = dout @ weight
Tensor input_gradient(const Launcher& launcher, const Tensor& like, const Quantized& dout, const Fp8Operand& weight_t) {
  const Tensor dx = allocate(with_width(like, weight_t.values.rows), like);
  fp8_product(launcher, flat(dx), {dout.values, dout.scale}, weight_t, {.fast_accumulation = true});
  return dx;
}

// dweight = dout^T @ x
Tensor weight_gradient(const Launcher& launcher, const Tensor& like, const Quantized& dout, const Fp8Operand& x_t) {
  const Tensor dweight = allocate({dout.transposed.size(0), x_t.values.rows}, like);
  fp8_product(launcher, flat(dweight), {dout.transposed, dout.scale}, x_t, {});
  return dweight;
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward fp8_linear_op(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& history,
                      const OptionalTensor& dout_history, const std::vector<bool>& save) {
  constexpr const char* op = "fp8_linear";
  check_input(op, x);
  check_fp8_layer(op, "x", x, width_of(x), "weight", weight, "bias", bias);
  check_history(op, "history", history, "x", x);
  check_history(op, "dout_history", dout_history, "x", x);

  const Launcher launcher(op, x);
  const Quantized rows = quantize(launcher, dense(x), history, kForward, {.transposed = save[1]});
  const Fp8Product product = fp8_forward(launcher, rows, weight, bias, save[0]);
  return {product.out, rows.transposed, product.weight.transposed, rows.scale, product.weight.scale};
}

void fp8_linear_dweight_inplace_op(const Tensor& dout, const Tensor& x_t, const Tensor& dout_scale,
                                   const Tensor& x_scale, Tensor dweight, bool accumulate) {
  constexpr const char* op = "fp8_linear_dweight_";
  check_dim_at_least(op, "dout", dout, 1);
  check_dtype(op, "dout", dout, kGradient);
  check_features(op, "the last dimension of dout", width_of(dout));
  const int64_t padded = fp8_padded(rows_of(dout)), inner = x_t.dim() ? x_t.size(0) : 0;
  check_saved(op, "x_t", x_t, true, {inner, padded}, dout);
  check_features(op, "the first dimension of x_t", inner);
  check_saved_scale(op, "dout_scale", dout_scale, dout);
  check_saved_scale(op, "x_scale", x_scale, dout);
  check_same_device(op, "dweight", dweight, "dout", dout);
  check_quantizable(op, "dweight", dweight);
  if (accumulate) check_dtype(op, "dweight", dweight, ScalarType::Float);
  check_shape(op, "dweight", dweight, {width_of(dout), inner});
  if (!dweight.is_contiguous()) fail(op, "dweight must be contiguous");

  const Launcher launcher(op, dout);
  const Tensor dout_dense = dense(dout), x_t_dense = dense(x_t);
  check_fp8_aligned(op, "dout", dout_dense);
  check_fp8_aligned(op, "x_t", x_t_dense);
  const Tensor dout_t = allocate({width_of(dout), padded}, kGradient, dout);
  fp8_weight_gradient(launcher, flat(dweight), {dout_dense, dout_scale}, dout_t, {x_t_dense, x_scale},
                      {.accumulate = accumulate});
}

using MlpForward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

MlpForward fp8_mlp_op(const Tensor& x, const Tensor& fc_weight, const OptionalTensor& fc_bias,
                      const Tensor& proj_weight, const OptionalTensor& proj_bias, const OptionalTensor& history,
                      const OptionalTensor& hidden_history, const OptionalTensor& dhidden_history,
                      const OptionalTensor& dout_history, const std::vector<bool>& save) {
  constexpr const char* op = "fp8_mlp";
  check_input(op, x);
  check_fp8_layer(op, "x", x, width_of(x), "fc_weight", fc_weight, "fc_bias", fc_bias);
  check_fp8_layer(op, "x", x, fc_weight.size(0), "proj_weight", proj_weight, "proj_bias", proj_bias);
  check_history(op, "history", history, "x", x);
  check_history(op, "hidden_history", hidden_history, "x", x);
  check_history(op, "dhidden_history", dhidden_history, "x", x);
  check_history(op, "dout_history", dout_history, "x", x);

  const Launcher launcher(op, x);
  const Quantized rows = quantize(launcher, dense(x), history, kForward, {.transposed = save[1]});
  const Fp8Mlp mlp = fp8_mlp_forward(launcher, rows, fc_weight, fc_bias, proj_weight, proj_bias, hidden_history,
                                     {.fc_weight = save[0], .hidden = save[2], .proj_weight = save[3]});
  return {mlp.out,    mlp.pre_gelu, rows.transposed,  mlp.fc.transposed, mlp.hidden.transposed, mlp.proj.transposed,
          rows.scale, mlp.fc.scale, mlp.hidden.scale, mlp.proj.scale};
}

}  // namespace

void check_fp8_layer(const char* op, const char* x_name, const Tensor& x, int64_t inner, const char* name,
                     const Tensor& weight, const char* bias_name, const OptionalTensor& bias) {
  check_like(op, name, weight, x_name, x);
  if (weight.dim() != 2 || weight.size(1) != inner)
    fail(op, name, " must have shape (out_features, ", inner, "), got ", describe(shape_of(weight)));
  const std::string in_features = std::string("the in_features of ") + name;
  const std::string out_features = std::string("the out_features of ") + name;
  check_features(op, in_features.c_str(), inner);
  check_features(op, out_features.c_str(), weight.size(0));
  check_like(op, bias_name, bias, x_name, x);
  check_shape(op, bias_name, bias, {weight.size(0)});
}

Fp8Product fp8_forward(const Launcher& launcher, const Quantized& x, const Tensor& weight, const OptionalTensor& bias,
                       bool transposed) {
  const Quantized w = quantize_weight(launcher, weight, transposed);
  const Tensor out = allocate(with_width(x.values, weight.size(0)), weight);
  fp8_product(launcher, flat(out), {x.values, x.scale}, {w.values, w.scale},
              {.bias = dense(bias), .fast_accumulation = true});
  return {out, w};
}

Fp8Mlp fp8_mlp_forward(const Launcher& launcher, const Quantized& x, const Tensor& fc_weight,
                       const OptionalTensor& fc_bias, const Tensor& proj_weight, const OptionalTensor& proj_bias,
                       const OptionalTensor& hidden_history, const Fp8MlpTransposed& transposed) {
  const Quantized fc = quantize_weight(launcher, fc_weight, transposed.fc_weight);
  const Tensor pre_gelu = allocate(with_width(x.values, fc_weight.size(0)), fc_weight);
  const Quantized hidden = quantize_product(launcher, pre_gelu, {x.values, x.scale}, {fc.values, fc.scale},
                                            {.bias = dense(fc_bias), .fast_accumulation = true}, hidden_history,
                                            kForward, {.transposed = transposed.hidden, .gelu = true});
  const Fp8Product proj = fp8_forward(launcher, hidden, proj_weight, proj_bias, transposed.proj_weight);
  return {proj.out, pre_gelu, fc, hidden, proj.weight};
}

std::tuple<Tensor, Tensor, Tensor> fp8_linear_backward_op(const Tensor& dout, const Tensor& x_t, const Tensor& weight_t,
                                                          const Tensor& x_scale, const Tensor& weight_scale,
                                                          const OptionalTensor& history,
                                                          const std::vector<bool>& output_mask) {
  constexpr const char* op = "fp8_linear_backward";
  check_dim_at_least(op, "dout", dout, 1);
  check_quantizable(op, "dout", dout);
  const int64_t rows = rows_of(dout), width = width_of(dout);
  check_features(op, "the last dimension of dout", width);
  check_saved(op, "x_t", x_t, output_mask[1], {x_t.size(0), fp8_padded(rows)}, dout);
  check_saved(op, "weight_t", weight_t, output_mask[0], {weight_t.size(0), width}, dout);
  check_saved_scale(op, "x_scale", x_scale, dout);
  check_saved_scale(op, "weight_scale", weight_scale, dout);
  check_history(op, "history", history, "dout", dout);

  const Launcher launcher(op, dout);
  const Tensor dbias = allocate_if(output_mask[2], {width}, dout);
  QuantizeOptions options = {.transposed = output_mask[1]};
  if (output_mask[2]) options.column_sums = dbias;
  const Quantized gradient = quantize(launcher, dense(dout), history, kGradient, options);
  return {output_mask[0] ? input_gradient(launcher, dout, gradient, {dense(weight_t), weight_scale}) : absent(dout),
          output_mask[1] ? weight_gradient(launcher, dout, gradient, {dense(x_t), x_scale}) : absent(dout), dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fp8_mlp_backward_op(
    const Tensor& dout, const Tensor& pre_gelu, const Tensor& x_t, const Tensor& fc_weight_t, const Tensor& hidden_t,
    const Tensor& proj_weight_t, const Tensor& x_scale, const Tensor& fc_scale, const Tensor& hidden_scale,
    const Tensor& proj_scale, const OptionalTensor& dhidden_history, const OptionalTensor& dout_history,
    const std::vector<bool>& output_mask) {
  constexpr const char* op = "fp8_mlp_backward";
  const bool hidden_wanted = output_mask[0] || output_mask[1] || output_mask[2];
  check_dim_at_least(op, "dout", dout, 1);
  check_quantizable(op, "dout", dout);
  const int64_t rows = rows_of(dout), width = width_of(dout);
  check_features(op, "the last dimension of dout", width);
  check_like(op, "pre_gelu", pre_gelu, "dout", dout);
  check_dim_at_least(op, "pre_gelu", pre_gelu, 1);
  const int64_t hidden_width = width_of(pre_gelu);
  check_features(op, "the last dimension of pre_gelu", hidden_width);
  check_shape(op, "pre_gelu", pre_gelu, with_width(dout, hidden_width));
  check_saved(op, "x_t", x_t, output_mask[1], {x_t.size(0), fp8_padded(rows)}, dout);
  check_saved(op, "fc_weight_t", fc_weight_t, output_mask[0], {fc_weight_t.size(0), hidden_width}, dout);
  check_saved(op, "hidden_t", hidden_t, output_mask[3], {hidden_width, fp8_padded(rows)}, dout);
  check_saved(op, "proj_weight_t", proj_weight_t, hidden_wanted, {hidden_width, width}, dout);
  check_saved_scale(op, "x_scale", x_scale, dout);
  check_saved_scale(op, "fc_scale", fc_scale, dout);
  check_saved_scale(op, "hidden_scale", hidden_scale, dout);
  check_saved_scale(op, "proj_scale", proj_scale, dout);
  check_history(op, "dhidden_history", dhidden_history, "dout", dout);
  check_history(op, "dout_history", dout_history, "dout", dout);

  const Launcher launcher(op, dout);
  const Tensor dproj_bias = allocate_if(output_mask[4], {width}, dout);
  const Tensor dfc_bias = allocate_if(output_mask[2], {hidden_width}, dout);
  Tensor dx = absent(dout), dfc = absent(dout), dproj = absent(dout);
  QuantizeOptions options = {.transposed = output_mask[3]};
  if (output_mask[4]) options.column_sums = dproj_bias;
  const Quantized gradient = quantize(launcher, dense(dout), dout_history, kGradient, options);
  if (output_mask[3]) dproj = weight_gradient(launcher, dout, gradient, {dense(hidden_t), hidden_scale});
  if (hidden_wanted) {
    const Tensor dpost = allocate(with_width(dout, hidden_width), dout);
    QuantizeOptions hidden = {.transposed = output_mask[1], .dgelu_at = dense(pre_gelu)};
    if (output_mask[2]) hidden.column_sums = dfc_bias;
    const Quantized dpre =
        quantize_product(launcher, dpost, {gradient.values, gradient.scale}, {dense(proj_weight_t), proj_scale},
                         {.fast_accumulation = true}, dhidden_history, kGradient, hidden);
    if (output_mask[0]) dx = input_gradient(launcher, dout, dpre, {dense(fc_weight_t), fc_scale});
    if (output_mask[1]) dfc = weight_gradient(launcher, dout, dpre, {dense(x_t), x_scale});
  }
  return {dx, dfc, dfc_bias, dproj, dproj_bias};
}

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("fp8_linear", TORCH_BOX(&fp8_linear_op));
  m.impl("fp8_linear_backward", TORCH_BOX(&fp8_linear_backward_op));
  m.impl("fp8_linear_dweight_", TORCH_BOX(&fp8_linear_dweight_inplace_op));
  m.impl("fp8_mlp", TORCH_BOX(&fp8_mlp_op));
  m.impl("fp8_mlp_backward", TORCH_BOX(&fp8_mlp_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
