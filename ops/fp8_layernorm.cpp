#include "fp8_layernorm.h"

#ifdef GPTKERNELS_CUDA
#include "../csrc/cuda/fp8/layernorm.h"
#endif

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

constexpr ScalarType kFormat = ScalarType::Float8_e4m3fn;

#ifdef GPTKERNELS_CUDA

std::optional<Fp8Layernorm> run_fused(const Launcher& launcher, const LayernormInputs& inputs,
                                      const OptionalTensor& history, bool transposed) {
  if (is_mixed(inputs.x, inputs.stream())) return std::nullopt;
  const LayernormOutputs normed = allocate_layernorm(inputs, false);
  const Quantized out = allocate_quantized(inputs.x, kFormat, transposed);
  bool supported = false;
  dispatch_fp8(inputs.x, [&]<typename T>() {
    const LayernormForward<T> norm = layernorm_arguments<T, T>(inputs, normed);
    Fp8Quantize<T> quantization = quantize_arguments<T>(out, inputs.x, history);
    supported = fp8_layernorm_supports(norm, quantization);
    if (!supported) return;
    const Tensor scratch = workspace(fp8_layernorm_workspace(), inputs.x);
    quantization.workspace = pointer<void>(scratch);
    launcher.check(fp8_layernorm(norm, quantization, launcher.stream()));
  });
  if (!supported) return std::nullopt;
  return Fp8Layernorm{out, normed.sum, normed.mean, normed.rstd};
}

#endif

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fp8_layernorm_op(
    const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& history, bool transposed, double eps, const OptionalTensor& x_bias, double dropout_p,
    const OptionalTensor& seed, const OptionalTensor& offset, int64_t first_index) {
  constexpr const char* op = "fp8_layernorm";
  if (!residual && (x_bias || dropout_p != 0))
    fail(op, "x_bias and dropout_p are of an addition to residual, which is not given");
  const Fp8Layernorm found = run_fp8_layernorm(op, x, residual, weight, bias, eps, x_bias,
                                               {dropout_p, seed, offset, first_index}, history, transposed);
  return {found.out.values, found.out.transposed, found.out.scale, found.sum ? *found.sum : absent(x), found.mean,
          found.rstd};
}

}  // namespace

Fp8Layernorm run_fp8_layernorm(const char* op, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                               const OptionalTensor& x_bias, const LayernormDropout& dropout,
                               const OptionalTensor& history, bool transposed) {
  const LayernormInputs inputs = check_layernorm(op, x, residual, weight, bias, eps, x_bias, dropout);
  check_quantizable(op, "x", x);
  check_history(op, "history", history, "x", x);
  const Launcher launcher(op, x);
#ifdef GPTKERNELS_CUDA
  if (dropout.p == 0)
    if (const auto found = run_fused(launcher, inputs, history, transposed)) return *found;
#endif
  const LayernormOutputs normed = run_layernorm(launcher, inputs, dropout);
  return {quantize(launcher, normed.out, history, kFormat, {.transposed = transposed}), normed.sum, normed.mean,
          normed.rstd};
}

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("fp8_layernorm", TORCH_BOX(&fp8_layernorm_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
