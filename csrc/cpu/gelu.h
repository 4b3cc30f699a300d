// GELU and its derivative, for loops that the compiler vectorizes. The sums in x * (1 + tanh(u)) / 2 and x * (1 +
// erf(u)) / 2 would cancel for negative x, so the small tails are computed directly.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "math.h"

namespace gptkernels::cpu {

// Let v = 2 sqrt(2/pi) (x + 0.044715 x^3). Then (1 + tanh(v / 2)) / 2 is the logistic function s(v) = 1 / (1 + e^-v).
struct GeluTanh {
  static constexpr double kLinear = 1.5957691216057308;  // 2 sqrt(2/pi)
  static constexpr double kCubic = 0.044715 * kLinear;

  template <typename A>
  static A value(A x) {
    const A v = x * std::fma(A(kCubic), x * x, A(kLinear));
    return x / (A(1) + exp(-v));
  }

  // Computes s(v) + x s'(v) v'(x) from e^-|v|, which cannot overflow: s(|v|) = 1 / (1 + e^-|v|) and s'(v) = e^-|v|
  // s(|v|)^2. x^2 is clamped to a finite value. Otherwise s'(v) v'(x), which is 0 for large |x|, would be 0 * inf =
  // NaN.
  template <typename A>
  static A derivative(A x) {
    const A square = std::min(x * x, std::numeric_limits<A>::max());
    const A v = x * std::fma(A(kCubic), square, A(kLinear));
    const A e = exp_nonpositive(-std::abs(v));
    const A s = A(1) / (A(1) + e);
    return (v < 0 ? e * s : s) + x * (e * s * s * std::fma(A(3 * kCubic), square, A(kLinear)));
  }
};

template <typename A>
struct Normal {
  A probability;
  A density;
};

constexpr double kDensityAtZero = 0.3989422804014327;  // 1 / sqrt(2 pi)

// For t >= 0 and a standard normal X, P(X > t) = e^(-t^2 / 2) R(t). On [0, 15] a rational function approximates R with
// a relative error below 2^-25. Its coefficients are all positive, so that no sum cancels. For t > 15, P(X > t) is
// smaller than the smallest float.
inline Normal<float> normal(float x) {
  const float t = std::abs(x);
  const float numerator = polynomial(t, 0.5f, 0x1.c11aa6p-2f, 0x1.77a41cp-3f, 0x1.4d4f6cp-5f, 0x1.0e23ccp-8f);
  const float denominator =
      polynomial(t, 1.0f, 0x1.accf82p0f, 0x1.340cfp0f, 0x1.e139f2p-2f, 0x1.a1c49cp-4f, 0x1.5290fap-7f);
  const float e = exp_nonpositive(-0.5f * (t * t));
  const float tail = t > 15.0f ? 0.0f : e * (numerator / denominator);
  return {x > 0 ? 1.0f - tail : tail, e * static_cast<float>(kDensityAtZero)};
}

inline Normal<double> normal(double x) {
  constexpr double kSqrtHalf = 0.7071067811865476;
  return {0.5 * std::erfc(-x * kSqrtHalf), kDensityAtZero * std::exp(-0.5 * x * x)};
}

struct GeluErf {
  template <typename A>
  static A value(A x) {
    return x * normal(x).probability;
  }

  template <typename A>
  static A derivative(A x) {
    const Normal<A> n = normal(x);
    return n.probability + x * n.density;
  }
};

}  // namespace gptkernels::cpu
