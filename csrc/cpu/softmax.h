#pragma once

#include <type_traits>

#include "device.h"
#include "math.h"
#include "simd.h"

namespace gptkernels::cpu {

// out may be x. If T is the accumulation type, out stores the exponentials between two passes. A 16-bit T would round
// them, so the last pass computes them again.
template <typename T>
inline void softmax_row(T* out, const T* x, int64_t n, accumulate_t<T> scale) {
  using A = accumulate_t<T>;
  const A largest = maximum<A>(n, [&](int64_t i) { return A(x[i]) * scale; });
  const auto exponential = [&](int64_t i) { return exp_nonpositive(A(x[i]) * scale - largest); };
  if constexpr (std::is_same_v<T, A>) {
    const A total = sum<A>(n, [&](int64_t i) { return out[i] = exponential(i); });
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] /= total;
  } else {
    const A total = sum<A>(n, exponential);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(out[i], exponential(i) / total);
  }
}

template <typename T>
inline void softmax_backward_row(T* dx, const T* dout, const T* out, int64_t n, accumulate_t<T> scale) {
  using A = accumulate_t<T>;
  const A dot = sum<A>(n, [&](int64_t i) { return A(dout[i]) * A(out[i]); });
  prefetch(dout + n, n);
  prefetch(out + n, n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(dx[i], A(out[i]) * (A(dout[i]) - dot) * scale);
}

}  // namespace gptkernels::cpu
