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

  // Element n becomes element 0, and if n is 4 the next ones follow it.
  GPTKERNELS_HOST_DEVICE void drop(int n) {
    if (n & 4) words = {{words.word[2], words.word[3], 0, 0}};
    if (n & 2) words.word[0] = words.word[1];
    if (n & 1) words.word[0] >>= 16;
  }
};

// They depend on coordinates alone, never on threads: the step, the tensor's place in its list, which of its arrays
// (0..3), and which 8 elements of that.
GPTKERNELS_HOST_DEVICE RoundingBits rounding_bits(uint64_t seed, uint32_t step, uint32_t tensor, uint32_t array,
                                                  int64_t group) {
  const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(group) >> 32) | array << 30;
  return {philox(seed, {{static_cast<uint32_t>(group), high, tensor, step}})};
}

// The upper half of a float32, given and taken as bits. The 16 bits that are cut off are the probability, in 2^-16, of
// the neighbour that is farther from 0. Infinity and NaN stay what they are.
GPTKERNELS_HOST_DEVICE uint16_t round_stochastically(uint32_t value, uint32_t random) {
  const uint32_t magnitude = value & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(value >> 16 | 0x40u);
  return static_cast<uint16_t>((magnitude == 0x7F800000u ? value : value + random) >> 16);
}

}  // namespace gptkernels
