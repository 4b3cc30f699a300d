// Types of CUDA launchers' arguments and results. Host code may include this header.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace gptkernels::cuda {

using bfloat16 = __nv_bfloat16;
using float16 = __half;
using Stream = cudaStream_t;
using Status = cudaError_t;

// The type in which kernels compute. Long sums of float32 are float64 (sum_t in common/packed.cuh).
template <typename T>
struct accumulate {
  using type = float;
};
template <>
struct accumulate<double> {
  using type = double;
};
template <typename T>
using accumulate_t = typename accumulate<T>::type;

}  // namespace gptkernels::cuda
