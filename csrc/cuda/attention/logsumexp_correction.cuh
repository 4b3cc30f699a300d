#pragma once

#include <type_traits>

namespace gptkernels::cuda {

// The rounding error of the logsumexp multiplies all probabilities of a row by the same factor, so that their sum is
// not 1. Returns the correcting factor 1 / sum, or 1 if rounding cannot explain the sum, for example because the
// logsumexp was computed over more keys than this call has. If all biases of the row are far (lowest_bias.cuh), the sum
// is the number of keys with the largest bias.
template <typename A>
__device__ A logsumexp_correction(A sum, A logsumexp) {
  constexpr A kEpsilon = std::is_same_v<A, double> ? A(2.220446049250313e-16) : A(1.1920929e-7);
  return isfinite(logsumexp) && sum > 0 && fabs(sum - 1) <= 8 * kEpsilon * max(A(1), fabs(logsumexp)) ? 1 / sum : A(1);
}

}  // namespace gptkernels::cuda
