// Instantiates layernorm of dropout(x + x_bias) + residual. A separate file, so that it compiles in parallel with
// layernorm.cu.
#include "launch.cuh"

namespace gptkernels::cuda {

template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, const DropoutArguments& dropout, Stream stream) {
  return run_layernorm_forward(p, DenseDropout<accumulate_t<T>>(dropout), stream);
}

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, const LayernormDropoutBackward<T>& dropout, Stream stream) {
  return run_layernorm_backward<T>(p, DroppedGradient<T>(dropout), dropout.dresidual, stream);
}

#define GPTKERNELS_INSTANTIATE(T)                                                                    \
  template Status layernorm_forward<T>(const LayernormForward<T>&, const DropoutArguments&, Stream); \
  template Status layernorm_backward<T>(const LayernormBackward<T>&, const LayernormDropoutBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
