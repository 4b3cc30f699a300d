// What a matrix product needs beside torch's BLAS: 16-bit results added up in float32.
#pragma once

#include "device.h"
#include "simd.h"

namespace gptkernels::cpu {

// wide = narrow.
template <typename T>
void widen(float* wide, const T* narrow, int64_t size, Stream stream) {
  parallel_for(stream, size, 1, [&](int64_t begin, int64_t end) {
    vectorised([&] {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) wide[i] = static_cast<float>(narrow[i]);
    });
  });
}

// wide += narrow.
template <typename T>
void add_widened(float* wide, const T* narrow, int64_t size, Stream stream) {
  parallel_for(stream, size, 1, [&](int64_t begin, int64_t end) {
    vectorised([&] {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) wide[i] += static_cast<float>(narrow[i]);
    });
  });
}

}  // namespace gptkernels::cpu
