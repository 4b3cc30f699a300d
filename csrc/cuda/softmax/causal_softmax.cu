// Whole rows are written, but no pack above the diagonal is read: half of each input on average. In the diagonal's
// pack, the elements above the diagonal are replaced before they are used.
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
