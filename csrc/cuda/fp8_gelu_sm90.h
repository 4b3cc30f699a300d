// A float8 product and the quantisation of what GELU, or its gradient, makes of it, as one kernel for sm_90a (H100,
// H200). bfloat16 and float16; at most 1536 terms a sum.
#pragma once

#include "fp8_matmul.h"

namespace gptkernels::cuda {

// Whether fp8_gelu_sm90 computes the product and then the pass, whose x is the product's out, and faster than one after
// the other. The environment variable GPTKERNELS_MATMUL is as for matmul_sm90_serves.
template <typename T>
bool fp8_gelu_sm90_serves(const Fp8Matmul<T>& product, const Fp8Quantize<T>& pass);

// The size of the pass's workspace in bytes.
template <typename T>
int64_t fp8_gelu_sm90_workspace(const Fp8Matmul<T>& product);

// With Fp8Source::kGeluGradient the product's out is written only where the history has nothing but zeros.
template <typename T>
Status fp8_gelu_sm90(const Fp8Matmul<T>& product, const Fp8Quantize<T>& pass, Stream stream);

}  // namespace gptkernels::cuda
