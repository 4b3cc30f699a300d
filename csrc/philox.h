// Random bits by Philox4x32-7 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011). Dropout's bits depend
// on seed, offset and an element's coordinates in the mask, not on tiles or threads.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define GPTKERNELS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GPTKERNELS_HOST_DEVICE inline
#endif

namespace gptkernels {

struct PhiloxWords {
  uint32_t word[4];
};

GPTKERNELS_HOST_DEVICE uint64_t multiply_wide(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

// The fewest rounds with which Philox4x32 passes BigCrush.
constexpr int kPhiloxRounds = 7;

GPTKERNELS_HOST_DEVICE void philox_round(uint32_t (&c)[4], uint32_t k0, uint32_t k1) {
  const uint64_t a = multiply_wide(c[0], 0xD2511F53u);
  const uint64_t b = multiply_wide(c[2], 0xCD9E8D57u);
  c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0;
  c[1] = static_cast<uint32_t>(b);
  c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1;
  c[3] = static_cast<uint32_t>(a);
}

GPTKERNELS_HOST_DEVICE void philox_key_step(uint32_t& k0, uint32_t& k1) {
  k0 += 0x9E3779B9u;
  k1 += 0xBB67AE85u;
}

template <int kCounters>
GPTKERNELS_HOST_DEVICE void philox(uint64_t key, PhiloxWords (&counters)[kCounters]) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < kCounters; ++i) philox_round(counters[i].word, k0, k1);
    philox_key_step(k0, k1);
  }
}

GPTKERNELS_HOST_DEVICE PhiloxWords philox(uint64_t key, const PhiloxWords& counter) {
  PhiloxWords words[1] = {counter};
  philox(key, words);
  return words[0];
}

// Slot 0..7 is the lower half (even slot) or the upper half (odd slot) of word slot / 2.
GPTKERNELS_HOST_DEVICE uint32_t sixteen_bits(const PhiloxWords& words, int slot) {
  return words.word[slot / 2] >> (16 * (slot % 2)) & 0xFFFFu;
}

// The upper 32 bits of the offset change the Philox key, and the lower 32 bits are one word of the counter.
GPTKERNELS_HOST_DEVICE uint64_t dropout_key(int64_t seed, int64_t offset) {
  return static_cast<uint64_t>(seed) ^ (static_cast<uint64_t>(offset) & 0xFFFFFFFF00000000u);
}

// ---- attention probabilities ----------------------------------------------------------------------------------------

// One Philox result provides 16 bits for each of the 8 elements of a group. A group is the part of two neighbouring
// 16x8 accumulator tiles of mma.sync that one thread holds: rows i and i + 8, columns j, j + 1, j + 8 and j + 9 (i % 16
// < 8, j % 16 < 8, j even).
//
//   element (row, column) of the head:  group row    (row / 16) * 8 + row % 8
//                                       group column (column / 16) * 4 + column % 8 / 2
//                                       slot         (row / 8 % 2) * 4 + (column / 8 % 2) * 2 + column % 2
constexpr int kGroupQueries = 16;  // the rows i and i + 8 of groups are among 16 rows

struct DropoutGroup {
  uint32_t row;
  uint32_t column;
  int slot;
};

GPTKERNELS_HOST_DEVICE DropoutGroup dropout_group(int64_t row, int64_t column) {
  return {static_cast<uint32_t>((row / 16) * 8 + row % 8), static_cast<uint32_t>((column / 16) * 4 + column % 8 / 2),
          static_cast<int>((row / 8 % 2) * 4 + (column / 8 % 2) * 2 + column % 2)};
}

// words[i] belongs to group (group_row + i * row_step, group_column + i * column_step). `head` is b * NH + h, where NH
// and h are the number of heads and the head in the whole tensor.
template <int kGroups>
GPTKERNELS_HOST_DEVICE void dropout_words(int64_t seed, int64_t offset, uint32_t head, uint32_t group_row,
                                          uint32_t group_column, uint32_t row_step, uint32_t column_step,
                                          PhiloxWords (&words)[kGroups]) {
  for (uint32_t i = 0; i < kGroups; ++i)
    words[i] = {{group_column + i * column_step, group_row + i * row_step, head, static_cast<uint32_t>(offset)}};
  philox(dropout_key(seed, offset), words);
}

GPTKERNELS_HOST_DEVICE PhiloxWords dropout_words(int64_t seed, int64_t offset, uint32_t head, uint32_t group_row,
                                                 uint32_t group_column) {
  PhiloxWords words[1];
  dropout_words(seed, offset, head, group_row, group_column, 0, 0, words);
  return words[0];
}

// ---- dense data -----------------------------------------------------------------------------------------------------

// One Philox result provides the bits of 8 neighbouring elements: flat index i has group i / 8 and slot i % 8.
// kDenseHead is no head's number, so dense masks and attention's masks use different bits for the same seed and offset.
constexpr int kDenseGroup = 8;
constexpr uint32_t kDenseHead = 0xFFFFFFFFu;

GPTKERNELS_HOST_DEVICE PhiloxWords dense_dropout_counter(int64_t offset, uint64_t group) {
  return {
      {static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), kDenseHead, static_cast<uint32_t>(offset)}};
}

GPTKERNELS_HOST_DEVICE PhiloxWords dense_dropout_words(int64_t seed, int64_t offset, uint64_t group) {
  return philox(dropout_key(seed, offset), dense_dropout_counter(offset, group));
}

// ---- both kinds of masks --------------------------------------------------------------------------------------------

GPTKERNELS_HOST_DEVICE uint32_t dropout_threshold(double probability) {
  return static_cast<uint32_t>(probability * 65536 + 0.5);
}

}  // namespace gptkernels
