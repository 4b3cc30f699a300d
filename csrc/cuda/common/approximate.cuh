// A kernel on bfloat16 can issue about 30 instructions per element before instructions take longer than memory
// accesses. 16-bit results are therefore computed by approximate instructions, whose errors are small compared with the
// final rounding's.
#pragma once

#include <type_traits>

#include "cuda/device.h"

namespace gptkernels::cuda {

template <typename T>
constexpr bool kSixteenBits = sizeof(T) == 2;

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Attention computes exp2(x * factor - origin) with one FMA, where origin is maximum * factor rounded to float32. If
// |origin| is larger than this constant, this rounding may change a result of 1 by more than a third of the change that
// would round it to another number of T (of TF32 if T is float). Attention then subtracts the maximum before the
// multiplication.
template <typename T>
constexpr float kFarFromZero = std::is_same_v<T, bfloat16> ? 0x1p14f : 0x1p11f;

// Relative error up to 2^-22. Results below 2^-126 are flushed to 0.
__device__ inline float exp2_approximately(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// For x >= 1, with a relative error up to 2^-23.
__device__ inline float reciprocal_approximately(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

template <typename T>
__device__ accumulate_t<T> exp_for(accumulate_t<T> x) {
  if constexpr (kSixteenBits<T>)
    return exp2_approximately(x * kLog2E);
  else
    return exp(x);
}

template <typename T>
__device__ accumulate_t<T> reciprocal_for(accumulate_t<T> x) {
  if constexpr (kSixteenBits<T>)
    return reciprocal_approximately(x);
  else
    return accumulate_t<T>(1) / x;
}

}  // namespace gptkernels::cuda
