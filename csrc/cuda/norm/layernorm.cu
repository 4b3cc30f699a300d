// Instantiates layernorm, with or without a residual, for one dtype of all arrays and without dropout: the kernels are
// in norm/forward.cuh and norm/backward.cuh, and norm/launch.cuh chooses among them.
#include "launch.cuh"

namespace gptkernels::cuda {

template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, Stream stream) {
  return run_layernorm_forward(p, NoDropout(), stream);
}

// The workspace holds rows of 3 * C partial sums: one per block of the ring kernel, which has at most one block per SM,
// or those of the simple kernels.
template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width) {
  const int64_t partials = std::max(std::clamp<int64_t>(rows, 1, multiprocessors()), simple_partials(rows));
  return partials * 3 * width * int64_t(sizeof(accumulate_t<T>));
}

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, Stream stream) {
  return run_layernorm_backward<T>(p, NoDropout(), nullptr, stream);
}

#define GPTKERNELS_INSTANTIATE(T)                                           \
  template Status layernorm_forward<T>(const LayernormForward<T>&, Stream); \
  template int64_t layernorm_backward_workspace<T>(int64_t, int64_t);       \
  template Status layernorm_backward<T>(const LayernormBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
