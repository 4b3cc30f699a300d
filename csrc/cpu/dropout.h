#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "../dropout.h"
#include "../philox.h"

namespace gptkernels::cpu {

struct Dropout {
  bool on = false;
  int64_t seed = 0;
  int64_t offset = 0;
  uint32_t threshold = 0;
  double factor = 1;
  int64_t first_group = 0;  // of dense data
  int64_t first_query = 0;
  int64_t first_head = 0;
  int64_t other_heads = 0;

  uint32_t head_number(int64_t batch, int64_t head, int64_t heads) const {
    return static_cast<uint32_t>(batch * (heads + other_heads) + first_head + head);
  }
};

inline Dropout read(const DropoutArguments& dropout) {
  if (dropout.probability == 0) return {};
  const double kept = 1 - dropout.probability;
  return {.on = true,
          .seed = *dropout.seed,
          .offset = *dropout.offset,
          .threshold = dropout_threshold(dropout.probability),
          .factor = kept > 0 ? 1 / kept : 0,
          .first_group = dropout.first_index / kDenseGroup,
          .first_query = dropout.first_query,
          .first_head = dropout.first_head,
          .other_heads = dropout.other_heads};
}

// Replaces the counters in `words` by random bits. Compilers vectorize each round's loop over the counters.
template <int kCalls>
inline void philox_vectorized(uint64_t key, uint32_t (&words)[4][kCalls]) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma omp simd
    for (int i = 0; i < kCalls; ++i) {
      uint32_t c[4] = {words[0][i], words[1][i], words[2][i], words[3][i]};
      philox_round(c, k0, k1);
      for (int w = 0; w < 4; ++w) words[w][i] = c[w];
    }
    philox_key_step(k0, k1);
  }
}

// Calls fn(from, to, bits) for runs of [begin, end), where bits[i - from] are the random bits of element i. Call it
// inside vectorised() (simd.h) only.
template <typename Fn>
void for_each_dropout_run(const Dropout& dropout, int64_t begin, int64_t end, const Fn& fn) {
  constexpr int kGroups = 32;  // groups of 8 elements
  const uint64_t key = dropout_key(dropout.seed, dropout.offset);
  for (int64_t group = begin / kDenseGroup; group * kDenseGroup < end; group += kGroups) {
    uint32_t words[4][kGroups];
    for (int i = 0; i < kGroups; ++i) {
      const PhiloxWords counter =
          dense_dropout_counter(dropout.offset, static_cast<uint64_t>(dropout.first_group + group + i));
      for (int w = 0; w < 4; ++w) words[w][i] = counter.word[w];
    }
    philox_vectorized(key, words);
    uint32_t ordered[kGroups * 4];
    for (int i = 0; i < kGroups; ++i)
      for (int w = 0; w < 4; ++w) ordered[i * 4 + w] = words[w][i];
    uint16_t bits[kGroups * kDenseGroup];
    static_assert(std::endian::native == std::endian::little, "slot 0 is the lower half of its word");
    std::memcpy(bits, ordered, sizeof(bits));
    const int64_t first = group * kDenseGroup;
    const int64_t from = std::max(begin, first);
    fn(from, std::min(end, first + kGroups * kDenseGroup), bits + (from - first));
  }
}

// Calls fn(from, to, factor) for runs of [0, size), where factor(i) is the dropout factor of element begin + i. Call it
// inside vectorised() only.
template <typename A, typename Fn>
void for_each_dropout_factor(const Dropout& dropout, int64_t begin, int64_t size, const Fn& fn) {
  if (!dropout.on) return fn(int64_t(0), size, [](int64_t) { return A(1); });
  const A kept = A(dropout.factor);
  for_each_dropout_run(dropout, begin, begin + size, [&](int64_t from, int64_t to, const uint16_t* bits) {
    const int64_t first = from - begin;
    fn(first, to - begin, [&](int64_t i) { return bits[i - first] >= dropout.threshold ? kept : A(0); });
  });
}

}  // namespace gptkernels::cpu
