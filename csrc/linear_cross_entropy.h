// The mean of the losses is computed on the device, because the host does not know how many targets are ignored. The
// order of the additions depends on N only.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// scale = dloss / (number of targets that are not ignore_index); infinite if all targets are ignored.
template <typename A>
struct MeanScale {
  A* scale;             // scalar
  A* finite;            // scale, but 0 if all targets are ignored; or null
  const A* dloss;       // scalar; null means 1
  const void* targets;  // (N) int64 or int32
  bool targets_are_int64;
  int64_t rows;  // N
  int64_t ignore_index;
};

template <typename A>
struct LossSum {
  A* loss;          // scalar
  const A* losses;  // (N)
  const A* scale;   // scalar; null means 1
  int64_t rows;     // N
};

template <typename A>
Status mean_scale(const MeanScale<A>& p, Stream stream);

template <typename A>
Status loss_sum(const LossSum<A>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
