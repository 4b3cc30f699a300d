// What the rounding of attention's logsumexp does to its backward, undone.
#pragma once

#include <type_traits>

namespace gptkernels::cuda {

// logsumexp is rounded, which makes all probabilities of a row wrong by one factor. Their sum tells it: where that
// differs from 1 by no more than the rounding does, it is divided out. (Where it differs by more, the keys at hand are
// a part of those that logsumexp is of.) A logsumexp of far scores (attention/lowest_bias.cuh) is without the number of
// keys: their sum is that number.
template <typename A>
__device__ A logsumexp_correction(A sum, A logsumexp) {
  constexpr A kEpsilon = std::is_same_v<A, double> ? A(2.220446049250313e-16) : A(1.1920929e-7);
  return isfinite(logsumexp) && sum > 0 && fabs(sum - 1) <= 8 * kEpsilon * max(A(1), fabs(logsumexp)) ? 1 / sum : A(1);
}

}  // namespace gptkernels::cuda
