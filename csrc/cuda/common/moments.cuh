// Mean and variance of a row for layer norms.
//
// The float32 mean m of a row is rounded, so it may be off by |m| * 2^-24. The kernels also take the average of x - m
// (`rest`) and correct by it, so a large offset in x costs no accuracy.
#pragma once

#include <limits>

namespace gptkernels::cuda {

template <typename A>
struct Moments {
  A mean, rest, rstd;
};

// 1 / sqrt(x), correctly rounded for float32.
__device__ inline float reciprocal_root(float x) {
  return __frsqrt_rn(x);
}
__device__ inline double reciprocal_root(double x) {
  return 1 / sqrt(x);
}

// From the sums over a row of x - mean and of (x - mean)^2; `inverse` is 1 / C.
template <typename A>
__device__ Moments<A> moments(A mean, A rests, A squares, A inverse, double eps) {
  const A rest = rests * inverse, square = rest * rest;
  A variance = squares * inverse - square;
  // Of a row of equal numbers only roundings are left, which exceed eps if the numbers are huge.
  if (variance <= 8 * std::numeric_limits<A>::epsilon() * square) variance = 0;
  return {mean, rest, reciprocal_root(variance + A(eps))};
}

}  // namespace gptkernels::cuda
