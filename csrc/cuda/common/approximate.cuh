// Exponentials and reciprocals that are as accurate as T, the dtype of the kernel's result, requires. A kernel on
// bfloat16 can issue about 30 instructions per element before the instructions take longer than the memory accesses.
// For 16-bit results these functions therefore use the hardware's approximate instructions, whose error disappears when
// the result is rounded to 16 bits.
#pragma once

#include "cuda/device.h"

namespace gptkernels::cuda {

template <typename T>
constexpr bool kSixteenBits = sizeof(T) == 2;

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Above this magnitude, neighbouring float32 numbers are more than 1 apart. A rounded number of this magnitude is too
// inexact to be subtracted from the argument of an exponential.
constexpr float kFarFromZero = 0x1p24f;

// Returns 2^x in one instruction, with a relative error of up to 2^-22. Results below 2^-126 are flushed to 0.
__device__ inline float exp2_approximately(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Returns 1 / x for x >= 1 in one instruction, with a relative error of up to 2^-23.
__device__ inline float reciprocal_approximately(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Returns e^x, accurate enough for a result of dtype T.
template <typename T>
__device__ accumulate_t<T> exp_for(accumulate_t<T> x) {
  if constexpr (kSixteenBits<T>)
    return exp2_approximately(x * kLog2E);
  else
    return exp(x);
}

// Returns 1 / x for x >= 1, accurate enough for a result of dtype T.
template <typename T>
__device__ accumulate_t<T> reciprocal_for(accumulate_t<T> x) {
  if constexpr (kSixteenBits<T>)
    return reciprocal_approximately(x);
  else
    return accumulate_t<T>(1) / x;
}

}  // namespace gptkernels::cuda
