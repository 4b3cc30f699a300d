// Products for sm_90a (H100, H200) of matrices whose rows are the terms, by our own kernel: the gradient of a linear
// layer's weight, with the sums of `a` over the terms, which are the gradient of its bias. bfloat16 and float16.
#pragma once

#include "matmul.h"

namespace gptkernels::cuda {

// Whether matmul_sm90_weight can compute this product, here. (gemm/dispatch.h: where it does.)
template <typename T>
bool matmul_sm90_weight_takes(const Matmul<T>& p);

// How many tiles it has.
template <typename T>
int64_t matmul_sm90_weight_tiles(const Matmul<T>& p);

// How much of them lies within the matrix.
template <typename T>
double matmul_sm90_weight_filled(const Matmul<T>& p);

// The size of the workspace in bytes: the sums of every segment.
template <typename T>
int64_t matmul_sm90_weight_workspace(const Matmul<T>& p);

template <typename T>
cudaError_t matmul_sm90_weight(const Matmul<T>& p, void* workspace, Stream stream);

}  // namespace gptkernels::cuda
