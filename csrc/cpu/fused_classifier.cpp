#include "../fused_classifier.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "fp8_dlogit.h"
#include "math.h"
#include "simd.h"
#include "targets.h"

namespace gptkernels::cpu {

namespace {

// `rest` is the sum of all exponentials except the target's. If the target's probability is nearly 1, the loss and the
// target's gradient depend on `rest` alone, of which the total, slightly more than 1, retains few digits.
//
// If Out is the accumulation type, the exponentials are stored in dlogits and scaled there by the last pass. A narrower
// Out would round them, so the last pass computes them again.
template <typename T, typename Out>
void forward_row(const FusedClassifierForward<T, Out>& p, int64_t row) {
  using A = accumulate_t<T>;
  const T* x = p.logits + row * p.width;
  Out* dlogits = p.dlogits + row * p.width;
  const int64_t target = target_of(p, row);
  if (target == p.ignore_index) {
    p.losses[row] = 0;
    std::fill_n(dlogits, p.width, Out{});
    return;
  }

  const A largest = maximum<A>(p.vocab_size, [&](int64_t i) { return A(x[i]); });
  const A at_target = A(x[target]) - largest;
  const auto exponential = [&](int64_t i) { return exp(A(x[i]) - largest); };
  const auto sum_of_others = [&](const auto& fn) {
    return sum<A>(target, fn) +
           sum<A>(p.vocab_size - target - 1, [&, after = target + 1](int64_t i) { return fn(after + i); });
  };
  A rest;
  if constexpr (std::is_same_v<Out, A>)
    rest = sum_of_others([&](int64_t i) { return dlogits[i] = exponential(i); });
  else
    rest = sum_of_others(exponential);

  const A total = exp(at_target) + rest;
  const A dloss = p.dlosses ? p.dlosses[p.dlosses_per_row ? row : 0] : A(1);
  const A scale = dloss / total;
  if constexpr (std::is_same_v<Out, A>) {
#pragma omp simd
    for (int64_t i = 0; i < p.vocab_size; ++i) dlogits[i] *= scale;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < p.vocab_size; ++i) store(dlogits[i], exponential(i) * scale);
  }
  store(dlogits[target], -(rest / total) * dloss);
  std::fill(dlogits + p.vocab_size, dlogits + p.width, Out{});
  p.losses[row] = at_target == A(0) ? std::log1p(rest) : std::log(total) - at_target;
}

template <typename T>
void backward_row(const FusedClassifierBackward<T>& p, int64_t row) {
  using A = accumulate_t<T>;
  const T* dlogits = p.dlogits + row * p.width;
  T* scaled = p.scaled + row * p.width;
  const A dloss = p.dlosses[p.dlosses_per_row ? row : 0];
#pragma omp simd
  for (int64_t i = 0; i < p.width; ++i) {
    const A d = A(dlogits[i]);
    store(scaled[i], d == A(0) ? A(0) : d * dloss);
  }
}

}  // namespace

template <typename T, typename Out>
Status fused_classifier_forward(const FusedClassifierForward<T, Out>& p, Stream stream) {
  if (Status status = check_targets(p); !status.ok()) return status;
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) forward_row(p, row);
    });
  });
  return {};
}

template <typename T>
Status fused_classifier_backward(const FusedClassifierBackward<T>& p, Stream stream) {
  if (p.scaled == p.dlogits && !p.dlosses_per_row && *p.dlosses == accumulate_t<T>(1)) return {};  // no-op
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) backward_row(p, row);
    });
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                                                        \
  template Status fused_classifier_forward<T>(const FusedClassifierForward<T>&, Stream); \
  template Status fused_classifier_backward<T>(const FusedClassifierBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)
template Status fused_classifier_forward(const FusedClassifierForward<float, Fp8Dlogit>&, Stream);
template Status fused_classifier_forward(const FusedClassifierForward<bfloat16, Fp8Dlogit>&, Stream);
template Status fused_classifier_forward(const FusedClassifierForward<float16, Fp8Dlogit>&, Stream);

}  // namespace gptkernels::cpu
