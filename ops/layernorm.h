#pragma once

#include "../csrc/layernorm.h"
#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {

struct LayernormOutputs {
  Tensor out;
  OptionalTensor sum;  // only with a residual
  Tensor mean;
  Tensor rstd;
};

struct LayernormDropout {
  double p = 0;
  OptionalTensor seed = {};
  OptionalTensor offset = {};
  int64_t first_index = 0;  // of x in the whole tensor

  void check(const char* op, const char* like_name, const Tensor& like) const {
    check_dropout(op, "dropout_p", p, seed, offset, like_name, like);
    check_first_index(op, first_index);
  }
  DropoutArguments arguments() const { return {p, pointer<int64_t>(seed), pointer<int64_t>(offset), first_index}; }
};

// True if x has 16 bits and the residual stream (the residual, the sum and the parameters) is float32.
inline bool is_mixed(const Tensor& x, const Tensor& stream) {
  const auto narrow = x.scalar_type();
  return stream.scalar_type() == ScalarType::Float && (narrow == ScalarType::BFloat16 || narrow == ScalarType::Half);
}

template <typename Fn>
void dispatch_layernorm(const Tensor& stream, const Tensor& x, const Fn& fn) {
  if (!is_mixed(x, stream)) return dispatch_floating(stream, [&]<typename T>() { fn.template operator()<T, T>(); });
  if (x.scalar_type() == ScalarType::BFloat16) return fn.template operator()<float, bfloat16>();
  fn.template operator()<float, float16>();
}

// All tensors are dense.
struct LayernormInputs {
  Tensor x;
  OptionalTensor residual;
  OptionalTensor weight;
  OptionalTensor bias;
  OptionalTensor x_bias;
  double eps;

  const Tensor& stream() const { return residual ? *residual : x; }
};

inline LayernormInputs check_layernorm(const char* op, const Tensor& x, const OptionalTensor& residual,
                                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                       const OptionalTensor& x_bias, const LayernormDropout& dropout) {
  check_dim_at_least(op, "x", x, 1);
  check_floating(op, "x", x);
  const bool mixed = residual && is_mixed(x, *residual);
  const Tensor& stream = mixed ? *residual : x;
  const char* stream_name = mixed ? "residual" : "x";
  if (mixed)
    check_same_device(op, "residual", *residual, "x", x);
  else
    check_like(op, "residual", residual, "x", x);
  check_like(op, "weight", weight, stream_name, stream);
  check_like(op, "bias", bias, stream_name, stream);
  check_like(op, "x_bias", x_bias, stream_name, stream);
  check_shape(op, "residual", residual, shape_of(x));
  check_shape(op, "weight", weight, {width_of(x)});
  check_shape(op, "bias", bias, {width_of(x)});
  check_shape(op, "x_bias", x_bias, {width_of(x)});
  dropout.check(op, "x", x);
  return {dense(x), dense(residual), dense(weight), dense(bias), dense(x_bias), eps};
}

inline LayernormOutputs allocate_layernorm(const LayernormInputs& inputs, bool out_wanted) {
  const Tensor& x = inputs.x;
  return {.out = allocate_if(out_wanted, shape_of(x), x),
          .sum = inputs.residual ? OptionalTensor(allocate(shape_of(x), inputs.stream())) : std::nullopt,
          .mean = allocate(leading_shape(x), accumulate_dtype(x), x),
          .rstd = allocate(leading_shape(x), accumulate_dtype(x), x)};
}

template <typename T, typename X>
LayernormForward<T, X> layernorm_arguments(const LayernormInputs& inputs, const LayernormOutputs& outputs) {
  return {.out = pointer<X>(outputs.out),
          .mean = pointer<accumulate_t<T>>(outputs.mean),
          .rstd = pointer<accumulate_t<T>>(outputs.rstd),
          .sum = pointer<T>(outputs.sum),
          .x = pointer<X>(inputs.x),
          .residual = pointer<T>(inputs.residual),
          .x_bias = pointer<T>(inputs.x_bias),
          .weight = pointer<T>(inputs.weight),
          .bias = pointer<T>(inputs.bias),
          .rows = rows_of(inputs.x),
          .width = width_of(inputs.x),
          .eps = inputs.eps};
}

inline LayernormOutputs run_layernorm(const Launcher& launcher, const LayernormInputs& inputs,
                                      const LayernormDropout& dropout) {
  const LayernormOutputs outputs = allocate_layernorm(inputs, true);
  dispatch_layernorm(inputs.stream(), inputs.x, [&]<typename T, typename X>() {
    const LayernormForward<T, X> p = layernorm_arguments<T, X>(inputs, outputs);
    launcher.check(layernorm_forward(p, dropout.arguments(), launcher.stream()));
  });
  return outputs;
}

