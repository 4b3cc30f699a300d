// Sums the rows of a matrix. The sum of the rows of dout is the gradient of a bias that is added to every row.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T>
struct ColumnSum {
  T* out;           // (C)
  const T* x;       // (N, C)
  void* workspace;  // column_sum_workspace<T>(rows, width) bytes
  int64_t rows;     // N
  int64_t width;    // C
};

// Returns the size of the workspace in bytes. The workspace holds partial sums over groups of rows.
template <typename T>
int64_t column_sum_workspace(int64_t rows, int64_t width);

template <typename T>
Status column_sum(const ColumnSum<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
