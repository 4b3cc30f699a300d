// Products of row-major matrices, with fused bias and GELU: by cuBLAS and cuBLASLt, or by our own kernel where it is
// faster (gemm/sm90_gelu.h). Host code may include this header.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include "cuda/device.h"

namespace gptkernels::cuda {

// out (rows, columns) = alpha * a (rows, inner) @ b (inner, columns), sums in float32 (float64 for float64; TF32 where
// the handle's math mode says so), `batches` times. Element (i, j) of a matrix is at i * ld + j, of a transposed one at
// j * ld + i. The pointers below `alpha` may be null. Where one is not, alpha and batches are 1 and out is dense;
// dgelu_at excludes bias and pre_gelu. With wide_out or accumulate there is no epilogue.
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
  int64_t out_stride;  // from batch to batch
  int64_t a_stride;
  int64_t b_stride;
  double alpha;
  const T* bias;                        // (columns): added to every row
  T* pre_gelu;                          // (rows, columns), dense: takes the product, and out becomes tanh-GELU of it
  const T* dgelu_at;                    // (rows, columns), dense: the product is multiplied by GELU's derivative there
  accumulate_t<T>* wide_out = nullptr;  // not null: takes the product, unrounded, in place of out
  bool accumulate = false;              // add the product to what is there (beta = 1)
  T* column_sums = nullptr;             // (columns), beside dgelu_at: takes out's sums over the rows, if plan.own
};

// How a product is computed. cuBLASLt's heuristic is asked once per shape; the answer is cached for the process. For a
// large product on the tensor cores it has several answers, and its first is up to a fifth slower than the best: these
// are timed, once per shape and user (gemm/algorithm_cache.h).
struct MatmulPlan {
  bool fused;     // by cublasLtMatmul, with an epilogue if any; else by cublasGemmEx, and our kernel adds the bias
  bool own_gelu;  // GELU and its gradient are computed by our kernels, after the product
  bool untimed;   // matmul_time may find a faster one
  bool own;       // by our own kernel (gemm/sm90_gelu.h) instead, with column_sums; else the caller sums
  cublasLtMatmulAlgo_t algorithm;
  int64_t workspace;  // bytes of scratch

  // Whether cuBLAS computes it, by the state of its handle; cuBLASLt and our own kernel read none.
  bool needs_cublas() const { return !fused && !own; }
};

constexpr int64_t kMatmulTimingWorkspace = 32 << 20;

struct MatmulStatus {
  cublasStatus_t cublas = CUBLAS_STATUS_SUCCESS;
  cudaError_t cuda = cudaSuccess;

  bool ok() const { return cublas == CUBLAS_STATUS_SUCCESS && cuda == cudaSuccess; }
};

template <typename T>
MatmulPlan matmul_plan(const Matmul<T>& p, cublasHandle_t handle);

// Times cuBLASLt's algorithms for an untimed plan's product and returns the plan with the fastest, which matmul_plan
// then has too. This is the one function here that waits for the device. The products go to `out`, which has the layout
// of p's and may be that, unless p accumulates; pre_gelu is written. The workspace has kMatmulTimingWorkspace bytes.
// While the stream is captured it returns the plan as it is.
template <typename T>
MatmulPlan matmul_time(const Matmul<T>& p, const MatmulPlan& plan, void* out, void* workspace, cublasHandle_t handle,
                       Stream stream);

// The handle's own stream must be `stream` where the plan needs cuBLAS.
template <typename T>
MatmulStatus matmul(const Matmul<T>& p, const MatmulPlan& plan, void* workspace, cublasHandle_t handle, Stream stream);

}  // namespace gptkernels::cuda
