#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// Let x = logits / temperature. The token is argmax_i exp(x_i - max x) / noise_i over the elements i that top_k and
// top_p keep. If the noise is exponentially distributed, token i is drawn with a probability proportional to exp(x_i),
// as by torch.multinomial. Without noise, the token is the argmax of the logits. Ties give the lowest index. A row with
// a NaN, or whose largest x is not finite, gives -1.
template <typename T>
struct Sample {
  int64_t* sequences;  // (B, length); the token of row b is written to column lengths[b]
  int64_t* lengths;    // (B), each below `length`; incremented
  const T* logits;     // (B, V), rows logits_stride apart
  const float* noise;  // (B, V) or null
  int64_t batch;
  int64_t vocabulary;  // V
  int64_t logits_stride;
  int64_t sequence_length;
  double temperature;  // above 0; ignored without noise
  int64_t top_k;       // keeps every x that is at least the top_k-th largest x
  // The x that top_k keeps are sorted in descending order. top_p keeps the shortest prefix that has at least the
  // fraction top_p of their total probability, and every x that equals the last one in this prefix.
  double top_p;
};

// For top_p, probabilities are rounded to integers in units of 2^-31 times the largest probability, so that their sum
// is exact in any order.
constexpr double kSampleUnits = 2147483648.0;

template <typename T>
Status sample(const Sample<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
