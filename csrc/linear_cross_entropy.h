// The reduction of a chunked cross-entropy, on the device: the host does not know how many rows take part.
//
// Both sums are over N values in an order that N alone fixes.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// scale = dloss / (the number of targets that are not ignore_index): the gradient of every row's loss under a mean.
// Infinite where no row takes part.
template <typename A>
struct MeanScale {
  A* scale;             // 1
  A* finite;            // 1, or null: takes the same, but 0 where no row takes part
  const A* dloss;       // 1, or null: 1
  const void* targets;  // (N) int64 or int32
  bool targets_are_int64;
  int64_t rows;  // N
  int64_t ignore_index;
};

// loss = scale * (the sum of losses), summed in float64.
template <typename A>
struct LossSum {
  A* loss;          // 1
  const A* losses;  // (N)
  const A* scale;   // 1, or null: 1
  int64_t rows;     // N
};

template <typename A>
Status mean_scale(const MeanScale<A>& p, Stream stream);

template <typename A>
Status loss_sum(const LossSum<A>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
