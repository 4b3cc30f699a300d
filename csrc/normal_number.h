// A normal number from 53 random bits, by the inverse of the distribution function (Wichura: Algorithm AS 241, 1988).
//
// Every compiler and device computes the same bits, because all operations are float64 additions, multiplications,
// divisions and square roots, which IEEE 754 rounds in one way. Code that includes this file must be compiled without
// contraction to FMA (-ffp-contract=off, for CUDA --fmad=false). Its results have errors of at most 6 ulps.
#pragma once

#include <bit>
#include <cmath>

#include "philox.h"

namespace gptkernels {

// Returns a + x (b + x (c + ...)).
GPTKERNELS_HOST_DEVICE double normal_polynomial(double, double a) {
  return a;
}

template <typename... Rest>
GPTKERNELS_HOST_DEVICE double normal_polynomial(double x, double a, Rest... rest) {
  return normal_polynomial(x, rest...) * x + a;
}

// For positive normal numbers. x = 2^e (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2), and log(1 + f) is computed as in
// FreeBSD's libm (e_log.c).
GPTKERNELS_HOST_DEVICE double normal_log(double x) {
  constexpr uint64_t kSqrtHalf = 0x3FE6A09Eull << 32, kOne = 0x3FFull << 52, kTwo52 = 0x433ull << 52;
  const uint64_t bits = std::bit_cast<uint64_t>(x) + (kOne - kSqrtHalf);
  const double e = std::bit_cast<double>(bits >> 52 | kTwo52) - (0x1p52 + 1023);
  const double f = std::bit_cast<double>((bits & 0xFFFFFFFFFFFFFull) + kSqrtHalf) - 1;
  const double s = f / (2 + f), z = s * s, half_square = 0.5 * f * f;
  const double rest =
      z * normal_polynomial(z, 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                            2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                            1.479819860511658591e-01);
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  return e * kLn2High - ((half_square - (s * (half_square + rest) + e * kLn2Low)) - f);
}

// Returns the z >= 0 that a normal number exceeds with probability p, 0 < p <= 1/2. There is no branch, so that loops
// can be vectorized: each coefficient is chosen from those of the three rational functions.
GPTKERNELS_HOST_DEVICE double normal_quantile(double p) {
  const double q = 0.5 - p, r = std::sqrt(-normal_log(p));
  const bool central = q <= 0.425, near = r <= 5;
  const double x = central ? 0.180625 - q * q : r - (near ? 1.6 : 5.0);
  const auto pick = [&](double c, double n, double far) { return central ? c : near ? n : far; };
  const double numerator =
      normal_polynomial(x, pick(3.3871328727963666080, 1.42343711074968357734, 6.65790464350110377720),
                        pick(1.3314166789178437745e+2, 4.63033784615654529590, 5.46378491116411436990),
                        pick(1.9715909503065514427e+3, 5.76949722146069140550, 1.78482653991729133580),
                        pick(1.3731693765509461125e+4, 3.64784832476320460504, 2.96560571828504891230e-1),
                        pick(4.5921953931549871457e+4, 1.27045825245236838258, 2.65321895265761230930e-2),
                        pick(6.7265770927008700853e+4, 2.41780725177450611770e-1, 1.24266094738807843860e-3),
                        pick(3.3430575583588128105e+4, 2.27238449892691845833e-2, 2.71155556874348757815e-5),
                        pick(2.5090809287301226727e+3, 7.74545014278341407640e-4, 2.01033439929228813265e-7));
  const double denominator =
      normal_polynomial(x, 1.0, pick(4.2313330701600911252e+1, 2.05319162663775882187, 5.99832206555887937690e-1),
                        pick(6.8718700749205790830e+2, 1.67638483018380384940, 1.36929880922735805310e-1),
                        pick(5.3941960214247511077e+3, 6.89767334985100004550e-1, 1.48753612908506148525e-2),
                        pick(2.1213794301586595867e+4, 1.48103976427480074590e-1, 7.86869131145613259100e-4),
                        pick(3.9307895800092710610e+4, 1.51986665636164571966e-2, 1.84631831751005468180e-5),
                        pick(2.8729085735721942674e+4, 5.47593808499534494600e-4, 1.42151175831644588870e-7),
                        pick(5.2264952788528545610e+3, 1.05075007164441684324e-9, 2.04426310338993978564e-15));
  return (central ? q : 1.0) * (numerator / denominator);
}

// The lower 52 of the 64 bits are k in p = (2 k + 1) / 2^54, and the highest bit is the sign.
GPTKERNELS_HOST_DEVICE double normal_number(uint32_t low, uint32_t high) {
  const uint64_t bits = static_cast<uint64_t>(high) << 32 | low;
  const double one_to_two = std::bit_cast<double>((bits & 0xFFFFFFFFFFFFFull) | 0x3FFull << 52);
  const double z = normal_quantile((one_to_two - 1 + 0x1p-53) * 0.5);
  return std::bit_cast<double>(std::bit_cast<uint64_t>(z) | (bits & 1ull << 63));
}

// One Philox result provides the bits of two numbers: the number with index i uses the words 2 (i % 2) and 2 (i % 2) +
// 1 of the result for group i / 2.
constexpr int kNormalGroup = 2;

GPTKERNELS_HOST_DEVICE PhiloxWords normal_counter(uint64_t stream, uint64_t group) {
  return {{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), static_cast<uint32_t>(stream),
           static_cast<uint32_t>(stream >> 32)}};
}

}  // namespace gptkernels
