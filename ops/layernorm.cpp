#include "../csrc/layernorm.h"

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

std::tuple<Tensor, Tensor, Tensor> layernorm_op(const Tensor& x, const OptionalTensor& weight,
                                                const OptionalTensor& bias, double eps) {
  constexpr const char* op = "layernorm";
  check_dim_at_least(op, "x", x, 1);
  check_floating(op, "x", x);
  check_like(op, "weight", weight, "x", x);
  check_like(op, "bias", bias, "x", x);
  check_shape(op, "weight", weight, {width_of(x)});
  check_shape(op, "bias", bias, {width_of(x)});

  const Launcher launcher(op, x);
  const Tensor x_dense = dense(x);
  const OptionalTensor weight_dense = dense(weight);
  const OptionalTensor bias_dense = dense(bias);
  Tensor out = allocate(shape_of(x), x);
  Tensor mean = allocate(leading_shape(x), accumulate_dtype(x), x);
  Tensor rstd = allocate(leading_shape(x), accumulate_dtype(x), x);
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(layernorm_forward<T>({.out = pointer<T>(out),
                                         .mean = pointer<accumulate_t<T>>(mean),
                                         .rstd = pointer<accumulate_t<T>>(rstd),
                                         .sum = nullptr,
                                         .x = pointer<T>(x_dense),
                                         .residual = nullptr,
                                         .weight = pointer<T>(weight_dense),
                                         .bias = pointer<T>(bias_dense),
                                         .rows = rows_of(x),
                                         .width = width_of(x),
                                         .eps = eps},
                                        launcher.stream()));
  });
  return {out, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layernorm_backward_op(const Tensor& dout, const Tensor& x,
                                                         const OptionalTensor& weight, const Tensor& mean,
                                                         const Tensor& rstd, const std::vector<bool>& output_mask) {
  constexpr const char* op = "layernorm_backward";
  check_dim_at_least(op, "x", x, 1);
  check_floating(op, "x", x);
  check_like(op, "dout", dout, "x", x);
  check_like(op, "weight", weight, "x", x);
  check_same_device(op, "mean", mean, "x", x);
  check_same_device(op, "rstd", rstd, "x", x);
  check_dtype(op, "mean", mean, accumulate_dtype(x));
  check_dtype(op, "rstd", rstd, accumulate_dtype(x));
  check_shape(op, "dout", dout, shape_of(x));
  check_shape(op, "weight", weight, {width_of(x)});
  check_shape(op, "mean", mean, leading_shape(x));
  check_shape(op, "rstd", rstd, leading_shape(x));

  const Launcher launcher(op, x);
  const bool sums_wanted = output_mask[1] || output_mask[2];
  const Tensor dout_dense = dense(dout);
  const Tensor x_dense = dense(x);
  const OptionalTensor weight_dense = dense(weight);
  const Tensor mean_dense = dense(mean);
  const Tensor rstd_dense = dense(rstd);
  Tensor dx = allocate_if(output_mask[0], shape_of(x), x);
  Tensor dweight = allocate_if(output_mask[1], {width_of(x)}, x);
  Tensor dbias = allocate_if(output_mask[2], {width_of(x)}, x);
  dispatch_floating(x, [&]<typename T>() {
    const int64_t scratch = sums_wanted ? layernorm_backward_workspace<T>(rows_of(x), width_of(x)) : 0;
    const Tensor partials = workspace(scratch, x);
    launcher.check(layernorm_backward<T>({.dx = pointer<T>(dx),
                                          .dweight = pointer<T>(dweight),
                                          .dbias = pointer<T>(dbias),
                                          .dout = pointer<T>(dout_dense),
                                          .dresidual = nullptr,
                                          .x = pointer<T>(x_dense),
                                          .weight = pointer<T>(weight_dense),
                                          .mean = pointer<accumulate_t<T>>(mean_dense),
                                          .rstd = pointer<accumulate_t<T>>(rstd_dense),
                                          .workspace = pointer<void>(partials),
                                          .rows = rows_of(x),
                                          .width = width_of(x)},
                                         launcher.stream()));
  });
  return {dx, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("layernorm", TORCH_BOX(&layernorm_op));
  m.impl("layernorm_backward", TORCH_BOX(&layernorm_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
