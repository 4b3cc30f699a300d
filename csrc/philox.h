// Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011), and which of its bits belong to
// which element of attention's dropout mask. The mask depends on coordinates alone, never on tiles or threads.
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

// 128 random bits for a 128-bit counter under a 64-bit key.
GPTKERNELS_HOST_DEVICE PhiloxWords philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// One call serves 8 elements of a head's (Tq, Tk) mask, 16 bits each: those that one thread holds of two neighbouring
// 16x8 tiles of a tensor core's accumulator, rows i and i + 8, columns j, j + 1, j + 8 and j + 9 (i % 16 < 8,
// j % 16 < 8, j even).
//
//   element (row, column) of the head:  group row    (row / 16) * 8 + row % 8
//                                       group column (column / 16) * 4 + column % 8 / 2
//                                       slot         (row / 8 % 2) * 4 + (column / 8 % 2) * 2 + column % 2
//   slot s has bits 16 * (s % 2) and up of word s / 2.
struct DropoutGroup {
  uint32_t row;
  uint32_t column;
  int slot;
};

GPTKERNELS_HOST_DEVICE DropoutGroup dropout_group(int64_t row, int64_t column) {
  return {static_cast<uint32_t>((row / 16) * 8 + row % 8), static_cast<uint32_t>((column / 16) * 4 + column % 8 / 2),
          static_cast<int>((row / 8 % 2) * 4 + (column / 8 % 2) * 2 + column % 2)};
}

// The 8 elements' bits of one group. `head` is b * NH + h.
GPTKERNELS_HOST_DEVICE PhiloxWords dropout_words(int64_t seed, int64_t offset, uint32_t head, uint32_t group_row,
                                                 uint32_t group_column) {
  // The offset takes the counter's top word; its upper half joins the key.
  const uint64_t key = static_cast<uint64_t>(seed) ^ (static_cast<uint64_t>(offset) & 0xFFFFFFFF00000000u);
  return philox(key, group_column, group_row, head, static_cast<uint32_t>(offset));
}

GPTKERNELS_HOST_DEVICE uint32_t dropout_bits(const PhiloxWords& words, int slot) {
  return words.word[slot / 2] >> (16 * (slot % 2)) & 0xFFFFu;
}

// An element is kept if its bits are at least this.
GPTKERNELS_HOST_DEVICE uint32_t dropout_threshold(double probability) {
  return static_cast<uint32_t>(probability * 65536 + 0.5);
}

}  // namespace gptkernels
