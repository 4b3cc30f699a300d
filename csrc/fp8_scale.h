// Integer arithmetic gives the scale the same bits on every device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define GPTKERNELS_SCALE_DEVICE __host__ __device__
#else
#define GPTKERNELS_SCALE_DEVICE
#endif

namespace gptkernels {

// The bits of two float32 numbers, both powers of two.
struct Fp8Scale {
  uint32_t multiplier;  // float8 number = round(value * multiplier)
  uint32_t scale;       // value = float8 number * scale
};

// `amax` is the bits of a finite, non-negative float32. The multiplier is the largest power of two, at most 2^126, for
// which amax * multiplier does not exceed 1.75 * 2^largest_exponent. This limit is the format's maximum: 448 for
// exponent 8 (e4m3), 57344 for exponent 15 (e5m2). If amax is 0, the multiplier is 1.
GPTKERNELS_SCALE_DEVICE inline Fp8Scale fp8_scale(uint32_t amax, int largest_exponent) {
  constexpr uint32_t kSignificand = 0x7FFFFFu;
  constexpr uint32_t kThreeQuarters = 0x600000u;  // the significand of 1.75
  constexpr int kMaxExponent = 126;               // keeps both powers of two normal
  if (amax == 0) return {127u << 23, 127u << 23};
  const int amax_exponent = static_cast<int>(amax >> 23) - 127;  // -127 for a denormal
  int exponent = largest_exponent - amax_exponent - ((amax & kSignificand) > kThreeQuarters ? 1 : 0);
  if (exponent > kMaxExponent) exponent = kMaxExponent;
  if (exponent < -kMaxExponent) exponent = -kMaxExponent;
  return {static_cast<uint32_t>(127 + exponent) << 23, static_cast<uint32_t>(127 - exponent) << 23};
}

}  // namespace gptkernels
