// Dropout on the device: of attention's probabilities, and of dense data.
#pragma once

#include "../dropout.h"
#include "../philox.h"

namespace gptkernels::cuda {

// Dropout of attention's probabilities, with seed and offset loaded from device memory.
struct DropoutDraw {
  bool any = false;  // whether there is dropout, even if its probability is so small that nothing is dropped
  uint32_t threshold = 0;
  int64_t seed = 0;
  int64_t offset = 0;
  double keep_scale = 1;  // 1 / (1 - probability); 0 where everything is dropped

  __device__ explicit DropoutDraw(const DropoutArguments& dropout) {
    if (dropout.probability <= 0) return;
    any = true;
    threshold = dropout_threshold(dropout.probability);
    seed = *dropout.seed;
    offset = *dropout.offset;
    keep_scale = dropout.probability < 1 ? 1 / (1 - dropout.probability) : 0;
  }
  __device__ bool drops() const { return any; }
  __device__ bool keeps(int64_t head, int64_t i, int64_t j) const {
    const DropoutGroup group = dropout_group(i, j);
    return sixteen_bits(dropout_words(seed, offset, static_cast<uint32_t>(head), group.row, group.column),
                        group.slot) >= threshold;
  }
  // Whether the elements are kept whose random bits are the lower and the upper 16 bits of a word.
  __device__ bool keeps_lower(uint32_t word) const { return word << 16 >= threshold << 16; }
  __device__ bool keeps_upper(uint32_t word) const { return word >= threshold << 16; }
};

template <typename A>
class DenseDropoutDraw;

// Dropout of dense data, as a kernel's argument; the host has computed what it can. draw() loads seed and offset: a
// kernel calls it early, so that these loads are in flight together with the others.
template <typename A>
struct DenseDropout {
  static constexpr bool kOn = true;
  const int64_t* seed;
  const int64_t* offset;
  uint32_t threshold;
  A keep_scale;

  explicit DenseDropout(const DropoutArguments& dropout)
      : seed(dropout.seed), offset(dropout.offset), threshold(dropout_threshold(dropout.probability)) {
    // A threshold above 16 bits keeps nothing. The kernels compare only 16 bits, so the factor is 0 then.
    keep_scale = threshold > 0xFFFFu ? A(0) : A(1 / (1 - dropout.probability));
  }
  __device__ DenseDropoutDraw<A> draw() const { return DenseDropoutDraw<A>(*this); }
};

// The same, with seed and offset loaded.
template <typename A>
class DenseDropoutDraw {
 public:
  __device__ explicit DenseDropoutDraw(const DenseDropout<A>& dropout)
      : seed_(*dropout.seed),
        offset_(*dropout.offset),
        threshold_(dropout.threshold << 16),
        keep_scale_(dropout.keep_scale) {}

  // Multiplies N neighbouring elements by 0 or by 1 / (1 - probability). `element` is the first one's number, a
  // multiple of N; N is 1, 2, 4 or 8.
  template <int N>
  __device__ void apply(A (&x)[N], int64_t element) const {
    static_assert(kDenseGroup % N == 0);
    PhiloxWords words = dense_dropout_words(seed_, offset_, static_cast<uint64_t>(element) / kDenseGroup);
    uint32_t (&word)[4] = words.word;
    // Moves the N elements' bits to the beginning.
    if (N < 8 && (element & 4)) word[0] = word[2], word[1] = word[3];
    if (N < 4 && (element & 2)) word[0] = word[1];
    if (N < 2 && (element & 1)) word[0] >>= 16;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t bits = k % 2 == 0 ? word[k / 2] << 16 : word[k / 2];  // in the upper half
      x[k] *= bits >= threshold_ ? keep_scale_ : A(0);
    }
  }

 private:
  int64_t seed_;
  int64_t offset_;
  uint32_t threshold_;  // in the upper half
  A keep_scale_;
};

// Takes the place of both where a kernel is compiled without dropout.
struct NoDropout {
  static constexpr bool kOn = false;
  __device__ NoDropout draw() const { return {}; }
  template <typename A, int N>
  __device__ void apply(A (&)[N], int64_t) const {}
};

}  // namespace gptkernels::cuda
