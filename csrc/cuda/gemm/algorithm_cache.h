// cuBLASLt's algorithm for a product, chosen by timing and kept in a file of the user's, so that later processes have
// the same algorithms, and with them the same bits. Host code.
//
// The file is named after all that an algorithm depends on besides the product: the GPU, the driver, cuBLASLt's
// version. GPTKERNELS_MATMUL_CHOICES is the folder it is in (by default gptkernels in the user's cache folder), or
// "off": then nothing is timed, and the heuristic decides.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

namespace gptkernels::cuda {

// Everything that cuBLASLt's answer may depend on. The sizes are those of Matmul.
struct ProductKey {
  int device;
  cudaDataType_t type;    // of the operand a
  cudaDataType_t b_type;  // another with float8 alone
  cudaDataType_t out_type;
  cublasComputeType_t compute;
  cublasLtEpilogue_t epilogue;
  int64_t rows, columns, inner, out_ld, a_ld, b_ld;
  bool a_transposed, b_transposed, accumulate, fast_accumulation;
  uint32_t out_alignment, a_alignment, b_alignment, bias_alignment, gelu_alignment;
  int64_t batches = 1;

  auto operator<=>(const ProductKey&) const = default;
};

// The largest power of two, 256 at most, that divides the address: a faster algorithm may need 16.
inline uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256;
  return static_cast<uint32_t>(address & -address);
}

struct AlgorithmChoice {
  cublasLtMatmulAlgo_t algorithm;
  int64_t workspace;  // bytes
};

// The arguments of cublasLtMatmul without the data. They are on the stack: filling them in takes a few dozen stores.
struct LtProblem {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t out;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;  // the first failure

  void first(cublasStatus_t next) {
    if (status == CUBLAS_STATUS_SUCCESS) status = next;
  }

  template <typename V>
  void set(cublasLtMatmulDescAttributes_t attribute, V value) {
    first(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)));
  }
};

constexpr int kMostChoices = 24;

// The terms that cuBLASLt's kernels for Hopper read at once: 128 bytes of them.
int64_t terms_of_a_step(cudaDataType_t type);

// cuBLASLt's algorithms for the product, at most `most` and kMostChoices, the heuristic's best first. All of them add
// up every term of a sum, which not every algorithm of cuBLASLt does.
std::vector<AlgorithmChoice> ask_heuristic(const LtProblem& problem, const ProductKey& key, cublasLtHandle_t handle,
                                           int most);

// Whether the algorithm can compute the product, in the workspace of the choice.
bool fits(LtProblem problem, const ProductKey& key, const AlgorithmChoice& choice, cublasLtHandle_t handle);

// Whether products may be timed.
bool choices_are_timed();

// What an earlier call of keep_choice, in this process or another, has kept. The caller checks that it fits the
// product: files can be damaged.
std::optional<AlgorithmChoice> kept_choice(const ProductKey& key);

// Keeps a choice, in the file too if that can be written.
void keep_choice(const ProductKey& key, const AlgorithmChoice& choice);

}  // namespace gptkernels::cuda
