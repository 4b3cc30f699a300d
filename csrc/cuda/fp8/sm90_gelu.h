// For sm_90a (H100, H200): a float8 matmul whose epilogue computes GELU or its gradient and quantises the result. T is
// bfloat16 or float16, and the inner dimension is at most 1536.
#pragma once

#include "cuda/gemm/fp8.h"

namespace gptkernels::cuda {

// Whether this matmul followed by this quantisation (whose x is the matmul's out) is supported, and faster than two
// kernels. The environment variable GPTKERNELS_MATMUL overrides the second condition (gemm/backend.h).
template <typename T>
bool fp8_gelu_sm90_supports(const Fp8Matmul<T>& product, const Fp8Quantize<T>& quantization);

// In bytes, of quantization.workspace.
template <typename T>
int64_t fp8_gelu_sm90_workspace(const Fp8Matmul<T>& product);

// With Fp8Source::kGeluGradient, product.out is written only if there is no scale yet (an all-zero amax history).
template <typename T>
Status fp8_gelu_sm90(const Fp8Matmul<T>& product, const Fp8Quantize<T>& quantization, Stream stream);

}  // namespace gptkernels::cuda
