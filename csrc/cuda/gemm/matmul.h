// Matmuls of row-major matrices with an epilogue (bias, GELU, GELU's gradient). Host code may include this header.
#pragma once

#include "cublas.h"
#include "cuda/device.h"

namespace gptkernels::cuda {

// out (rows, columns) = alpha * a (rows, inner) @ b (inner, columns) per batch. Sums are float32 (float64 for float64).
// Float32 is multiplied as TF32 if the handle's math mode allows it. Element (i, j) is at i * ld + j, or at j * ld + i
// in a transposed matrix. The pointers below `alpha` may be null. An epilogue (bias, pre_gelu, dgelu_at, column_sums)
// requires alpha = batches = 1 and a dense out, and excludes wide_out and accumulate. dgelu_at excludes bias and
// pre_gelu.
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
  const T* bias;      // (columns)
  T* pre_gelu;        // (rows, columns), dense: receives the matmul plus bias; out is the tanh GELU of pre_gelu
  const T* dgelu_at;  // (rows, columns), dense: out is multiplied by GELU's derivative at these values
  accumulate_t<T>* wide_out = nullptr;  // if not null, receives the unrounded result in place of out
  bool accumulate = false;              // add the matmul to out, or to wide_out if that is not null
  T* column_sums = nullptr;             // (columns), with dgelu_at: receives out's sums over the rows if plan.sm90
};

// cuBLASLt's plans are kept for each ProductKey (algorithm_cache.h), so its heuristic is asked only once for each.
struct MatmulPlan {
  // If `cublaslt`, cublasLtMatmul computes the matmul and the epilogue. If `sm90`, our kernel (gemm/sm90_gelu.h)
  // computes both, and column_sums, which the caller computes otherwise. If neither, cublasGemmStridedBatchedEx
  // computes the matmul. `cublaslt` and `sm90` are never both true.
  bool cublaslt = false;
  bool separate_gelu = false;  // the epilogue is without GELU or its gradient, which our kernels compute afterwards
  bool separate_bias = false;  // our kernel first writes the bias to every row of out, and the matmul adds to it
  bool sm90 = false;
  cublasLtMatmulAlgo_t algorithm = {};
  int64_t workspace = 0;  // bytes

  // Whether matmul() calls cuBLAS, which uses the stream and the math mode of the handle.
  bool needs_cublas() const { return !cublaslt && !sm90; }
};

constexpr int64_t kLargestWorkspace = 32 << 20;  // bytes

struct MatmulStatus {
  cublasStatus_t cublas = CUBLAS_STATUS_SUCCESS;
  cudaError_t cuda = cudaSuccess;

  bool ok() const { return cublas == CUBLAS_STATUS_SUCCESS && cuda == cudaSuccess; }
};

template <typename T>
MatmulPlan matmul_plan(const Matmul<T>& p, cublasHandle_t handle);

// If plan.needs_cublas(), the handle's stream must be `stream`.
template <typename T>
MatmulStatus matmul(const Matmul<T>& p, const MatmulPlan& plan, void* workspace, cublasHandle_t handle, Stream stream);

}  // namespace gptkernels::cuda
