// The fast kernels write whole rows, but do not read the packs above the diagonal, about half of each input. In the
// pack that contains the diagonal, the elements above it are replaced before they are used.
#include "../../causal_softmax.h"
#include "softmax.cuh"

namespace gptkernels::cuda {

template <typename T>
Status causal_softmax_forward(const CausalSoftmaxForward<T>& p, Stream stream) {
  return softmax_forward_rows<true, T>({.out = p.out,
                                        .x = p.scores,
                                        .rows = p.matrices * p.tokens,
                                        .width = p.tokens,
                                        .scale = static_cast<accumulate_t<T>>(p.scale)},
                                       stream);
}

template <typename T>
Status causal_softmax_backward(const CausalSoftmaxBackward<T>& p, Stream stream) {
  return softmax_backward_rows<true, T>({.dx = p.dscores,
                                         .dout = p.dout,
                                         .out = p.out,
                                         .rows = p.matrices * p.tokens,
                                         .width = p.tokens,
                                         .scale = static_cast<accumulate_t<T>>(p.scale)},
                                        stream);
}

#define GPTKERNELS_INSTANTIATE(T)                                                    \
  template Status causal_softmax_forward<T>(const CausalSoftmaxForward<T>&, Stream); \
  template Status causal_softmax_backward<T>(const CausalSoftmaxBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
