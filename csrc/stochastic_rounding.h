// The expected value of a stochastically rounded float32 is exact, so updates smaller than the last bit of a bfloat16
// are not lost.
#pragma once

#include "philox.h"

namespace gptkernels {

constexpr int kRoundingGroup = 8;

struct RoundingBits {
  PhiloxWords words;

  GPTKERNELS_HOST_DEVICE uint32_t operator[](int element) const { return sixteen_bits(words, element); }

  // Moves the bits of element n to element 0, for callers that round 1, 2 or 4 elements at a time. n is a multiple of
  // that number.
  GPTKERNELS_HOST_DEVICE void drop(int n) {
    if (n & 4) words = {{words.word[2], words.word[3], 0, 0}};
    if (n & 2) words.word[0] = words.word[1];
    if (n & 1) words.word[0] >>= 16;
  }
};

GPTKERNELS_HOST_DEVICE RoundingBits rounding_bits(uint64_t seed, uint32_t step, uint32_t tensor, uint32_t array,
                                                  int64_t group) {
  const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(group) >> 32) | array << 30;
  return {philox(seed, {{static_cast<uint32_t>(group), high, tensor, step}})};
}

// Float32 bits to bfloat16 bits. The probability of rounding away from 0 is the fraction that rounding towards 0 would
// cut off. Infinity stays infinity, and NaN stays NaN.
GPTKERNELS_HOST_DEVICE uint16_t round_stochastically(uint32_t value, uint32_t random) {
  const uint32_t magnitude = value & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(value >> 16 | 0x40u);
  return static_cast<uint16_t>((magnitude == 0x7F800000u ? value : value + random) >> 16);
}

}  // namespace gptkernels
