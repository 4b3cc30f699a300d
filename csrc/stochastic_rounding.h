// Stochastic rounding from float32 to bfloat16. The expected value of the result is the exact value, so updates smaller
// than the last bit of a bfloat16 are not lost.
#pragma once

#include "philox.h"

namespace gptkernels {

constexpr int kRoundingGroup = 8;

// 16 random bits for each of the 8 neighbouring elements of a group.
struct RoundingBits {
  PhiloxWords words;

  GPTKERNELS_HOST_DEVICE uint32_t operator[](int element) const { return sixteen_bits(words, element); }

  // Shifts the bits so that element n of the group becomes element 0. The caller then uses the bits of a pack of 1, 2
  // or 4 elements, and n is a multiple of this number.
  GPTKERNELS_HOST_DEVICE void drop(int n) {
    if (n & 4) words = {{words.word[2], words.word[3], 0, 0}};
    if (n & 2) words.word[0] = words.word[1];
    if (n & 1) words.word[0] >>= 16;
  }
};

// Computes the random bits of a group. The bits depend on the seed, the step, the tensor's index in its list, the array
// (0..3) and the index of the group, not on threads.
GPTKERNELS_HOST_DEVICE RoundingBits rounding_bits(uint64_t seed, uint32_t step, uint32_t tensor, uint32_t array,
                                                  int64_t group) {
  const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(group) >> 32) | array << 30;
  return {philox(seed, {{static_cast<uint32_t>(group), high, tensor, step}})};
}

// Rounds a float32 to bfloat16, both given as bits, with 16 random bits. The probability of rounding away from 0 is the
// fraction that is cut off (the lower 16 bits times 2^-16). Infinity and NaN are preserved.
GPTKERNELS_HOST_DEVICE uint16_t round_stochastically(uint32_t value, uint32_t random) {
  const uint32_t magnitude = value & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(value >> 16 | 0x40u);
  return static_cast<uint16_t>((magnitude == 0x7F800000u ? value : value + random) >> 16);
}

}  // namespace gptkernels
