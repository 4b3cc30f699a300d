// Mean and reciprocal standard deviation of a row. Rounding a mean m to float32 may change it by |m| * 2^-24. The
// kernels therefore also compute `rest`, the average of x - m, and subtract first m and then rest from x, so that a
// large offset in x costs no accuracy.
#pragma once

#include <limits>

namespace gptkernels::cuda {

template <typename A>
struct Moments {
  A mean, rest, rstd;
};

__device__ inline float reciprocal_root(float x) {
  return __frsqrt_rn(x);
}
__device__ inline double reciprocal_root(double x) {
  return 1 / sqrt(x);
}

// `rests` is the sum of x - mean, `squares` the sum of (x - mean)^2, and `inverse` is 1 / C.
template <typename A>
__device__ Moments<A> moments(A mean, A rests, A squares, A inverse, double eps) {
  const A rest = rests * inverse, square = rest * rest;
  A variance = squares * inverse - square;
  // If all elements are equal, the computed variance consists of rounding errors, which may exceed eps for huge
  // elements.
  if (variance <= 8 * std::numeric_limits<A>::epsilon() * square) variance = 0;
  return {mean, rest, reciprocal_root(variance + A(eps))};
}

}  // namespace gptkernels::cuda
