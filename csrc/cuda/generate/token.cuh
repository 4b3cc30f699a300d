// Reads and checks the newest token of a sequence.
#pragma once

#include "../../decode.h"
#include "cuda/embedding/token.cuh"

namespace gptkernels::cuda {

struct NewestToken {
  int64_t position, token;
};

// Returns the position and the token of sequence b. The host does not read lengths and tokens, so an invalid one fails
// a device-side assertion.
template <typename T>
__device__ NewestToken newest_token(const Decode<T>& p, int64_t b) {
  const int64_t length = p.lengths[b], most = min(p.capacity, p.sequence_length);
  if (length < 1 || length > most) {
    device_fail("decode", "a length is outside the cache", "length %lld of sequence %lld is not from 1 to %lld\n",
                static_cast<long long>(length), static_cast<long long>(b), static_cast<long long>(most));
    return {0, 0};
  }
  const int64_t token = p.sequences[b * p.sequence_length + length - 1];
  if (token != -1) in_vocabulary(token, p.vocabulary, "decode", b);
  return {length - 1, max(token, int64_t{0})};
}

}  // namespace gptkernels::cuda
