// Matmuls for sm_90a (bfloat16, float16) with the epilogues for which cuBLASLt is slow: a bias with GELU, and GELU's
// gradient with its sums over the rows.
#pragma once

#include "matmul.h"

namespace gptkernels::cuda {

// Whether matmul_sm90() supports the call and is faster than cuBLASLt. GPTKERNELS_MATMUL (gemm/backend.h) overrides
// the second condition.
template <typename T>
bool matmul_sm90_supports(const Matmul<T>& p);

template <typename T>
int64_t matmul_sm90_workspace(const Matmul<T>& p);

template <typename T>
cudaError_t matmul_sm90(const Matmul<T>& p, void* workspace, Stream stream);

}  // namespace gptkernels::cuda
