// The classifier of fused_classifier.h if the columns of the logits are divided into shards. A shard has the columns
// from first_column on, as a matrix (N, n). For each row, three statistics of the shards suffice for the loss and the
// gradient:
//
//   maximum   the largest logit of the shard
//   sum       the sum of exp(logit - maximum) over the shard, without the target's
//   logit     the target's logit if it is in the shard, otherwise 0
//
// Padding (columns from V on) and rows whose target is ignore_index are left out. If a shard has nothing else, the
// maximum is the lowest finite number and the sum is 0.
//
// For a target outside the vocabulary, the CPU launcher of the statistics returns an error before it writes anything.
// On CUDA the kernel fails a device-side assertion.
#pragma once

#include <cstdint>

#include "device.h"
#include "fused_classifier.h"

namespace gptkernels::GPTKERNELS_DEVICE {

struct ClassifierShard {
  const void* targets;  // (N) int64 or int32
  bool targets_are_int64;
  int64_t rows;          // N
  int64_t width;         // n
  int64_t first_column;  // the number of column 0 in the whole rows
  int64_t vocab_size;    // V, of the whole rows
  int64_t ignore_index;
  int64_t first_row = 0;  // the number of row 0 in error messages
};

template <typename T>
struct ClassifierStatistics : ClassifierShard {
  accumulate_t<T>* statistics;  // (3, N)
  const T* logits;              // (N, n)
};

// Out is T or Fp8Dlogit. With Fp8Dlogit, dlosses must be null, and both matrices aligned to 16 bytes.
template <typename T, typename Out = T>
struct ClassifierFromStatistics : ClassifierShard {
  accumulate_t<T>* losses;            // (N)
  Out* dlogits;                       // (N, n); may be logits if Out is T
  const T* logits;                    // (N, n)
  const accumulate_t<T>* statistics;  // (S, 3, N), of all shards
  int64_t shards;                     // S
  const accumulate_t<T>* dlosses;     // (N) or scalar; null means 1
  bool dlosses_per_row;
};

template <typename T>
Status fused_classifier_statistics(const ClassifierStatistics<T>& p, Stream stream);

template <typename T, typename Out = T>
Status fused_classifier_from_statistics(const ClassifierFromStatistics<T, Out>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
