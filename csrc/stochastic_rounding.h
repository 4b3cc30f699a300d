// float32 to bfloat16, up or down at random, so that the result is right on average: updates too small for a bfloat16's
// last bit are then not lost.
#pragma once

#include "philox.h"

namespace gptkernels {

constexpr int kRoundingGroup = 8;

// 16 random bits for each of a group of 8 neighbouring elements.
struct RoundingBits {
  PhiloxWords words;

  GPTKERNELS_HOST_DEVICE uint32_t operator[](int element) const { return sixteen_bits(words, element); }

  // Moves the bits of a pack that begins at element n to the front. A pack has 1, 2 or 4 elements and begins at a
  // multiple of that.
  GPTKERNELS_HOST_DEVICE void drop(int n) {
    if (n & 4) words = {{words.word[2], words.word[3], 0, 0}};
    if (n & 2) words.word[0] = words.word[1];
    if (n & 1) words.word[0] >>= 16;
  }
};

// The bits depend on the seed, the step, the tensor's index in its list, the array (0..3) and the group of 8 elements;
// never on threads.
GPTKERNELS_HOST_DEVICE RoundingBits rounding_bits(uint64_t seed, uint32_t step, uint32_t tensor, uint32_t array,
                                                  int64_t group) {
  const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(group) >> 32) | array << 30;
  return {philox(seed, {{static_cast<uint32_t>(group), high, tensor, step}})};
}

// Rounds a float32 to bfloat16, both given as their bits. The 16 bits that are cut off, times 2^-16, are the
// probability of rounding away from 0. Infinity and NaN stay what they are.
GPTKERNELS_HOST_DEVICE uint16_t round_stochastically(uint32_t value, uint32_t random) {
  const uint32_t magnitude = value & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(value >> 16 | 0x40u);
  return static_cast<uint16_t>((magnitude == 0x7F800000u ? value : value + random) >> 16);
}

}  // namespace gptkernels
