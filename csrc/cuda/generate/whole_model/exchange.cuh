// Exchange of float32 vectors between the blocks of one kernel through global memory. All blocks must be resident.
//
// The preceding kernel fills the exchange buffer with kAbsent. A writer stores its values; a reader polls the words
// that it needs until none of them is kAbsent. Each aligned 32-bit word is written atomically, so a word that differs
// from kAbsent is the final value: no flag, fence or memory ordering is needed.
#pragma once

#include <cstdint>

#include "cuda/ptx/sm90.cuh"

namespace gptkernels::cuda {

constexpr uint32_t kAbsent = 0xFFFFFFFFu;  // a NaN that arithmetic never produces

__device__ inline float4 operator+(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

#if GPTKERNELS_HOPPER

// Relaxed accesses at GPU scope, so that neither L1 nor the compiler keeps an old value.
__device__ inline void send(float* to, float value) {
  random_delay();
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

__device__ inline void send(float* to, const float4& value) {
  random_delay();
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
}

__device__ inline float4 load_sent(const float* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ inline bool any_nan(const float4& v) {
  return isnan(v.x) || isnan(v.y) || isnan(v.z) || isnan(v.w);
}

__device__ inline bool any_absent(const float4& v) {
  return __float_as_uint(v.x) == kAbsent || __float_as_uint(v.y) == kAbsent || __float_as_uint(v.z) == kAbsent ||
         __float_as_uint(v.w) == kAbsent;
}

// Sums kCount values pairwise: the sum of the first half plus the sum of the second half, recursively.
template <int kCount>
__device__ float4 tree_sum(const float4* v) {
  if constexpr (kCount == 1)
    return *v;
  else
    return tree_sum<kCount / 2>(v) + tree_sum<kCount - kCount / 2>(v + kCount / 2);
}

// Returns four neighbouring elements of the sum of kCount vectors that are `stride` floats apart. Polls until all of
// them have been sent.
template <int kCount>
__device__ float4 receive_sum(const float* from, int stride) {
  constexpr int kPatience = 64;
  random_delay();
  for (int tries = 1;; ++tries) {
    float4 v[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = load_sent(from + i * stride);
    const float4 sum = tree_sum<kCount>(v);
    if (!any_nan(sum)) return sum;
    // The sum is NaN if a word is absent, or if the model itself has computed a NaN. Checking which one costs more than
    // the loads, so it is done on every 64th attempt only.
    if (tries % kPatience > 0) continue;
    bool absent = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) absent |= any_absent(v[i]);
    if (!absent) return sum;
  }
}

#endif

}  // namespace gptkernels::cuda
