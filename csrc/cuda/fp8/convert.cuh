#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace gptkernels::cuda {

// The first number becomes the lowest byte. Values beyond the format's range, and infinities, saturate. NaN stays NaN.
__device__ inline uint2 to_fp8(const float (&values)[8], __nv_fp8_interpretation_t format) {
  uint32_t halves[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2({values[4 * i], values[4 * i + 1]}, __NV_SATFINITE, format);
    const uint32_t high = __nv_cvt_float2_to_fp8x2({values[4 * i + 2], values[4 * i + 3]}, __NV_SATFINITE, format);
    halves[i] = low | high << 16;
  }
  return {halves[0], halves[1]};
}

__device__ inline void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t low01 = __byte_perm(words[0], words[1], 0x5140), high01 = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t low23 = __byte_perm(words[2], words[3], 0x5140), high23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace gptkernels::cuda
