// Matmuls for sm_90a (bfloat16, float16) with the epilogues for which cuBLASLt is slow: a bias with GELU, and GELU's
// gradient with its sums over the rows.
#pragma once

#include "matmul.h"

namespace gptkernels::cuda {

// False where cuBLASLt is faster, unless GPTKERNELS_MATMUL overrides this (gemm/backend.h).
template <typename T>
bool matmul_sm90_supports(const Matmul<T>& p);

template <typename T>
int64_t matmul_sm90_workspace(const Matmul<T>& p);

template <typename T>
cudaError_t matmul_sm90(const Matmul<T>& p, void* workspace, Stream stream);

}  // namespace gptkernels::cuda
