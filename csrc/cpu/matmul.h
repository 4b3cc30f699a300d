// Matrix products of float32 by our own kernels, and what 16-bit products need beside torch's BLAS.
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

// out = a @ b, then what is given of the rest, in this order. The same bits for any number of threads.
struct Matmul {
  float* out = nullptr;  // (rows, columns), its rows out_ld apart
  int64_t out_ld = 0;
  Strided a;  // (rows, inner); one of its strides is 1, and of b's
  Strided b;  // (inner, columns)
  int64_t rows;
  int64_t columns;
  int64_t inner;
  bool accumulate = false;          // the product is added to out
  const float* bias = nullptr;      // (columns), added to every row
  float* pre_gelu = nullptr;        // (rows, columns), dense: takes the product, and out becomes GELU of it, by tanh
  const float* dgelu_at = nullptr;  // (rows, columns), dense: out is multiplied by the derivative of GELU there
  float* column_sums = nullptr;     // (columns): takes the sums over out's rows
  void* workspace = nullptr;        // matmul_workspace bytes
};

// Whether matmul computes this product, and faster than torch's BLAS, by sizes and strides alone. The environment
// variable GPTKERNELS_MATMUL, read at each call, decides for it wherever it can (`own`) or nowhere (`blas`).
bool matmul_serves(const Matmul& p);

// The best distance of the rows of an output that other products read: up to 6 % of the product that sums over them.
int64_t matmul_ld(int64_t columns);

// Bytes: partial sums for column_sums.
int64_t matmul_workspace(const Matmul& p);

Status matmul(const Matmul& p, Stream stream);

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
