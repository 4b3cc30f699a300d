// GELU and its derivative at one x, for every kernel that has one in hand.
//
// Neither form is computed as x / 2 * (1 + tanh(u)) or (1 + erf(u)), whose sum cancels for negative x: both take the
// small tail itself.
#pragma once

#include <limits>

#include "device.h"

namespace gptkernels::cuda {

// With v = 2 sqrt(2/pi) (x + 0.044715 x^3), (1 + tanh(v / 2)) / 2 is the logistic function s(v) = 1 / (1 + e^-v).
struct GeluTanh {
  static constexpr double kLinear = 1.5957691216057308;  // 2 sqrt(2/pi)
  static constexpr double kCubic = 0.044715 * kLinear;

  template <typename A>
  static __device__ A value(A x) {
    const A v = x * (A(kLinear) + A(kCubic) * (x * x));
    return x / (A(1) + exp(-v));
  }

  // s(v) + x s'(v) v'(x), with s and s' from e^-|v|, which cannot overflow: s(|v|) = 1 / (1 + e^-|v|) and
  // s'(v) = e^-|v| s(|v|)^2. A finite x^2 keeps s' v' a zero for x beyond 1e19, not 0 * inf.
  template <typename A>
  static __device__ A derivative(A x) {
    const A square = fmin(x * x, std::numeric_limits<A>::max());
    const A v = x * (A(kLinear) + A(kCubic) * square);
    const A e = exp(-fabs(v));
    const A s = A(1) / (A(1) + e);
    return (v < A(0) ? e * s : s) + x * (e * s * s * (A(kLinear) + A(3 * kCubic) * square));
  }
};

// normcdf keeps its relative accuracy in the tail.
struct GeluErf {
  static constexpr double kDensityAtZero = 0.3989422804014327;  // 1 / sqrt(2 pi)

  template <typename A>
  static __device__ A value(A x) {
    return x * normcdf(x);
  }

  template <typename A>
  static __device__ A derivative(A x) {
    return normcdf(x) + x * (A(kDensityAtZero) * exp(A(-0.5) * x * x));
  }
};

}  // namespace gptkernels::cuda
