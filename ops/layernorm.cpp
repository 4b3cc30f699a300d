#include "layernorm.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

std::tuple<Tensor, Tensor, Tensor> layernorm_op(const Tensor& x, const OptionalTensor& weight,
                                                const OptionalTensor& bias, double eps) {
  const auto [out, sum, mean, rstd] = run_layernorm("layernorm", x, {}, weight, bias, eps);
  return {out, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layernorm_backward_op(const Tensor& dout, const Tensor& x,
                                                         const OptionalTensor& weight, const Tensor& mean,
                                                         const Tensor& rstd, const std::vector<bool>& output_mask) {
  const auto found = run_layernorm_backward("layernorm_backward", dout, {}, "x", x, weight, mean, rstd, output_mask);
  return {found.dx, found.dweight, found.dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("layernorm", TORCH_BOX(&layernorm_op));
  m.impl("layernorm_backward", TORCH_BOX(&layernorm_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
