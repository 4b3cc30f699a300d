// Float8 matmuls by cuBLASLt. Host code may include this header.
#pragma once

#include "../../fp8.h"
#include "matmul.h"

namespace gptkernels::cuda {

// out (rows, columns) = alpha * scale_a * scale_b * a (rows, inner) @ b (columns, inner)^T + bias, or + out with
// `accumulate`. out is dense. inner, columns, a_ld and b_ld are multiples of kFp8Alignment. a and b begin at multiples
// of 16 bytes. With fast_accumulation, tensor cores accumulate whole sums with 14 bits of significand. Otherwise they
// sum 128 terms at a time, and these sums are added in float32.
template <typename T>
struct Fp8Matmul {
  T* out;
  const uint8_t* a;
  const uint8_t* b;
  const float* scale_a;  // null means 1
  const float* scale_b;
  const T* bias;  // (columns), or null
  int64_t rows;
  int64_t columns;
  int64_t inner;
  int64_t a_ld;  // distance between rows
  int64_t b_ld;
  Fp8Format a_format;
  Fp8Format b_format;  // a and b are not both e5m2
  bool fast_accumulation;
  bool accumulate;  // excludes a bias
  float alpha;
};

struct Fp8Plan {
  bool found = false;
  bool needs_autotune = false;  // the caller should call fp8_matmul_autotune()
  cublasLtMatmulAlgo_t algorithm = {};
  int64_t workspace = 0;  // bytes
};

// The first call with a ProductKey (algorithm_cache.h) reads the cache or asks cuBLASLt's heuristic. Later calls return
// the same plan, or that of fp8_matmul_autotune().
template <typename T>
Fp8Plan fp8_matmul_plan(const Fp8Matmul<T>& p, cublasHandle_t handle);

// Times cuBLASLt's algorithms (autotune.h), because the heuristic's first one may be 30 % slower than the fastest.
// Caches the chosen algorithm (algorithm_cache.h), which fp8_matmul_plan() then returns. During graph capture, returns
// `plan` without timing. Otherwise synchronises with the stream, and overwrites p.out, which must be scratch memory if
// the matmul accumulates. The workspace has kLargestWorkspace bytes.
template <typename T>
Fp8Plan fp8_matmul_autotune(const Fp8Matmul<T>& p, const Fp8Plan& plan, void* workspace, cublasHandle_t handle,
                            Stream stream);

template <typename T>
MatmulStatus fp8_matmul(const Fp8Matmul<T>& p, const Fp8Plan& plan, void* workspace, cublasHandle_t handle,
                        Stream stream);

}  // namespace gptkernels::cuda
