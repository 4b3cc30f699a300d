// Float32 exponentials without branches, so that the compiler can vectorize loops of them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace gptkernels::cpu {

// On x86, the copy of a loop for the default target (simd.h) calls the library for std::fma. This is slow, but gives
// the same bits as the FMA instruction that the other copies, and those for Arm, use.
inline float polynomial(float, float c0) {
  return c0;
}

template <typename... Coefficients>
float polynomial(float x, float c0, Coefficients... rest) {
  return std::fma(x, polynomial(x, rest...), c0);
}

struct Exponential {
  float mantissa;
  int32_t exponent;
};

// Returns the mantissa e^r and the exponent n of e^x = 2^n e^r, where x = n ln 2 + r with |r| <= ln(2) / 2. x must be
// between -2^21 and 2^21. e^r is computed by a minimax polynomial with a relative error below 2^-27.
inline Exponential exponential(float x) {
  constexpr float kLog2e = 0x1.715476p0f;
  constexpr float kLn2High = 0x1.62e43p-1f;
  constexpr float kLn2Low = -0x1.05c61p-29f;
  constexpr float kRound = 0x1.8p23f;  // adjacent floats near kRound differ by 1, so adding kRound rounds to an integer

  const float shifted = std::fma(x, kLog2e, kRound);
  const float n = shifted - kRound;
  const float r = std::fma(n, -kLn2Low, std::fma(n, -kLn2High, x));
  const float q = polynomial(r, 0x1.fffffcp-2f, 0x1.55549p-3f, 0x1.5558f4p-5f, 0x1.123a6cp-7f, 0x1.6a2352p-10f);
  const uint32_t exponent = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound);
  return {1.0f + std::fma(r * r, q, r), static_cast<int32_t>(exponent)};
}

// For -126 <= e <= 127.
inline float power_of_2(int32_t e) {
  return std::bit_cast<float>((static_cast<uint32_t>(e) + 127u) << 23);
}

// Below this bound e^x rounds to 0. exp() then avoids multiplications with denormal results, which take an Intel
// processor more than a hundred cycles.
constexpr float kUnderflow = -104.0f;

// The error is at most 1.02 ulp, also of denormal results. The result is 0 on underflow, inf on overflow, and NaN for
// NaN.
inline float exp(float x) {
  const bool underflow = x < kUnderflow;
  x = underflow ? 0.0f : std::min(x, 89.0f);  // e^89 is inf; for NaN, std::min returns its first argument
  const Exponential e = exponential(x);
  // 2^exponent is applied as two factors, because it may be outside float's range. Only the second product can be
  // denormal, so the result is rounded once.
  const int32_t half = e.exponent >> 1;
  return underflow ? 0.0f : e.mantissa * power_of_2(half) * power_of_2(e.exponent - half);
}

// For x <= 0, as in softmax, with a quarter fewer instructions than exp(): there is only one bound to check, and the
// powers of two, 2^(exponent + 64) and 2^-64, are always in range.
inline float exp_nonpositive(float x) {
  const bool underflow = x < kUnderflow;
  const Exponential e = exponential(underflow ? 0.0f : x);
  return underflow ? 0.0f : e.mantissa * power_of_2(e.exponent + 64) * 0x1p-64f;
}

inline double exp(double x) {
  return std::exp(x);
}

inline double exp_nonpositive(double x) {
  return std::exp(x);
}

}  // namespace gptkernels::cpu
