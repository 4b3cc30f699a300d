#include "../gelu.h"

#include "gelu.h"
#include "simd.h"

namespace gptkernels::cpu {
namespace {

constexpr int64_t kCost = 4;  // of an element; a copy costs 1

template <typename Form, typename T>
void forward(const GeluForward<T>& p, Stream stream) {
  using A = accumulate_t<T>;
  parallel_for(stream, p.size, kCost, [&](int64_t begin, int64_t end) {
    vectorised([&] {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) store(p.out[i], Form::value(A(p.x[i])));
    });
  });
}

template <typename Form, typename T>
void backward(const GeluBackward<T>& p, Stream stream) {
  using A = accumulate_t<T>;
  parallel_for(stream, p.size, kCost, [&](int64_t begin, int64_t end) {
    vectorised([&] {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) store(p.dx[i], A(p.dout[i]) * Form::derivative(A(p.x[i])));
    });
  });
}

}  // namespace

template <typename T>
Status gelu_forward(const GeluForward<T>& p, Stream stream) {
  if (p.form == GeluForm::kTanh)
    forward<GeluTanh>(p, stream);
  else
    forward<GeluErf>(p, stream);
  return {};
}

template <typename T>
Status gelu_backward(const GeluBackward<T>& p, Stream stream) {
  if (p.form == GeluForm::kTanh)
    backward<GeluTanh>(p, stream);
  else
    backward<GeluErf>(p, stream);
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                                 \
  template Status gelu_forward<T>(const GeluForward<T>&, Stream); \
  template Status gelu_backward<T>(const GeluBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
