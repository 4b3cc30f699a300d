// Matmuls of row-major matrices with an epilogue (bias, GELU, GELU's gradient), by cuBLAS and cuBLASLt, or by our own
// kernel where it is faster (gemm/sm90_gelu.h). Host code may include this header.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include "cuda/device.h"

namespace gptkernels::cuda {

// out (rows, columns) = alpha * a (rows, inner) @ b (inner, columns), for each of `batches` batches. Sums are in
// float32, or float64 for float64. float32 matmuls use TF32 if the handle's math mode allows it. Element (i, j) of a
// matrix is at i * ld + j; of a transposed matrix it is at j * ld + i. The pointers below `alpha` may be null. With an
// epilogue (bias, pre_gelu, dgelu_at, column_sums), alpha and batches are 1 and out is dense. dgelu_at excludes bias
// and pre_gelu. wide_out and accumulate exclude an epilogue.
template <typename T>
struct Matmul {
  T* out;
  const T* a;
  const T* b;
  int64_t rows;
  int64_t columns;
  int64_t inner;
  int64_t out_ld;
  int64_t a_ld;
  int64_t b_ld;
  bool a_transposed;
  bool b_transposed;
  int64_t batches;
  int64_t out_stride;  // distance between batches
  int64_t a_stride;
  int64_t b_stride;
  double alpha;
  const T* bias;      // (columns): added to every row
  T* pre_gelu;        // (rows, columns), dense: receives the matmul plus bias; out is the tanh GELU of pre_gelu
  const T* dgelu_at;  // (rows, columns), dense: out is multiplied by GELU's derivative at these values
  accumulate_t<T>* wide_out = nullptr;  // if not null, receives the unrounded result in place of out
  bool accumulate = false;              // add the matmul to out, or to wide_out if that is not null (beta = 1)
  T* column_sums = nullptr;             // (columns), with dgelu_at: receives out's sums over the rows if plan.sm90
};

// The plan of a matmul: the library or kernel that computes it. cuBLASLt's heuristic is asked once per shape; the
// answer is cached for the process.
struct MatmulPlan {
  // At most one of `cublaslt` and `sm90` is true. With cublaslt, cublasLtMatmul computes the matmul and the epilogue.
  // With sm90, our own kernel (gemm/sm90_gelu.h) computes the matmul, the epilogue and column_sums. If both are false,
  // cuBLAS (cublasGemmStridedBatchedEx) computes the matmul, and our kernel adds the bias. The caller computes
  // column_sums unless sm90 is true.
  bool cublaslt;
  bool separate_gelu;  // our kernels compute GELU or its gradient after the matmul
  bool sm90;
  cublasLtMatmulAlgo_t algorithm;
  int64_t workspace;  // bytes

  // Returns whether cuBLAS computes the matmul, which then depends on the state of its handle.
  bool needs_cublas() const { return !cublaslt && !sm90; }
};

constexpr int64_t kLargestWorkspace = 32 << 20;  // bytes that an algorithm of cuBLASLt may use

struct MatmulStatus {
  cublasStatus_t cublas = CUBLAS_STATUS_SUCCESS;
  cudaError_t cuda = cudaSuccess;

  bool ok() const { return cublas == CUBLAS_STATUS_SUCCESS && cuda == cudaSuccess; }
};

// Dispatches a matmul: chooses the library or kernel, the epilogue and the algorithm.
template <typename T>
MatmulPlan matmul_plan(const Matmul<T>& p, cublasHandle_t handle);

// Computes the matmul as the plan says. If plan.needs_cublas(), the handle's stream must be `stream`.
template <typename T>
MatmulStatus matmul(const Matmul<T>& p, const MatmulPlan& plan, void* workspace, cublasHandle_t handle, Stream stream);

}  // namespace gptkernels::cuda
