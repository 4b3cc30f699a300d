// Fills a matrix with normal numbers that depend only on seed, stream and an element's index.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// Element (i, j) has the index first_index + i * row_stride + j. All arithmetic is in float64; a 16-bit T is rounded
// from the float32 number.
template <typename T>
struct NormalNumbers {
  T* out;  // (rows, columns)
  int64_t rows;
  int64_t columns;
  int64_t first_index;
  int64_t row_stride;
  double mean;
  double std;
  uint64_t seed;
  uint64_t stream;
};

template <typename T>
Status normal(const NormalNumbers<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
