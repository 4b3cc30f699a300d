// The next token of each of B sequences, drawn from the logits of their last tokens.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// x = logits / temperature; the token is the argument of the largest exp(x - max x) / noise among those that top_k and
// top_p leave. If the noise is exponentially distributed, token i is drawn with the probability softmax(x)_i: this is
// how torch.multinomial draws one. Without noise it is the argument of the largest logit. Of equal ones the first.
//
// A row whose largest logit is not finite, or that has a NaN, gives -1.
template <typename T>
struct Sample {
  int64_t* sequences;  // (B, length): row b's token goes to column lengths[b]
  int64_t* lengths;    // (B), from 0 to length - 1: one is added
  const T* logits;     // (B, V), rows logits_stride elements apart
  const float* noise;  // (B, V) or null
  int64_t batch;
  int64_t vocabulary;  // V
  int64_t logits_stride;
  int64_t sequence_length;
  double temperature;  // above 0 with noise
  int64_t top_k;       // the k-th largest x and all not below it are left, from 1 to V
  double top_p;        // of these, the fewest largest whose probabilities sum to top_p of theirs, and all equal to them
};

// A probability as top_p counts it, in units of 2^-31 of the largest: the sums are exact, in any order.
constexpr double kSampleUnits = 2147483648.0;

template <typename T>
Status sample(const Sample<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
