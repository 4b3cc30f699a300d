// The choice between our own matmul kernels and those of cuBLAS and cuBLASLt.
#pragma once

#include <cstdlib>
#include <cstring>

namespace gptkernels::cuda {

enum class GemmBackend { kFastest, kCublas, kOwn };

// GPTKERNELS_MATMUL=own selects our kernels for every matmul that they support, and `cublas` selects cuBLAS and
// cuBLASLt. By default, our kernels are used where they are faster.
inline GemmBackend gemm_backend() {
  const char* name = std::getenv("GPTKERNELS_MATMUL");
  if (!name) return GemmBackend::kFastest;
  if (!std::strcmp(name, "cublas")) return GemmBackend::kCublas;
  return !std::strcmp(name, "own") ? GemmBackend::kOwn : GemmBackend::kFastest;
}

}  // namespace gptkernels::cuda
