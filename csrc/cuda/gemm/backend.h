// The user's choice between our own product kernels and cuBLASLt's.
#pragma once

#include <cstdlib>
#include <cstring>

namespace gptkernels::cuda {

enum class GemmBackend { kMeasured, kCublas, kOwn };

// The environment variable GPTKERNELS_MATMUL, read at each call: our kernels wherever they can (`own`) or nowhere
// (`cublas`). Without it, where they are faster.
inline GemmBackend gemm_backend() {
  const char* name = std::getenv("GPTKERNELS_MATMUL");
  if (!name) return GemmBackend::kMeasured;
  if (!std::strcmp(name, "cublas")) return GemmBackend::kCublas;
  return !std::strcmp(name, "own") ? GemmBackend::kOwn : GemmBackend::kMeasured;
}

}  // namespace gptkernels::cuda
