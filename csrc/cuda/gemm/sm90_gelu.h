// Products for sm_90a (H100, H200) by our own kernels, with the epilogues that cuBLASLt is slow at: a bias with GELU,
// and GELU's gradient with its sums over the rows. bfloat16 and float16.
#pragma once

#include "matmul.h"

namespace gptkernels::cuda {

// Whether matmul_sm90 can compute this product, here. (gemm/dispatch.h: where it does.)
template <typename T>
bool matmul_sm90_takes(const Matmul<T>& p);

// How much of the kernel's time the multiprocessors have work, at least.
template <typename T>
double matmul_sm90_busy(const Matmul<T>& p);

// The size of the workspace in bytes: partial sums for column_sums.
template <typename T>
int64_t matmul_sm90_workspace(const Matmul<T>& p);

template <typename T>
cudaError_t matmul_sm90(const Matmul<T>& p, void* workspace, Stream stream);

}  // namespace gptkernels::cuda
