#pragma once

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {

inline void check_logits_and_targets(const char* op, const Tensor& logits, const Tensor& targets) {
  check_dim_at_least(op, "logits", logits, 1);
  check_floating(op, "logits", logits);
  check_index(op, "targets", targets);
  check_same_device(op, "targets", targets, "logits", logits);
  check_shape(op, "targets", targets, leading_shape(logits));
}

inline void check_dlosses(const char* op, const OptionalTensor& dlosses, const char* logits_name,
                          const Tensor& logits) {
  if (!dlosses) return;
  check_same_device(op, "dlosses", *dlosses, logits_name, logits);
  check_dtype(op, "dlosses", *dlosses, accumulate_dtype(logits));
  if (dlosses->dim() != 0) check_shape(op, "dlosses", *dlosses, leading_shape(logits));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
