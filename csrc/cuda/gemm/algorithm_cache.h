// The choice of cuBLASLt's algorithms. Large float8 matmuls use the algorithms that autotuning chose, other matmuls the
// heuristic's first one that adds all terms and rounds once. The autotuned algorithms are cached in a file in the
// user's cache folder, so that later processes compute the same bits. The file's name contains the GPU and the versions
// of the driver and of cuBLASLt. Host code.
//
// GPTKERNELS_MATMUL_CHOICES names another folder; if it is "off", nothing is timed and the heuristic chooses.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

#include "cublas.h"
#include "cuda/device.h"

namespace gptkernels::cuda {

template <typename T>
constexpr cudaDataType_t kDataType = CUDA_R_32F;
template <>
constexpr cudaDataType_t kDataType<double> = CUDA_R_64F;
template <>
constexpr cudaDataType_t kDataType<bfloat16> = CUDA_R_16BF;
template <>
constexpr cudaDataType_t kDataType<float16> = CUDA_R_16F;

// A cuBLAS handle is a cuBLASLt handle (cuBLAS documentation, cublasLtHandle_t).
inline cublasLtHandle_t lt(cublasHandle_t handle) {
  return reinterpret_cast<cublasLtHandle_t>(handle);
}

// The sizes are Matmul's members of the same names.
struct ProductKey {
  int device;
  cudaDataType_t type;    // of operand a
  cudaDataType_t b_type;  // differs from `type` only in float8 matmuls
  cudaDataType_t out_type;
  cublasComputeType_t compute;
  cublasLtEpilogue_t epilogue;
  int64_t rows, columns, inner, out_ld, a_ld, b_ld;
  bool a_transposed, b_transposed, accumulate, fast_accumulation;
  uint32_t out_alignment, a_alignment, b_alignment, bias_alignment, gelu_alignment;
  int64_t batches = 1;

  auto operator<=>(const ProductKey&) const = default;
};

inline uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return static_cast<uint32_t>(address & -address);
}

struct LtAlgorithm {
  cublasLtMatmulAlgo_t algo = {};
  int64_t workspace = 0;  // bytes
};

// Opaque structs on the stack, because cublasLtMatmulDescCreate() allocates memory.
struct LtProblem {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t out;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;  // the first failure

  void check(cublasStatus_t next) {
    if (status == CUBLAS_STATUS_SUCCESS) status = next;
  }

  template <typename V>
  void set(cublasLtMatmulDescAttributes_t attribute, V value) {
    check(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)));
  }
};

constexpr int kMaxAlgorithms = 24;

// The number of a sum's terms in 128 bytes, which cuBLASLt's kernels for Hopper read per step.
int64_t terms_per_step(cudaDataType_t type);

// Returns up to `most` of the heuristic's proposals, the best first, without algorithms that drop terms of a sum or
// round a 16-bit sum before they add the bias. If this leaves none, returns only the first proposal that cuBLASLt also
// supports without split-K, and switches its split-K off.
std::vector<LtAlgorithm> heuristic_algorithms(LtProblem problem, const ProductKey& key, cublasLtHandle_t handle,
                                              int most);

// Returns false if cuBLASLt does not support the algorithm for this problem, if the algorithm drops terms or rounds
// before it adds the bias, or if its `workspace` is smaller than cuBLASLt requires or larger than kLargestWorkspace.
bool supports(const LtProblem& problem, const ProductKey& key, const LtAlgorithm& algorithm, cublasLtHandle_t handle);

bool autotune_enabled();

// The caller must check that the algorithm supports the matmul, because the file can be damaged.
std::optional<LtAlgorithm> cached_algorithm(const ProductKey& key);

void cache_algorithm(const ProductKey& key, const LtAlgorithm& algorithm);

}  // namespace gptkernels::cuda
