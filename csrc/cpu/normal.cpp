#include "../normal.h"

#include <algorithm>

#include "../normal_number.h"
#include "dropout.h"
#include "simd.h"

namespace gptkernels::cpu {

namespace {

constexpr int64_t kCost = 64;  // a copy costs 1

// Fills out with the numbers from `index` on.
template <typename T>
void fill(const NormalNumbers<T>& p, T* out, int64_t index, int64_t size) {
  constexpr int kCalls = 32;
  for (int64_t group = index / kNormalGroup; group * kNormalGroup < index + size; group += kCalls) {
    uint32_t words[4][kCalls];
    for (int i = 0; i < kCalls; ++i) {
      const PhiloxWords counter = normal_counter(p.stream, static_cast<uint64_t>(group + i));
      for (int w = 0; w < 4; ++w) words[w][i] = counter.word[w];
    }
    philox_vectorized(p.seed, words);
    double numbers[kNormalGroup][kCalls];
    for (int slot = 0; slot < kNormalGroup; ++slot) {
#pragma omp simd
      for (int i = 0; i < kCalls; ++i)
        numbers[slot][i] = p.mean + p.std * normal_number(words[2 * slot][i], words[2 * slot + 1][i]);
    }
    const int64_t first = group * kNormalGroup;
    const int64_t end = std::min(index + size, first + kCalls * kNormalGroup);
    for (int64_t i = std::max(index, first); i < end; ++i)
      store(out[i - index], accumulate_t<T>(numbers[(i - first) % kNormalGroup][(i - first) / kNormalGroup]));
  }
}

}  // namespace

template <typename T>
Status normal(const NormalNumbers<T>& p, Stream stream) {
  parallel_for(stream, p.rows * p.columns, kCost, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t at = begin; at < end;) {
        const int64_t row = at / p.columns, column = at % p.columns;
        const int64_t size = std::min(end - at, p.columns - column);
        fill(p, p.out + at, p.first_index + row * p.row_stride + column, size);
        at += size;
      }
    });
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T) template Status normal<T>(const NormalNumbers<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
