// Whether products are computed by our own kernels or by cuBLASLt's, as far as the user decides.
#pragma once

#include <cstdlib>
#include <cstring>

namespace gptkernels::cuda {

enum class ProductChoice { kMeasured, kCublas, kOwn };

// The environment variable GPTKERNELS_MATMUL, read at each call: our kernels wherever they can (`own`) or nowhere
// (`cublas`). Without it, where they are faster.
inline ProductChoice product_choice() {
  const char* name = std::getenv("GPTKERNELS_MATMUL");
  if (!name) return ProductChoice::kMeasured;
  if (!std::strcmp(name, "cublas")) return ProductChoice::kCublas;
  return !std::strcmp(name, "own") ? ProductChoice::kOwn : ProductChoice::kMeasured;
}

}  // namespace gptkernels::cuda
