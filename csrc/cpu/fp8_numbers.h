#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../fp8.h"

namespace gptkernels::cpu {

// Rounds to nearest even and saturates; NaN stays NaN. kSignificand is the number of stored significand bits, kBias the
// exponent's bias, and kLargest the bits of the largest number.
template <int kSignificand, int kBias, uint32_t kLargest>
struct Fp8Rounding {
  static uint8_t round(float value) {
    constexpr int kDropped = 23 - kSignificand;
    constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
    constexpr uint32_t kLeastNormal = kRebias + (1u << 23);
    // For denormal results: the last float32 bit of kMagic is the format's smallest denormal, so adding kMagic rounds
    // to a multiple of it.
    constexpr float kMagic = std::bit_cast<float>(uint32_t(127 + 23 + 1 - kBias - kSignificand) << 23);
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    const uint32_t normal =
        (magnitude - kRebias + (1u << (kDropped - 1)) - 1 + ((magnitude >> kDropped) & 1)) >> kDropped;
    const uint32_t denormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kMagic) - std::bit_cast<uint32_t>(kMagic);
    const uint32_t rounded = magnitude < kLeastNormal ? denormal : normal < kLargest ? normal : kLargest;
    return static_cast<uint8_t>(magnitude > 0x7F800000u ? 0x7Fu : rounded | ((u >> 24) & 0x80u));
  }
};

using Fp8E4M3 = Fp8Rounding<3, 7, 0x7E>;
using Fp8E5M2 = Fp8Rounding<2, 15, 0x7B>;

inline float fp8_value(uint8_t bits, Fp8Format format) {
  const int kept = format == Fp8Format::kE4M3 ? 3 : 2, bias = format == Fp8Format::kE4M3 ? 7 : 15;
  const int exponent = (bits & 0x7F) >> kept, significand = bits & ((1 << kept) - 1);
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  if (format == Fp8Format::kE4M3 ? (bits & 0x7F) == 0x7F : exponent == 31) {
    const bool infinite = format == Fp8Format::kE5M2 && significand == 0;
    return sign * (infinite ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN());
  }
  const int whole = exponent ? significand | 1 << kept : significand;
  return sign * std::ldexp(float(whole), (exponent ? exponent : 1) - bias - kept);
}

}  // namespace gptkernels::cpu
