// cuBLASLt's algorithms for a matmul, and the cache of the algorithms that autotuning found for float8 matmuls. The
// cache is a file in the user's cache folder, named after the GPU, the driver and cuBLASLt's version, so that later
// processes get the same bits. Other matmuls use the first algorithm of cuBLASLt's heuristic. Host code.
//
// GPTKERNELS_MATMUL_CHOICES names another folder; if it is "off", nothing is timed and the heuristic chooses.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

namespace gptkernels::cuda {

// All that the choice of an algorithm may depend on. The sizes are Matmul's members of the same names.
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

// The largest power of two up to 256 that divides the address.
inline uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return static_cast<uint32_t>(address & -address);
}

struct LtAlgorithm {
  cublasLtMatmulAlgo_t algo;
  int64_t workspace;  // bytes
};

// On the stack, initialised with a few dozen stores, where cublasLtMatmulDescCreate() would allocate memory.
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

// cuBLASLt's kernels for Hopper read 128 bytes per step.
int64_t terms_per_step(cudaDataType_t type);

// The heuristic's algorithms, the best first, at most min(most, kMaxAlgorithms), without those that drop terms of a
// sum. If all drop terms, the first one that cuBLASLt supports without split-K is returned.
std::vector<LtAlgorithm> heuristic_algorithms(LtProblem problem, const ProductKey& key, cublasLtHandle_t handle,
                                              int most);

// Whether the workspace is at most kLargestWorkspace, all terms are added, and cuBLASLt supports the algorithm.
bool supports(const LtProblem& problem, const ProductKey& key, const LtAlgorithm& algorithm, cublasLtHandle_t handle);

bool autotune_enabled();

// The caller must check that the algorithm supports the matmul, because a file can be damaged.
std::optional<LtAlgorithm> cached_algorithm(const ProductKey& key);

// Stores the algorithm for this process and, if the file can be written, for later ones.
void cache_algorithm(const ProductKey& key, const LtAlgorithm& algorithm);

}  // namespace gptkernels::cuda
