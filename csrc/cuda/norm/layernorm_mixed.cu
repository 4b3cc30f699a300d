// Instantiates layernorm of dropout(x + x_bias) + residual with x, out and their gradients in 16 bits and all other
// arrays in float32. A separate file, so that it compiles in parallel with layernorm.cu.
#include "launch.cuh"

namespace gptkernels::cuda {

template <typename X>
Status layernorm_forward_mixed(const LayernormForward<float, X>& p, const DropoutArguments& dropout, Stream stream) {
  if (dropout.probability > 0) return run_layernorm_forward(p, DenseDropout<float>(dropout), stream);
  return run_layernorm_forward(p, NoDropout(), stream);
}

template <typename X>
Status layernorm_backward_mixed(const LayernormBackward<float, X>& p, const LayernormDropoutBackward<float>& dropout,
                                Stream stream) {
  if (dropout.arguments.probability > 0)
    return run_layernorm_backward(p, DroppedGradient<float>(dropout), dropout.dresidual, stream);
  return run_layernorm_backward(p, RoundedGradient<float>{dropout.dresidual}, dropout.dresidual, stream);
}

#define GPTKERNELS_INSTANTIATE_MIXED(X)                                                                           \
  template Status layernorm_forward_mixed<X>(const LayernormForward<float, X>&, const DropoutArguments&, Stream); \
  template Status layernorm_backward_mixed<X>(const LayernormBackward<float, X>&,                                 \
                                              const LayernormDropoutBackward<float>&, Stream);
GPTKERNELS_INSTANTIATE_MIXED(bfloat16)
GPTKERNELS_INSTANTIATE_MIXED(float16)

}  // namespace gptkernels::cuda
