// Products of float8 matrices by cuBLASLt. Host code may include this header.
#pragma once

#include "../fp8.h"
#include "matmul.h"

namespace gptkernels::cuda {

// out (rows, columns) = scale_a * scale_b * a (rows, inner) @ b (columns, inner)^T + bias, all dense; inner and columns
// are multiples of kFp8Alignment. The sums are float32 with the tensor cores' precision: with fast_accumulation they
// keep 14 bits of significand throughout, without it the sum of each 128 terms (of one instruction's at least) is added
// in float32.
template <typename T>
struct Fp8Matmul {
  T* out;
  const uint8_t* a;
  const uint8_t* b;
  const float* scale_a;
  const float* scale_b;
  const T* bias;  // (columns), or null
  int64_t rows;
  int64_t columns;
  int64_t inner;
  Fp8Format a_format;
  Fp8Format b_format;  // not both e5m2
  bool fast_accumulation;
};

struct Fp8Plan {
  bool found;  // cuBLASLt has an algorithm
  cublasLtMatmulAlgo_t algorithm;
  int64_t workspace;  // bytes
};

// cuBLASLt's heuristic is asked once a shape; its answer is kept for the life of the process.
template <typename T>
Fp8Plan fp8_matmul_plan(const Fp8Matmul<T>& p, cublasHandle_t handle);

template <typename T>
MatmulStatus fp8_matmul(const Fp8Matmul<T>& p, const Fp8Plan& plan, void* workspace, cublasHandle_t handle,
                        Stream stream);

}  // namespace gptkernels::cuda
