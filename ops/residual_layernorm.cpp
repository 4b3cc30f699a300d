// The layernorm kernels with a residual: see csrc/layernorm.h.
#include "../csrc/layernorm.h"
#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layernorm_op(const Tensor& x, const Tensor& residual,
                                                                 const OptionalTensor& weight,
                                                                 const OptionalTensor& bias, double eps) {
  constexpr const char* op = "residual_layernorm";
  check_dim_at_least(op, "x", x, 1);
  check_floating(op, "x", x);
  check_like(op, "residual", residual, "x", x);
  check_like(op, "weight", weight, "x", x);
  check_like(op, "bias", bias, "x", x);
  check_shape(op, "residual", residual, shape_of(x));
  check_shape(op, "weight", weight, {width_of(x)});
  check_shape(op, "bias", bias, {width_of(x)});

  const Launcher launcher(op, x);
  const Tensor x_dense = dense(x);
  const Tensor residual_dense = dense(residual);
  const OptionalTensor weight_dense = dense(weight);
  const OptionalTensor bias_dense = dense(bias);
  Tensor out = allocate(shape_of(x), x);
  Tensor sum = allocate(shape_of(x), x);
  Tensor mean = allocate(leading_shape(x), accumulate_dtype(x), x);
  Tensor rstd = allocate(leading_shape(x), accumulate_dtype(x), x);
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(layernorm_forward<T>({.out = pointer<T>(out),
                                         .mean = pointer<accumulate_t<T>>(mean),
                                         .rstd = pointer<accumulate_t<T>>(rstd),
                                         .sum = pointer<T>(sum),
                                         .x = pointer<T>(x_dense),
                                         .residual = pointer<T>(residual_dense),
                                         .weight = pointer<T>(weight_dense),
                                         .bias = pointer<T>(bias_dense),
                                         .rows = rows_of(x),
                                         .width = width_of(x),
                                         .eps = eps},
                                        launcher.stream()));
  });
  return {out, sum, mean, rstd};
}

// dx is the gradient of x and of residual alike.
std::tuple<Tensor, Tensor, Tensor> residual_layernorm_backward_op(const Tensor& dout, const OptionalTensor& dsum,
                                                                  const Tensor& sum, const OptionalTensor& weight,
                                                                  const Tensor& mean, const Tensor& rstd,
                                                                  const std::vector<bool>& output_mask) {
  constexpr const char* op = "residual_layernorm_backward";
  check_dim_at_least(op, "sum", sum, 1);
  check_floating(op, "sum", sum);
  check_like(op, "dout", dout, "sum", sum);
  check_like(op, "dsum", dsum, "sum", sum);
  check_like(op, "weight", weight, "sum", sum);
  check_same_device(op, "mean", mean, "sum", sum);
  check_same_device(op, "rstd", rstd, "sum", sum);
  check_dtype(op, "mean", mean, accumulate_dtype(sum));
  check_dtype(op, "rstd", rstd, accumulate_dtype(sum));
  check_shape(op, "dout", dout, shape_of(sum));
  check_shape(op, "dsum", dsum, shape_of(sum));
  check_shape(op, "weight", weight, {width_of(sum)});
  check_shape(op, "mean", mean, leading_shape(sum));
  check_shape(op, "rstd", rstd, leading_shape(sum));

  const Launcher launcher(op, sum);
  const bool sums_wanted = output_mask[1] || output_mask[2];
  const Tensor dout_dense = dense(dout);
  const OptionalTensor dsum_dense = dense(dsum);
  const Tensor sum_dense = dense(sum);
  const OptionalTensor weight_dense = dense(weight);
  const Tensor mean_dense = dense(mean);
  const Tensor rstd_dense = dense(rstd);
  Tensor dx = allocate_if(output_mask[0], shape_of(sum), sum);
  Tensor dweight = allocate_if(output_mask[1], {width_of(sum)}, sum);
  Tensor dbias = allocate_if(output_mask[2], {width_of(sum)}, sum);
  dispatch_floating(sum, [&]<typename T>() {
    const int64_t scratch = sums_wanted ? layernorm_backward_workspace<T>(rows_of(sum), width_of(sum)) : 0;
    const Tensor partials = workspace(scratch, sum);
    launcher.check(layernorm_backward<T>({.dx = pointer<T>(dx),
                                          .dweight = pointer<T>(dweight),
                                          .dbias = pointer<T>(dbias),
                                          .dout = pointer<T>(dout_dense),
                                          .dresidual = pointer<T>(dsum_dense),
                                          .x = pointer<T>(sum_dense),
                                          .weight = pointer<T>(weight_dense),
                                          .mean = pointer<accumulate_t<T>>(mean_dense),
                                          .rstd = pointer<accumulate_t<T>>(rstd_dense),
                                          .workspace = pointer<void>(partials),
                                          .rows = rows_of(sum),
                                          .width = width_of(sum)},
                                         launcher.stream()));
  });
  return {dx, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("residual_layernorm", TORCH_BOX(&residual_layernorm_op));
  m.impl("residual_layernorm_backward", TORCH_BOX(&residual_layernorm_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
