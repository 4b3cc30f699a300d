// Layernorm, also of a sum with a residual, whose output is quantised where it is computed and never written in 16
// bits. bfloat16 and float16, rows that a warp keeps in registers, no dropout.
#pragma once

#include "../fp8.h"
#include "../layernorm.h"

namespace gptkernels::cuda {

// Whether fp8_layernorm computes the norm, and then the pass over its output.
template <typename T>
bool fp8_layernorm_serves(const LayernormForward<T>& norm, const Fp8Quantize<T>& pass);

// The size of the pass's workspace in bytes.
int64_t fp8_layernorm_workspace();

// The norm's out and the pass's x are not used. Where the history has nothing but zeros, the norm is computed again
// from the sum, or from x, once its largest magnitude is known.
template <typename T>
Status fp8_layernorm(const LayernormForward<T>& norm, const Fp8Quantize<T>& pass, Stream stream);

}  // namespace gptkernels::cuda
