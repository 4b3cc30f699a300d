// The scale of a tensor that is quantised to eight bits, from its largest magnitude, by whole numbers: the same on
// every device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define GPTKERNELS_SCALE_DEVICE __host__ __device__
#else
#define GPTKERNELS_SCALE_DEVICE
#endif

namespace gptkernels {

// 2^exponent and 2^-exponent as the bits of float32.
struct Fp8Scale {
  uint32_t multiplier;  // x * multiplier is rounded to eight bits
  uint32_t scale;       // and multiplied by this when it is read
};

// The largest power of two by which `amax`, the bits of a finite float32 that is not negative, can be multiplied
// without exceeding 1.75 * 2^largest_exponent: 448 for 8, 57344 for 15. 1 for amax 0.
GPTKERNELS_SCALE_DEVICE inline Fp8Scale fp8_scale(uint32_t amax, int largest_exponent) {
  constexpr uint32_t kSignificand = 0x7FFFFFu;
  constexpr uint32_t kThreeQuarters = 0x600000u;  // the significand of 1.75
  constexpr int kMost = 126;                      // both powers are normal numbers
  if (amax == 0) return {127u << 23, 127u << 23};
  const int amax_exponent = static_cast<int>(amax >> 23) - 127;  // of a denormal: below its own, and limited by kMost
  int exponent = largest_exponent - amax_exponent - ((amax & kSignificand) > kThreeQuarters ? 1 : 0);
  if (exponent > kMost) exponent = kMost;
  if (exponent < -kMost) exponent = -kMost;
  return {static_cast<uint32_t>(127 + exponent) << 23, static_cast<uint32_t>(127 - exponent) << 23};
}

}  // namespace gptkernels
