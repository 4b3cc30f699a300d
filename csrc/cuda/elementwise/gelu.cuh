// GeluTanh and GeluErf compute the small tail directly, because in x / 2 * (1 + tanh(u)) or x / 2 * (1 + erf(u)) the
// sum cancels for negative x.
#pragma once

#include <limits>

#include "cuda/common/approximate.cuh"

namespace gptkernels::cuda {

// Let v = 2 sqrt(2/pi) (x + 0.044715 x^3). Then (1 + tanh(v / 2)) / 2 is the logistic function s(v) = 1 / (1 + e^-v),
// and GELU is x s(v).
template <typename T>
struct GeluTanh {
  using A = accumulate_t<T>;
  static constexpr double kLinear = 1.5957691216057308;  // 2 sqrt(2/pi)
  static constexpr double kCubic = 0.044715 * kLinear;

  static __device__ A value(A x) {
    if constexpr (kSixteenBits<T>) return x * reciprocal_approximately(1.0f + exp_minus_v(x, x * x));
    const A v = x * (A(kLinear) + A(kCubic) * (x * x));
    return x * reciprocal_for<T>(A(1) + exp_for<T>(-v));
  }

  // s(v) + x s'(v) v'(x), from e^-|v|, which cannot overflow: s(|v|) = 1 / (1 + e^-|v|) and s'(v) = e^-|v| s(|v|)^2.
  // x^2 is limited to finite values, so that s'(v) v'(x) is 0 for |x| > 1e19, not 0 * inf = NaN.
  static __device__ A derivative(A x) {
    if constexpr (kSixteenBits<T>) return short_derivative(x);
    const A square = fmin(x * x, std::numeric_limits<A>::max());
    const A v = x * (A(kLinear) + A(kCubic) * square);
    const A e = exp_for<T>(-fabs(v));
    const A s = reciprocal_for<T>(A(1) + e);
    return (v < A(0) ? e * s : s) + x * (e * s * s * (A(kLinear) + A(3 * kCubic) * square));
  }

 private:
  static __device__ float exp_minus_v(float x, float square) {
    return exp2_approximately(x * fmaf(float(-kCubic * kLog2E), square, float(-kLinear * kLog2E)));
  }

  // s + x s (1 - s) v'(x), for 16-bit results. x^2 is limited to the value at which e^-v is about 2^127 or 2^-127. For
  // larger |x|, the approximate instructions make s, and thus the derivative, exactly 0 or 1: x s (1 - s) multiplies
  // every finite x by 0. An infinite x gives NaN, as in the formula.
  static __device__ float short_derivative(float x) {
    constexpr float kFar = 10.04f;
    const float square = fminf(x * x, kFar * kFar);
    const float s = reciprocal_approximately(1.0f + exp_minus_v(x, square));
    return fmaf(x * s * (1.0f - s), fmaf(float(3 * kCubic), square, float(kLinear)), s);
  }
};

// For x >= 0, the normal distribution's Q(x) = 1 - Phi(x) and its density.
template <typename A>
struct Tail {
  A mass, density;
};

template <typename... Rest>
__device__ float horner(float t, float first, Rest... rest) {
  if constexpr (sizeof...(rest) > 0)
    return fmaf(t, horner(t, rest...), first);
  else
    return first;
}

// Q(x) = e^(-x^2/2) t P(t), where t = 1 / (1 + x / 4). P was fitted by Lawson's reweighted least squares to minimise
// the largest relative error up to x = 14.5: 3e-6 for 16-bit results (x >= 0), and 2e-8 for float32 (x >= 1). Beyond
// 14.5, Q is less than the smallest float32.
template <typename T>
struct TailFit {
  static __device__ float polynomial(float t) {
    return horner(t, 0.09973748028f, 0.0996555835f, 0.09459107369f, 0.07367441803f, 0.09187308699f, -0.02166092582f,
                  0.1086249948f, -0.04652706534f);
  }
};
template <typename T>
  requires(kSixteenBits<T>)
struct TailFit<T> {
  static __device__ float polynomial(float t) {
    return horner(t, 0.0993617083f, 0.105624364f, 0.05582441504f, 0.2072582442f, -0.172472055f, 0.2796910621f,
                  -0.07528626391f);
  }
};

constexpr double kDensityAtZero = 0.3989422804014327;  // 1 / sqrt(2 pi)

// This function takes about 30 instructions, few enough for float32 to run at memory bandwidth. The approximate
// exponential and reciprocal have relative errors of up to 2^-22, which is accurate enough for x >= 1: where GELU needs
// 1 - Q, Q is less than 1/6, so the error of Q hardly matters; where GELU needs Q, torch's error is larger.
template <typename T>
__device__ Tail<float> tail(float x) {
  const float square = x * x;
  float e = exp2_approximately((-0.5f * kLog2E) * square);
  // This corrects the error from rounding the square, which is up to 80 ulp in the far tail.
  if constexpr (!kSixteenBits<T>) e -= 0.5f * e * fmaf(x, x, -square);
  const float t = reciprocal_approximately(1.0f + 0.25f * x);
  float mass = e * t * TailFit<T>::polynomial(t);
  // For x < 1, Q = 1/2 - x R(x^2) is more accurate: this formula has fewer roundings, and the subtraction hardly
  // cancels. R was fitted like TailFit's polynomial, with a largest error of 3e-8.
  if constexpr (!kSixteenBits<T>)
    if (x < 1.0f)
      mass = 0.5f -
             x * horner(square, 0.3989421427f, -0.06648819894f, 0.009962395765f, -0.001163114095f, 9.151202539e-05f);
  return {mass, float(kDensityAtZero) * e};
}

template <typename T>
__device__ Tail<double> tail(double x) {
  return {normcdf(-x), kDensityAtZero * exp(-0.5 * x * x)};
}

// x (1 + erf(x / sqrt 2)) / 2 = x (1 - Q(x)).
template <typename T>
struct GeluErf {
  using A = accumulate_t<T>;
  static constexpr double kFar = sizeof(A) == 8 ? 40 : 15;  // the tail is 0 beyond kFar; limiting |x| keeps x^2 finite

  static __device__ A value(A x) {
    const A q = tail<T>(fmin(fabs(x), A(kFar))).mass;
    return x * (x < A(0) ? q : A(1) - q);
  }

  static __device__ A derivative(A x) {
    const Tail<A> q = tail<T>(fmin(fabs(x), A(kFar)));
    return (x < A(0) ? q.mass : A(1) - q.mass) + x * q.density;
  }
};

}  // namespace gptkernels::cuda
