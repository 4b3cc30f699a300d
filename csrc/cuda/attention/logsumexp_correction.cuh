// Corrects attention's backward for the rounding of the logsumexp.
#pragma once

#include <type_traits>

namespace gptkernels::cuda {

// The rounding error of the logsumexp multiplies all probabilities of a row by the same factor, so their sum is this
// factor instead of 1. Returns 1 / sum if the rounding error can explain the difference between `sum` and 1. Otherwise
// the logsumexp is that of more keys than this call has, and the function returns 1.
//
// A logsumexp of far biases (lowest_bias.cuh) does not contain the number of keys, because it is rounded away. `sum` is
// then the number of keys.
template <typename A>
__device__ A logsumexp_correction(A sum, A logsumexp) {
  constexpr A kEpsilon = std::is_same_v<A, double> ? A(2.220446049250313e-16) : A(1.1920929e-7);
  return isfinite(logsumexp) && sum > 0 && fabs(sum - 1) <= 8 * kEpsilon * max(A(1), fabs(logsumexp)) ? 1 / sum : A(1);
}

}  // namespace gptkernels::cuda
