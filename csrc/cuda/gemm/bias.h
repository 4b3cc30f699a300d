// Writes a bias to the output of a matmul, which then adds to it.
#pragma once

#include "cuda/device.h"

namespace gptkernels::cuda {

// Sets each of the rows of `out`, whose leading dimension is `ld`, to `bias` (columns).
template <typename T>
Status write_bias(T* out, const T* bias, int64_t rows, int64_t columns, int64_t ld, Stream stream);

}  // namespace gptkernels::cuda
