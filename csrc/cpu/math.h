// Transcendental functions without branches or calls, so that loops of them vectorise inside vectorised(...).
// double takes std's.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace gptkernels::cpu {

// e^x within 1 ulp, denormal results too; 0 below them, inf above the largest float, NaN for NaN.
//
// x = n ln 2 + r with n whole and |r| <= ln(2) / 2, so e^x = 2^n e^r, and e^r is a polynomial (minimax, 2^-28).
inline float exp(float x) {
  constexpr float kLog2e = 0x1.715476p0f;
  constexpr float kLn2High = 0x1.62ep-1f;  // 12 bits: n * kLn2High is exact
  constexpr float kLn2Low = 0x1.0bfbe8p-15f;
  constexpr float kRound = 0x1.8p23f;  // at this size a float's last bit is a one, so adding it rounds to whole n

  x = std::min(std::max(x, -104.0f), 89.0f);  // beyond these all is 0 or inf; std::min and max keep a NaN in front
  const float shifted = x * kLog2e + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  const float q =
      0x1.fffffcp-2f + r * (0x1.55549p-3f + r * (0x1.5558f4p-5f + r * (0x1.123a6cp-7f + r * 0x1.6a2352p-10f)));
  const float mantissa = 1.0f + (r + r * r * q);

  // 2^n in two factors: n itself may pass the exponent's range, and the second product rounds a denormal once.
  const int32_t exponent = static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound));
  const int32_t half = exponent >> 1;
  const auto power = [](int32_t e) { return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23); };
  return mantissa * power(half) * power(exponent - half);
}

inline double exp(double x) {
  return std::exp(x);
}

}  // namespace gptkernels::cpu
