// Matmuls for sm_90a (H100, H200) by our own kernels, with the epilogues for which cuBLASLt is slow: a bias with GELU,
// and GELU's gradient with the gradient's sums over the rows. The kernels support bfloat16 and float16.
#pragma once

#include "matmul.h"

namespace gptkernels::cuda {

// Returns whether matmul_sm90 supports this matmul and is faster than cuBLASLt. The environment variable
// GPTKERNELS_MATMUL overrides the second condition (gemm/backend.h).
template <typename T>
bool matmul_sm90_supports(const Matmul<T>& p);

// Returns the size of the workspace in bytes.
template <typename T>
int64_t matmul_sm90_workspace(const Matmul<T>& p);

template <typename T>
cudaError_t matmul_sm90(const Matmul<T>& p, void* workspace, Stream stream);

}  // namespace gptkernels::cuda
