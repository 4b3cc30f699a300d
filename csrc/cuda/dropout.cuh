// Attention's dropout on the device.
#pragma once

#include "../attention.h"
#include "../philox.h"

namespace gptkernels::cuda {

// Dropout with its numbers read from the device.
struct DropoutDraw {
  bool any = false;  // dropout: also of so small a probability that nothing is dropped
  uint32_t threshold = 0;
  int64_t seed = 0;
  int64_t offset = 0;
  double keep_scale = 1;  // 1 / (1 - probability); 0 where everything is dropped

  __device__ explicit DropoutDraw(const AttentionDropout& dropout) {
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
    return dropout_bits(dropout_words(seed, offset, static_cast<uint32_t>(head), group.row, group.column),
                        group.slot) >= threshold;
  }
  // Of a word's two elements: those of its lower and its upper 16 bits.
  __device__ bool keeps_lower(uint32_t word) const { return word << 16 >= threshold << 16; }
  __device__ bool keeps_upper(uint32_t word) const { return word >= threshold << 16; }
};

}  // namespace gptkernels::cuda
