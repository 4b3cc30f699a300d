// Which products are computed by our own kernels instead of cuBLASLt's.
#pragma once

#include "matmul.h"

namespace gptkernels::cuda {

// The environment variable GPTKERNELS_MATMUL, read at each call, decides: our kernels wherever they can (`own`) or
// nowhere (`cublas`). Without it, where they are faster.
template <typename T>
OwnProduct own_product(const Matmul<T>& p);

}  // namespace gptkernels::cuda
