#include "softmax.h"

#include "../softmax.h"

namespace gptkernels::cpu {

template <typename T>
Status softmax_forward(const SoftmaxForward<T>& p, Stream stream) {
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t offset = begin * p.width; offset < end * p.width; offset += p.width)
        softmax_row(p.out + offset, p.x + offset, p.width, accumulate_t<T>(1));
    });
  });
  return {};
}

template <typename T>
Status softmax_backward(const SoftmaxBackward<T>& p, Stream stream) {
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t offset = begin * p.width; offset < end * p.width; offset += p.width)
        softmax_backward_row(p.dx + offset, p.dout + offset, p.out + offset, p.width, accumulate_t<T>(1));
    });
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                                       \
  template Status softmax_forward<T>(const SoftmaxForward<T>&, Stream); \
  template Status softmax_backward<T>(const SoftmaxBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
