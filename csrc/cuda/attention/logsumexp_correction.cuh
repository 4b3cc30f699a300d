// Corrects attention's backward for the rounding of the logsumexp.
#pragma once

#include <type_traits>

namespace gptkernels::cuda {

// The rounding of logsumexp multiplies all probabilities of a row by one factor, which is their sum. Returns its
// inverse if the sum differs from 1 by no more than the rounding can explain, and else 1: the logsumexp is then one of
// more keys than these. A logsumexp of far scores (lowest_bias.cuh) does not contain the number of keys, which is their
// sum.
template <typename A>
__device__ A logsumexp_correction(A sum, A logsumexp) {
  constexpr A kEpsilon = std::is_same_v<A, double> ? A(2.220446049250313e-16) : A(1.1920929e-7);
  return isfinite(logsumexp) && sum > 0 && fabs(sum - 1) <= 8 * kEpsilon * max(A(1), fabs(logsumexp)) ? 1 / sum : A(1);
}

}  // namespace gptkernels::cuda