inline LayernormOutputs run_layernorm(const char* op, const Tensor& x, const OptionalTensor& residual,
                                      const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                      const OptionalTensor& x_bias = std::nullopt,
                                      const LayernormDropout& dropout = {}) {
  const LayernormInputs inputs = check_layernorm(op, x, residual, weight, bias, eps, x_bias, dropout);
  return run_layernorm(Launcher(op, x), inputs, dropout);
}

struct LayernormGradients {
  Tensor dx;
  Tensor dweight;
  Tensor dbias;
  Tensor dx_bias;
  Tensor dresidual;
};

// x is the input of the norm (the sum, if there is a residual), and `name` its name in error messages. dsum is the
// gradient that reaches the sum by other paths than the norm, and is added to dx. The mask has entries for dx, dweight,
// dbias and optionally dx_bias and dresidual. Without an entry, dx_bias and dresidual are undefined tensors. With five
// entries, dx is dresidual with the dropout applied, in dout's dtype, which may be narrower.
inline LayernormGradients run_layernorm_backward(const char* op, const Tensor& dout, const OptionalTensor& dsum,
                                                 const char* name, const Tensor& x, const OptionalTensor& weight,
                                                 const Tensor& mean, const Tensor& rstd,
                                                 const std::vector<bool>& output_mask,
                                                 const LayernormDropout& dropout = {}) {
  check_dim_at_least(op, name, x, 1);
  check_floating(op, name, x);
  const bool with_residual = output_mask.size() > 4;
  const bool mixed = with_residual && is_mixed(dout, x);
  if (mixed)
    check_same_device(op, "dout", dout, name, x);
  else
    check_like(op, "dout", dout, name, x);
  check_like(op, "dsum", dsum, name, x);
  check_like(op, "weight", weight, name, x);
  check_same_device(op, "mean", mean, name, x);
  check_same_device(op, "rstd", rstd, name, x);
  check_dtype(op, "mean", mean, accumulate_dtype(x));
  check_dtype(op, "rstd", rstd, accumulate_dtype(x));
  check_shape(op, "dout", dout, shape_of(x));
  check_shape(op, "dsum", dsum, shape_of(x));
  check_shape(op, "weight", weight, {width_of(x)});
  check_shape(op, "mean", mean, leading_shape(x));
  check_shape(op, "rstd", rstd, leading_shape(x));
  dropout.check(op, name, x);
  if (with_residual && !mixed && !(dropout.seed && dropout.offset))
    fail(op, "seed and offset must be given where dout has the dtype of ", name);

  const Launcher launcher(op, x);
  const bool x_bias_wanted = output_mask.size() > 3 && output_mask[3];
  const bool sums_wanted = output_mask[1] || output_mask[2] || x_bias_wanted;
  const Tensor dout_dense = dense(dout);
  const OptionalTensor dsum_dense = dense(dsum);
  const Tensor x_dense = dense(x);
  const OptionalTensor weight_dense = dense(weight);
  const Tensor mean_dense = dense(mean);
  const Tensor rstd_dense = dense(rstd);
  const bool dx_made = output_mask[0] || x_bias_wanted || (with_residual && output_mask[4]);
  Tensor dx = allocate_if(dx_made, shape_of(x), dout);
  Tensor dresidual = with_residual ? allocate_if(dx_made, shape_of(x), x) : Tensor();
  Tensor dweight = allocate_if(output_mask[1], {width_of(x)}, x);
  Tensor dbias = allocate_if(output_mask[2], {width_of(x)}, x);
  Tensor dx_bias = output_mask.size() > 3 ? allocate_if(x_bias_wanted, {width_of(x)}, x) : Tensor();
  dispatch_layernorm(x, dout, [&]<typename T, typename X>() {
    const int64_t scratch = sums_wanted ? layernorm_backward_workspace<T>(rows_of(x), width_of(x)) : 0;
    const OptionalTensor partials = workspace_if(scratch, x);
    const LayernormBackward<T, X> p{.dx = pointer<X>(dx),
                                    .dweight = pointer<T>(dweight),
                                    .dbias = pointer<T>(dbias),
                                    .dx_bias = pointer<T>(dx_bias),
                                    .dresidual = pointer<T>(dresidual),
                                    .dout = pointer<X>(dout_dense),
                                    .dsum = pointer<T>(dsum_dense),
                                    .x = pointer<T>(x_dense),
                                    .weight = pointer<T>(weight_dense),
                                    .mean = pointer<accumulate_t<T>>(mean_dense),
                                    .rstd = pointer<accumulate_t<T>>(rstd_dense),
                                    .workspace = pointer<void>(partials),
                                    .rows = rows_of(x),
                                    .width = width_of(x)};
    launcher.check(layernorm_backward(p, dropout.arguments(), launcher.stream()));
  });
  if (!output_mask[0]) dx = absent(dout);
  if (with_residual && !output_mask[4]) dresidual = absent(x);
  return {dx, dweight, dbias, dx_bias, dresidual};
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
