#include "../squared_relu.h"

#include "simd.h"

namespace gptkernels::cpu {

// x > 0 ? x : 0 would turn a NaN into 0.
template <typename A>
static A relu(A x) {
  return x < 0 ? A(0) : x;
}

template <typename T>
Status squared_relu_forward(const SquaredReluForward<T>& p, Stream stream) {
  using A = accumulate_t<T>;
  parallel_for(stream, p.size, 1, [&](int64_t begin, int64_t end) {
    vectorised([&] {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const A y = relu(A(p.x[i]));
        store(p.out[i], y * y);
      }
    });
  });
  return {};
}

template <typename T>
Status squared_relu_backward(const SquaredReluBackward<T>& p, Stream stream) {
  using A = accumulate_t<T>;
  parallel_for(stream, p.size, 2, [&](int64_t begin, int64_t end) {
    vectorised([&] {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) store(p.dx[i], A(p.dout[i]) * (2 * relu(A(p.x[i]))));
    });
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                                                \
  template Status squared_relu_forward<T>(const SquaredReluForward<T>&, Stream); \
  template Status squared_relu_backward<T>(const SquaredReluBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
