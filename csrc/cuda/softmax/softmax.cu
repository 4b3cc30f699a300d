#include "../../softmax.h"
#include "softmax.cuh"

namespace gptkernels::cuda {

template <typename T>
Status softmax_forward(const SoftmaxForward<T>& p, Stream stream) {
  return softmax_forward_rows<false, T>({.out = p.out, .x = p.x, .rows = p.rows, .width = p.width, .scale = 1}, stream);
}

template <typename T>
Status softmax_backward(const SoftmaxBackward<T>& p, Stream stream) {
  return softmax_backward_rows<false, T>(
      {.dx = p.dx, .dout = p.dout, .out = p.out, .rows = p.rows, .width = p.width, .scale = 1}, stream);
}

#define GPTKERNELS_INSTANTIATE(T)                                       \
  template Status softmax_forward<T>(const SoftmaxForward<T>&, Stream); \
  template Status softmax_backward<T>(const SoftmaxBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
