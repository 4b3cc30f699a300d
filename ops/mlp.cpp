#include "calls.h"
#include "matmul.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

int64_t hidden_of(const Tensor& fc_weight) {
  return fc_weight.size(0);
}

Shape hidden_shape(const Tensor& x, const Tensor& fc_weight) {
  Shape shape = shape_of(x);
  shape.back() = hidden_of(fc_weight);
  return shape;
}

void check_operands(const char* op, const Tensor& x, const Tensor& fc_weight, const Tensor& proj_weight) {
  check_dim_at_least(op, "x", x, 1);
  check_floating(op, "x", x);
  check_like(op, "fc_weight", fc_weight, "x", x);
  check_like(op, "proj_weight", proj_weight, "x", x);
  if (fc_weight.dim() != 2 || fc_weight.size(1) != width_of(x))
    fail(op, "fc_weight must have shape (hidden_features, ", width_of(x), "), got ", describe(shape_of(fc_weight)));
  if (proj_weight.dim() != 2 || proj_weight.size(1) != hidden_of(fc_weight))
    fail(op, "proj_weight must have shape (out_features, ", hidden_of(fc_weight), "), got ",
         describe(shape_of(proj_weight)));
}

Shape out_shape(const Tensor& x, const Tensor& proj_weight) {
  Shape shape = shape_of(x);
  shape.back() = proj_weight.size(0);
  return shape;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> mlp_op(const Tensor& x, const Tensor& fc_weight, const OptionalTensor& fc_bias,
                                          const Tensor& proj_weight, const OptionalTensor& proj_bias,
                                          bool keep_post_gelu) {
  constexpr const char* op = "mlp";
  check_operands(op, x, fc_weight, proj_weight);
  check_like(op, "fc_bias", fc_bias, "x", x);
  check_like(op, "proj_bias", proj_bias, "x", x);
  check_shape(op, "fc_bias", fc_bias, {hidden_of(fc_weight)});
  check_shape(op, "proj_bias", proj_bias, {proj_weight.size(0)});

  const Launcher launcher(op, x);
  Tensor out = allocate(out_shape(x, proj_weight), x);
  Tensor pre_gelu = allocate(hidden_shape(x, fc_weight), x);
  Tensor post_gelu = allocate(hidden_shape(x, fc_weight), x);
  matmul(launcher, matrix(post_gelu), matrix(x), matrix(fc_weight).transposed(),
         {.bias = dense(fc_bias), .pre_gelu = pre_gelu});
  matmul(launcher, matrix(out), matrix(post_gelu), matrix(proj_weight).transposed(), {.bias = dense(proj_bias)});
  return {out, pre_gelu, keep_post_gelu ? post_gelu : absent(x)};
}

// Let u = pre_gelu. Then du = (dout @ proj_weight) * GELU'(u), dx = du @ fc_weight, dfc_weight = du^T @ x and
// dproj_weight = dout^T @ GELU(u). With a mask of four entries dproj_bias is undefined.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_backward_op(const Tensor& dout, const Tensor& x,
                                                                   const Tensor& fc_weight, const Tensor& proj_weight,
                                                                   const Tensor& pre_gelu, const Tensor& post_gelu,
                                                                   const std::vector<bool>& output_mask) {
  constexpr const char* op = "mlp_backward";
  check_operands(op, x, fc_weight, proj_weight);
  check_like(op, "dout", dout, "x", x);
  check_like(op, "pre_gelu", pre_gelu, "x", x);
  check_like(op, "post_gelu", post_gelu, "x", x);
  check_shape(op, "dout", dout, out_shape(x, proj_weight));
  check_shape(op, "pre_gelu", pre_gelu, hidden_shape(x, fc_weight));
  if (!is_absent(post_gelu)) check_shape(op, "post_gelu", post_gelu, hidden_shape(x, fc_weight));

  const Launcher launcher(op, x);
  Tensor dx = allocate_if(output_mask[0], shape_of(x), x);
  Tensor dfc_weight = allocate_gradient_if(output_mask[1], fc_weight);
  Tensor dfc_bias = allocate_if(output_mask[2], {hidden_of(fc_weight)}, x);
  Tensor dproj_weight = allocate_gradient_if(output_mask[3], proj_weight);
  const bool proj_bias_wanted = output_mask.size() > 4 && output_mask[4];
  Tensor dproj_bias = output_mask.size() > 4 ? allocate_if(proj_bias_wanted, {proj_weight.size(0)}, x) : Tensor();
  const Matrix dout_rows = matrix(dense(dout));
  if (output_mask[3])
    matmul(launcher, matrix(dproj_weight), dout_rows.transposed(),
           matrix(saved_or_recomputed(post_gelu, pre_gelu, "tanh")));
  if (proj_bias_wanted) column_sums(launcher, dproj_bias, dout_rows);
  if (output_mask[0] || output_mask[1] || output_mask[2]) {
    const Matrix weight = matrix(proj_weight), du = allocate_intermediate(dout_rows, weight);
    Epilogue epilogue = {.dgelu_at = dense(pre_gelu)};
    if (output_mask[2]) epilogue.column_sums = dfc_bias;
    matmul(launcher, du, dout_rows, weight, epilogue);
    if (output_mask[0]) matmul(launcher, matrix(dx), du, matrix(fc_weight));
    if (output_mask[1]) matmul(launcher, matrix(dfc_weight), du.transposed(), matrix(x));
  }
  return {dx, dfc_weight, dfc_bias, dproj_weight, dproj_bias};
}

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("mlp", TORCH_BOX(&mlp_op));
  m.impl("mlp_backward", TORCH_BOX(&mlp_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
