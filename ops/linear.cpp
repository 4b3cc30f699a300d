#include "calls.h"
#include "matmul.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

void check_operands(const char* op, const Tensor& x, const Tensor& weight) {
  check_dim_at_least(op, "x", x, 1);
  check_floating(op, "x", x);
  check_like(op, "weight", weight, "x", x);
  if (weight.dim() != 2 || weight.size(1) != width_of(x))
    fail(op, "weight must have shape (out_features, ", width_of(x), "), got ", describe(shape_of(weight)));
}

Shape out_shape(const Tensor& x, const Tensor& weight) {
  Shape shape = shape_of(x);
  shape.back() = weight.size(0);
  return shape;
}

}  // namespace

Tensor linear_op(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  constexpr const char* op = "linear";
  check_operands(op, x, weight);
  check_like(op, "bias", bias, "x", x);
  check_shape(op, "bias", bias, {weight.size(0)});

  const Launcher launcher(op, x);
  Tensor out = allocate(out_shape(x, weight), x);
  matmul(launcher, matrix(out), matrix(x), matrix(weight).transposed(), {.bias = dense(bias)});
  return out;
}

// If the mask has two entries, dbias is undefined.
std::tuple<Tensor, Tensor, Tensor> linear_backward_op(const Tensor& dout, const Tensor& x, const Tensor& weight,
                                                      const std::vector<bool>& output_mask) {
  constexpr const char* op = "linear_backward";
  check_operands(op, x, weight);
  check_like(op, "dout", dout, "x", x);
  check_shape(op, "dout", dout, out_shape(x, weight));

  const Launcher launcher(op, x);
  const bool bias_wanted = output_mask.size() > 2 && output_mask[2];
  Tensor dx = allocate_if(output_mask[0], shape_of(x), x);
  Tensor dweight = allocate_gradient_if(output_mask[1], weight);
  Tensor dbias = output_mask.size() > 2 ? allocate_if(bias_wanted, {weight.size(0)}, x) : Tensor();
  const Matrix dout_rows = matrix(dense(dout));
  if (output_mask[0]) matmul(launcher, matrix(dx), dout_rows, matrix(weight));
  if (output_mask[1]) matmul(launcher, matrix(dweight), dout_rows.transposed(), matrix(x));
  if (bias_wanted) column_sums(launcher, dbias, dout_rows);
  return {dx, dweight, dbias};
}

void linear_dweight_inplace_op(const Tensor& dout, const Tensor& x, Tensor dweight, bool accumulate) {
  constexpr const char* op = "linear_dweight_";
  check_dim_at_least(op, "x", x, 1);
  check_floating(op, "x", x);
  check_like(op, "dout", dout, "x", x);
  Shape dout_shape = shape_of(x);
  dout_shape.back() = dout.dim() ? width_of(dout) : 0;
  check_shape(op, "dout", dout, dout_shape);
  check_same_device(op, "dweight", dweight, "x", x);
  if (dweight.scalar_type() != x.scalar_type()) check_dtype(op, "dweight", dweight, accumulate_dtype(x));
  check_shape(op, "dweight", dweight, {width_of(dout), width_of(x)});
  if (!dweight.is_contiguous()) fail(op, "dweight must be contiguous");

  matmul(Launcher(op, x), matrix(dweight), matrix(dout).transposed(), matrix(x), {.accumulate = accumulate});
}

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("linear", TORCH_BOX(&linear_op));
  m.impl("linear_backward", TORCH_BOX(&linear_backward_op));
  m.impl("linear_dweight_", TORCH_BOX(&linear_dweight_inplace_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
