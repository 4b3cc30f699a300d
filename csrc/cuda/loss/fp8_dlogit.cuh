#pragma once

#include "../../fused_classifier.h"
#include "cuda/common/packed.cuh"
#include "cuda/fp8/convert.cuh"

namespace gptkernels::cuda {

// __NV_SATFINITE would make an infinite gradient finite, but without dlosses no gradient is infinite. NaN stays NaN.
template <int N>
__device__ void store_narrow(Fp8Dlogit* p, const float (&values)[N]) {
  constexpr auto kFormat = __NV_E5M2;
  float scaled[N];
#pragma unroll
  for (int i = 0; i < N; ++i) scaled[i] = values[i] * Fp8Dlogit::kMultiplier;
  if constexpr (N == 8) {
    __stwb(reinterpret_cast<uint2*>(p), to_fp8(scaled, kFormat));
  } else if constexpr (N == 4) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2({scaled[0], scaled[1]}, __NV_SATFINITE, kFormat);
    const uint32_t high = __nv_cvt_float2_to_fp8x2({scaled[2], scaled[3]}, __NV_SATFINITE, kFormat);
    __stwb(reinterpret_cast<unsigned*>(p), low | high << 16);
  } else {
    p->bits = __nv_cvt_float_to_fp8(scaled[0], __NV_SATFINITE, kFormat);
  }
}

}  // namespace gptkernels::cuda
