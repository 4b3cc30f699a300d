// A float8 matmul whose epilogue computes GELU or its gradient and quantises the result to float8. The kernel is for
// sm_90a (H100, H200). T is bfloat16 or float16, and the inner dimension is at most 1536.
#pragma once

#include "cuda/gemm/fp8.h"

namespace gptkernels::cuda {

// Returns whether fp8_gelu_sm90 supports this matmul followed by this quantisation (whose x is the matmul's out), and
// is faster than two separate kernels. The environment variable GPTKERNELS_MATMUL overrides the second condition
// (gemm/backend.h).
template <typename T>
bool fp8_gelu_sm90_supports(const Fp8Matmul<T>& product, const Fp8Quantize<T>& quantization);

// Returns the size of `quantization.workspace` in bytes.
template <typename T>
int64_t fp8_gelu_sm90_workspace(const Fp8Matmul<T>& product);

// For Fp8Source::kGeluGradient, product.out is written only if there is no scale yet (an all-zero amax history).
template <typename T>
Status fp8_gelu_sm90(const Fp8Matmul<T>& product, const Fp8Quantize<T>& quantization, Stream stream);

}  // namespace gptkernels::cuda
