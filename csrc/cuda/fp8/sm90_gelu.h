// A float8 matmul for sm_90a (H100, H200), whose epilogue computes GELU or its gradient and quantises the result. T is
// bfloat16 or float16, and the inner dimension is at most 1536.
#pragma once

#include "cuda/gemm/fp8.h"

namespace gptkernels::cuda {

// Whether fp8_gelu_sm90() supports this matmul and the quantisation of its out, and is faster than two kernels. The
// environment variable GPTKERNELS_MATMUL overrides the second condition (gemm/backend.h).
template <typename T>
bool fp8_gelu_sm90_supports(const Fp8Matmul<T>& product, const Fp8Quantize<T>& quantization);

// The size of quantization.workspace in bytes.
template <typename T>
int64_t fp8_gelu_sm90_workspace(const Fp8Matmul<T>& product);

// For Fp8Source::kGeluGradient, product.out is written only if there is no scale yet (an all-zero amax history).
template <typename T>
Status fp8_gelu_sm90(const Fp8Matmul<T>& product, const Fp8Quantize<T>& quantization, Stream stream);

}  // namespace gptkernels::cuda
