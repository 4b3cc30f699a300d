#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T>
struct ColumnSum {
  T* out;      // (C)
  const T* x;  // (N, C)
  void* workspace;
  int64_t rows;   // N
  int64_t width;  // C
};

template <typename T>
int64_t column_sum_workspace(int64_t rows, int64_t width);

template <typename T>
Status column_sum(const ColumnSum<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
