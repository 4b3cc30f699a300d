#include "layernorm.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layernorm_op(const Tensor& x, const Tensor& residual,
                                                                 const OptionalTensor& weight,
                                                                 const OptionalTensor& bias, double eps,
                                                                 const OptionalTensor& x_bias, double dropout_p,
                                                                 const OptionalTensor& seed,
                                                                 const OptionalTensor& offset, int64_t first_index) {
  const auto [out, sum, mean, rstd] = run_layernorm("residual_layernorm", x, residual, weight, bias, eps, x_bias,
                                                    {dropout_p, seed, offset, first_index});
  return {out, *sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> residual_layernorm_backward_op(const Tensor& dout, const OptionalTensor& dsum,
                                                                  const Tensor& sum, const OptionalTensor& weight,
                                                                  const Tensor& mean, const Tensor& rstd,
                                                                  const std::vector<bool>& output_mask) {
  const auto found =
      run_layernorm_backward("residual_layernorm_backward", dout, dsum, "sum", sum, weight, mean, rstd, output_mask);
  return {found.dx, found.dweight, found.dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layernorm_bias_backward_op(
    const Tensor& dout, const OptionalTensor& dsum, const Tensor& sum, const OptionalTensor& weight, const Tensor& mean,
    const Tensor& rstd, const std::vector<bool>& output_mask) {
  const auto found = run_layernorm_backward("residual_layernorm_bias_backward", dout, dsum, "sum", sum, weight, mean,
                                            rstd, output_mask);
  return {found.dx, found.dweight, found.dbias, found.dx_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> residual_layernorm_dropout_backward_op(
    const Tensor& dout, const OptionalTensor& dsum, const Tensor& sum, const OptionalTensor& weight, const Tensor& mean,
    const Tensor& rstd, double dropout_p, const OptionalTensor& seed, const OptionalTensor& offset,
    const std::vector<bool>& output_mask, int64_t first_index) {
  const auto found = run_layernorm_backward("residual_layernorm_dropout_backward", dout, dsum, "sum", sum, weight, mean,
                                            rstd, output_mask, {dropout_p, seed, offset, first_index});
  return {found.dx, found.dweight, found.dbias, found.dx_bias, found.dresidual};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("residual_layernorm", TORCH_BOX(&residual_layernorm_op));
  m.impl("residual_layernorm_backward", TORCH_BOX(&residual_layernorm_backward_op));
  m.impl("residual_layernorm_bias_backward", TORCH_BOX(&residual_layernorm_bias_backward_op));
  m.impl("residual_layernorm_dropout_backward", TORCH_BOX(&residual_layernorm_dropout_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
