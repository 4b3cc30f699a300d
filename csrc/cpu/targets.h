// The targets of a classifier's rows. P has targets, targets_are_int64, rows, vocab_size, ignore_index and first_row.
#pragma once

#include <cstdint>
#include <string>

#include "device.h"

namespace gptkernels::cpu {

template <typename P>
int64_t target_of(const P& p, int64_t row) {
  return p.targets_are_int64 ? static_cast<const int64_t*>(p.targets)[row]
                             : static_cast<const int32_t*>(p.targets)[row];
}

template <typename P>
Status check_targets(const P& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t target = target_of(p, row);
    if (target != p.ignore_index && (target < 0 || target >= p.vocab_size))
      return {"target " + std::to_string(target) + " at row " + std::to_string(p.first_row + row) +
              " is outside the vocabulary of " + std::to_string(p.vocab_size)};
  }
  return {};
}

}  // namespace gptkernels::cpu
