// Float32 matmuls by this package's kernels, and conversions to float32 of 16-bit results of torch's BLAS.
#pragma once

#include "device.h"
#include "simd.h"

namespace gptkernels::cpu {

// Element (i, j) is at data[i * row + j * column].
struct Strided {
  const float* data;
  int64_t row;
  int64_t column;
};

// out = a @ b, followed by the optional operations of the epilogue in the order below. The bits do not depend on the
// number of threads.
struct Matmul {
  float* out = nullptr;  // (rows, columns), rows out_ld apart
  int64_t out_ld = 0;
  Strided a;  // (rows, inner); a stride is 1
  Strided b;  // (inner, columns); a stride is 1
  int64_t rows;
  int64_t columns;
  int64_t inner;
  bool accumulate = false;
  const float* bias = nullptr;      // (columns), added to every row
  float* pre_gelu = nullptr;        // (rows, columns), dense: receives a @ b + bias; out is its tanh GELU
  const float* dgelu_at = nullptr;  // (rows, columns), dense: out is multiplied by GELU's derivative at these values
  float* column_sums = nullptr;     // (columns): sums over out's rows
  void* workspace = nullptr;        // matmul_workspace bytes
};

// Whether matmul() supports `p` and should be faster than torch's BLAS. The environment variable GPTKERNELS_MATMUL,
// read at each call, selects matmul() for every `p` that it supports (`own`) or for none (`blas`).
bool matmul_supports(const Matmul& p);

// The best row stride for an output that later matmuls read. Padding avoids cache conflicts, which slow down matmuls
// that sum over the rows by up to 6 %.
int64_t matmul_ld(int64_t columns);

// In bytes, for partial sums of column_sums.
int64_t matmul_workspace(const Matmul& p);

Status matmul(const Matmul& p, Stream stream);

template <typename T>
void widen(float* wide, const T* narrow, int64_t size, Stream stream) {
  parallel_for(stream, size, 1, [&](int64_t begin, int64_t end) {
    vectorised([&] {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) wide[i] = static_cast<float>(narrow[i]);
    });
  });
}

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
