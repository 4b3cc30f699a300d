// Layernorm, optionally after a residual addition without dropout. The output is quantised to float8, and never written
// in 16 bits. Rows are bfloat16 or float16, and fit in the registers of a warp.
#pragma once

#include "../../fp8.h"
#include "../../layernorm.h"

namespace gptkernels::cuda {

template <typename T>
bool fp8_layernorm_supports(const LayernormForward<T>& norm, const Fp8Quantize<T>& quantization);

// The size of quantization.workspace in bytes.
int64_t fp8_layernorm_workspace();

// norm.out and quantization.x are ignored. If there is no scale yet (no history, or a history of zeros), the norm is
// computed a second time when the result's amax is known.
template <typename T>
Status fp8_layernorm(const LayernormForward<T>& norm, const Fp8Quantize<T>& quantization, Stream stream);

}  // namespace gptkernels::cuda
