#include "../causal_softmax.h"

#include "softmax.h"

namespace gptkernels::cpu {
namespace {

// A thread processes rows t and T - 1 - t together, because every such pair has T + 1 elements that are not masked.
template <typename Fn>
void for_each_row(int64_t matrices, int64_t tokens, Stream stream, const Fn& fn) {
  const int64_t pairs = (tokens + 1) / 2;
  parallel_for(stream, matrices * pairs, 2 * tokens, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % pairs;
        const int64_t last = tokens - 1 - first;
        const int64_t matrix = i / pairs * tokens * tokens;
        fn(matrix + first * tokens, first + 1);
        if (last != first) fn(matrix + last * tokens, last + 1);
      }
    });
  });
}

}  // namespace

template <typename T>
Status causal_softmax_forward(const CausalSoftmaxForward<T>& p, Stream stream) {
  for_each_row(p.matrices, p.tokens, stream, [&](int64_t offset, int64_t n) {
    softmax_row(p.out + offset, p.scores + offset, n, accumulate_t<T>(p.scale));
    std::fill(p.out + offset + n, p.out + offset + p.tokens, T(0));
  });
  return {};
}

template <typename T>
Status causal_softmax_backward(const CausalSoftmaxBackward<T>& p, Stream stream) {
  for_each_row(p.matrices, p.tokens, stream, [&](int64_t offset, int64_t n) {
    softmax_backward_row(p.dscores + offset, p.dout + offset, p.out + offset, n, accumulate_t<T>(p.scale));
    std::fill(p.dscores + offset + n, p.dscores + offset + p.tokens, T(0));
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                                                    \
  template Status causal_softmax_forward<T>(const CausalSoftmaxForward<T>&, Stream); \
  template Status causal_softmax_backward<T>(const CausalSoftmaxBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
