// Which products are computed by our own kernels instead of cuBLASLt's.
#pragma once

#include "matmul.h"

namespace gptkernels::cuda {

// Follows gemm_backend() and, by default, what was measured.
template <typename T>
OwnProduct own_product(const Matmul<T>& p);

}  // namespace gptkernels::cuda
