#pragma once

#include <cstdint>

#include "cuda/common/assert.cuh"

namespace gptkernels::cuda {

template <typename Token>
__device__ bool in_vocabulary(Token token, int64_t vocabulary, const char* op, int64_t position) {
  if (token >= 0 && token < vocabulary) return true;
  device_fail(op, "a token is outside the vocabulary",
              "token %lld at position %lld is outside the vocabulary of %lld\n", static_cast<long long>(token),
              static_cast<long long>(position), static_cast<long long>(vocabulary));
  return false;
}

}  // namespace gptkernels::cuda
