// cuBLASLt's algorithms for a matmul, and the algorithm cache. The cache stores for each float8 matmul the algorithm
// that autotuning found to be the fastest. It is kept in a file in the user's cache folder, so that later processes use
// the same algorithms and get the same bits. Other matmuls use the first algorithm that cuBLASLt's heuristic proposes.
// This is host code.
//
// The name of the file contains everything else that an algorithm depends on: the GPU, the driver and cuBLASLt's
// version. The environment variable GPTKERNELS_MATMUL_CHOICES names another folder. If the variable is "off", nothing
// is timed, and cuBLASLt's heuristic chooses the algorithms.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

namespace gptkernels::cuda {

// Everything that the choice of an algorithm may depend on. The sizes are the members of Matmul with the same names.
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

// Returns the largest power of two up to 256 that divides the address. Some algorithms require an alignment of 16
// bytes.
inline uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return static_cast<uint32_t>(address & -address);
}

struct LtAlgorithm {
  cublasLtMatmulAlgo_t algo;
  int64_t workspace;  // bytes
};

// The descriptors of a call of cublasLtMatmul. These opaque structures are on the stack, and are initialised with a few
// dozen stores. cublasLtMatmulDescCreate() would instead allocate memory.
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

// Returns how many terms cuBLASLt's kernels for Hopper read in one step of 128 bytes.
int64_t terms_per_step(cudaDataType_t type);

// Returns the algorithms that cuBLASLt's heuristic proposes, the best first: at most `most`, and at most
// kMaxAlgorithms. Algorithms that drop terms of a sum are left out. If all proposed algorithms drop terms, the first
// one that cuBLASLt supports without split-K is returned.
std::vector<LtAlgorithm> heuristic_algorithms(LtProblem problem, const ProductKey& key, cublasLtHandle_t handle,
                                              int most);

// Returns whether the algorithm supports the matmul with the algorithm's workspace, which is at most
// kLargestWorkspace, and adds all terms of its sums.
bool supports(const LtProblem& problem, const ProductKey& key, const LtAlgorithm& algorithm, cublasLtHandle_t handle);

// Returns whether float8 matmuls may be timed.
bool autotune_enabled();

// Returns the algorithm that an earlier call of cache_algorithm, in this process or another, has stored. The caller
// must check that the algorithm supports the matmul, because a file can be damaged.
std::optional<LtAlgorithm> cached_algorithm(const ProductKey& key);

// Stores an algorithm in this process's cache, and in the cache file on disk if that can be written.
void cache_algorithm(const ProductKey& key, const LtAlgorithm& algorithm);

}  // namespace gptkernels::cuda
