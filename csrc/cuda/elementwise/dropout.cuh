#pragma once

#include "../../dropout.h"
#include "../../philox.h"

namespace gptkernels::cuda {

// Dropout of attention's probabilities.
struct DropoutDraw {
  bool any = false;  // true for any positive probability
  uint32_t threshold = 0;
  int64_t seed = 0;
  int64_t offset = 0;
  double keep_scale = 1;  // 0 if the probability is 1
  uint32_t first_group_row;
  uint32_t first_head;
  uint32_t other_heads;

  __device__ explicit DropoutDraw(const DropoutArguments& dropout)
      : first_group_row(static_cast<uint32_t>(dropout.first_query / 2)),
        first_head(static_cast<uint32_t>(dropout.first_head)),
        other_heads(static_cast<uint32_t>(dropout.other_heads)) {
    if (dropout.probability <= 0) return;
    any = true;
    threshold = dropout_threshold(dropout.probability);
    seed = *dropout.seed;
    offset = *dropout.offset;
    keep_scale = dropout.probability < 1 ? 1 / (1 - dropout.probability) : 0;
  }
  // `head` is batch * NH + h.
  __device__ uint32_t head_number(int64_t head, int64_t batch) const {
    return static_cast<uint32_t>(head) + first_head + static_cast<uint32_t>(batch) * other_heads;
  }
  __device__ bool drops() const { return any; }
  __device__ bool keeps(int64_t head, int64_t batch, int64_t i, int64_t j) const {
    const DropoutGroup group = dropout_group(i, j);
    return sixteen_bits(
               dropout_words(seed, offset, head_number(head, batch), first_group_row + group.row, group.column),
               group.slot) >= threshold;
  }
  __device__ bool keeps_lower(uint32_t word) const { return word << 16 >= threshold << 16; }
  __device__ bool keeps_upper(uint32_t word) const { return word >= threshold << 16; }
};

// All kernels must round the product of an element and dropout's factor in the same way. In some kernels, the compiler
// would fuse the multiplication with a following addition.
__device__ inline float rounded_product(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ inline double rounded_product(double a, double b) {
  return __dmul_rn(a, b);
}

template <typename A, bool kOptional>
class DenseDropoutDraw;

// Dropout of contiguous data. A kernel calls draw() early, so that the loads of seed and offset are in flight together
// with its other loads. If kOptional, a probability of 0 means no dropout, and seed and offset are not read.
template <typename A, bool kOptional = false>
struct DenseDropout {
  static constexpr bool kOn = true;
  const int64_t* seed;
  const int64_t* offset;
  uint32_t threshold;
  A keep_scale;
  int64_t first_index;

  explicit DenseDropout(const DropoutArguments& dropout)
      : seed(dropout.seed),
        offset(dropout.offset),
        threshold(dropout_threshold(dropout.probability)),
        first_index(dropout.first_index) {
    // If the probability rounds to 1, the threshold is 0x10000. The kernels compare only its lower 16 bits, which are
    // 0, and would keep every element, so the factor is 0.
    keep_scale = threshold > 0xFFFFu ? A(0) : A(1 / (1 - dropout.probability));
    if (kOptional && dropout.probability == 0) seed = nullptr;
  }
  __device__ bool on() const { return !kOptional || seed != nullptr; }
  __device__ DenseDropoutDraw<A, kOptional> draw() const { return DenseDropoutDraw<A, kOptional>(*this); }
};

template <typename A>
using OptionalDropout = DenseDropout<A, true>;

template <typename A, bool kOptional = false>
class DenseDropoutDraw {
 public:
  __device__ explicit DenseDropoutDraw(const DenseDropout<A, kOptional>& dropout)
      : on_(dropout.on()),
        seed_(on_ ? *dropout.seed : 0),
        offset_(on_ ? *dropout.offset : 0),
        threshold_(dropout.threshold << 16),
        keep_scale_(dropout.keep_scale),
        first_index_(dropout.first_index) {}

  // N is 1, 2, 4 or 8. `element` is the first element's flat index in the call's tensor, a multiple of N.
  template <int N>
  __device__ void apply(A (&x)[N], int64_t element) const {
    static_assert(kDenseGroup % N == 0);
    if (!on_) return;
    const auto index = static_cast<uint64_t>(first_index_ + element);
    PhiloxWords words = dense_dropout_words(seed_, offset_, index / kDenseGroup);
    uint32_t (&word)[4] = words.word;
    // One Philox call yields the bits of 8 elements; those of the N elements move to the front.
    if (N < 8 && (element & 4)) word[0] = word[2], word[1] = word[3];
    if (N < 4 && (element & 2)) word[0] = word[1];
    if (N < 2 && (element & 1)) word[0] >>= 16;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t bits = k % 2 == 0 ? word[k / 2] << 16 : word[k / 2];  // in the upper half
      x[k] = rounded_product(x[k], bits >= threshold_ ? keep_scale_ : A(0));
    }
  }

 private:
  bool on_;
  int64_t seed_;
  int64_t offset_;
  uint32_t threshold_;  // in the upper half
  A keep_scale_;
  int64_t first_index_;
};

struct NoDropout {
  static constexpr bool kOn = false;
  __device__ NoDropout draw() const { return {}; }
  template <typename A, int N>
  __device__ void apply(A (&)[N], int64_t) const {}
};

}  // namespace gptkernels::cuda
