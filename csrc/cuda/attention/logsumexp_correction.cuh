// Corrects attention's backward for the rounding of the logsumexp.
#pragma once

#include <type_traits>

namespace gptkernels::cuda {

// Returns the factor that corrects the probabilities exp(score - logsumexp) of a row, whose sum is `sum`. The rounding
// error of the logsumexp multiplies all probabilities of the row by the same factor, so `sum` is this factor instead of
// 1. The function returns 1 / sum if the rounding error can explain the difference between `sum` and 1. Otherwise the
// logsumexp was computed over more keys than this call has, and the function returns 1.
//
// If all biases of the row are far (lowest_bias.cuh), the term log(number of keys) of the logsumexp is rounded away.
// `sum` is then the number of keys.
template <typename A>
__device__ A logsumexp_correction(A sum, A logsumexp) {
  constexpr A kEpsilon = std::is_same_v<A, double> ? A(2.220446049250313e-16) : A(1.1920929e-7);
  return isfinite(logsumexp) && sum > 0 && fabs(sum - 1) <= 8 * kEpsilon * max(A(1), fabs(logsumexp)) ? 1 / sum : A(1);
}

}  // namespace gptkernels::cuda
