#include "../fused_classifier.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "math.h"
#include "simd.h"

namespace gptkernels::cpu {
namespace {

template <typename T>
int64_t target_of(const FusedClassifierForward<T>& p, int64_t row) {
  return p.targets_are_int64 ? static_cast<const int64_t*>(p.targets)[row]
                             : static_cast<const int32_t*>(p.targets)[row];
}

template <typename T>
Status check_targets(const FusedClassifierForward<T>& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t target = target_of(p, row);
    if (target != p.ignore_index && (target < 0 || target >= p.vocab_size))
      return {"target " + std::to_string(target) + " at row " + std::to_string(row) + " is outside the vocabulary of " +
              std::to_string(p.vocab_size)};
  }
  return {};
}

// softmax(x) = exp(x - max) / sum
template <typename A>
struct Normaliser {
  A max;
  A sum;
};

// NaN may be passed over here; it comes back in the sum.
template <typename T>
accumulate_t<T> max_of(const T* x, int64_t n) {
  using A = accumulate_t<T>;
  A max = -std::numeric_limits<A>::infinity();
#pragma omp simd reduction(max : max)
  for (int64_t i = 0; i < n; ++i) max = A(x[i]) > max ? A(x[i]) : max;
  return max;
}

// One pass over memory: a block of the row, small enough for the L1 cache, is read for its maximum and again for its
// sum, and the sum so far is rescaled where the maximum has grown. Adding up blocks also keeps the roundings of a long
// row's sum few.
template <typename T>
Normaliser<accumulate_t<T>> normaliser(const T* x, int64_t n) {
  using A = accumulate_t<T>;
  constexpr int64_t kBlock = 4096;
  constexpr A kLowest = -std::numeric_limits<A>::infinity();
  A max = kLowest;
  A sum = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const T* block = x + begin;
    const int64_t size = std::min(kBlock, n - begin);
    const A block_max = max_of(block, size);
    if (block_max > max) {
      sum *= exp(max - block_max);
      max = block_max;
    }
    const A shift = max == kLowest ? A(0) : max;  // -inf - -inf would be no number
    A block_sum = 0;
#pragma omp simd reduction(+ : block_sum)
    for (int64_t i = 0; i < size; ++i) block_sum += exp(A(block[i]) - shift);
    sum += block_sum;
  }
  return {max, sum};
}

template <typename T>
void forward_row(const FusedClassifierForward<T>& p, int64_t row) {
  using A = accumulate_t<T>;
  const T* x = p.logits + row * p.width;
  T* dlogits = p.dlogits + row * p.width;
  const int64_t target = target_of(p, row);
  if (target == p.ignore_index) {
    p.losses[row] = 0;
    std::fill_n(dlogits, p.width, T(0));
    return;
  }

  const auto [max, sum] = normaliser(x, p.vocab_size);
  const A shifted = A(x[target]) - max;
  const A dloss = p.dlosses ? p.dlosses[p.dlosses_per_row ? row : 0] : A(1);
  const A scale = dloss / sum;
  p.losses[row] = std::log(sum) - shifted;
#pragma omp simd
  for (int64_t i = 0; i < p.vocab_size; ++i) store(dlogits[i], exp(A(x[i]) - max) * scale);
  store(dlogits[target], (exp(shifted) / sum - A(1)) * dloss);
  std::fill(dlogits + p.vocab_size, dlogits + p.width, T(0));
}

template <typename T>
void backward_row(const FusedClassifierBackward<T>& p, int64_t row) {
  using A = accumulate_t<T>;
  const T* dlogits = p.dlogits + row * p.width;
  T* scaled = p.scaled + row * p.width;
  const A dloss = p.dlosses[p.dlosses_per_row ? row : 0];
#pragma omp simd
  for (int64_t i = 0; i < p.width; ++i) {
    const A d = A(dlogits[i]);
    store(scaled[i], d == A(0) ? A(0) : d * dloss);
  }
}

}  // namespace

template <typename T>
Status fused_classifier_forward(const FusedClassifierForward<T>& p, Stream stream) {
  if (Status status = check_targets(p); !status.ok()) return status;
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) forward_row(p, row);
    });
  });
  return {};
}

template <typename T>
Status fused_classifier_backward(const FusedClassifierBackward<T>& p, Stream stream) {
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) backward_row(p, row);
    });
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                                                        \
  template Status fused_classifier_forward<T>(const FusedClassifierForward<T>&, Stream); \
  template Status fused_classifier_backward<T>(const FusedClassifierBackward<T>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cpu
