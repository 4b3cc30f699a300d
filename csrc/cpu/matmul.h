#pragma once

#include "device.h"
#include "simd.h"

namespace gptkernels::cpu {

struct Strided {
  const float* data;
  int64_t row;
  int64_t column;
};

// out = a @ b, then the optional operations below, in their order. One of a's two strides is 1, and one of b's.
struct Matmul {
  float* out = nullptr;  // (rows, columns), rows out_ld apart
  int64_t out_ld = 0;
  Strided a;  // (rows, inner)
  Strided b;  // (inner, columns)
  int64_t rows;
  int64_t columns;
  int64_t inner;
  bool accumulate = false;
  const float* bias = nullptr;      // (columns)
  float* pre_gelu = nullptr;        // (rows, columns), dense: a @ b + bias; out is its tanh GELU
  const float* dgelu_at = nullptr;  // (rows, columns), dense: out is multiplied by GELU'(dgelu_at)
  float* column_sums = nullptr;     // (columns): over out's rows
  void* workspace = nullptr;        // matmul_workspace bytes
};

// True if matmul() supports `p` and should be faster than torch's BLAS. The environment variable GPTKERNELS_MATMUL,
// read at each call, forces (`own`) or forbids (`blas`) matmul().
bool matmul_supports(const Matmul& p);

// Returns the row stride of an output that later matmuls read. Padded rows avoid cache conflicts, which make matmuls
// that sum over the rows up to 6 % slower.
int64_t matmul_ld(int64_t columns);

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
