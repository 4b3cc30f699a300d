// Layernorm, optionally with a residual addition before it, whose output is quantised to float8 by the same kernel and
// never written in 16 bits. The kernel supports bfloat16 and float16, and rows that fit in the registers of a warp. It
// does not support dropout.
#pragma once

#include "../../fp8.h"
#include "../../layernorm.h"

namespace gptkernels::cuda {

// Returns whether fp8_layernorm supports this norm followed by this quantisation.
template <typename T>
bool fp8_layernorm_supports(const LayernormForward<T>& norm, const Fp8Quantize<T>& quantization);

// Returns the size of `quantization.workspace` in bytes.
int64_t fp8_layernorm_workspace();

// Computes the norm and quantises the result. norm.out and quantization.x are ignored. If there is no scale yet (there
// is no history, or it is all zeros), the norm is computed a second time when the amax of the result is known.
template <typename T>
Status fp8_layernorm(const LayernormForward<T>& norm, const Fp8Quantize<T>& quantization, Stream stream);

}  // namespace gptkernels::cuda
