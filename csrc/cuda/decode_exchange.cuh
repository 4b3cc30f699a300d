// Vectors of float32 that blocks pass to the other blocks of a kernel, all of which are resident at once.
//
// A reader polls the words that it needs until they have been written. A word that has not is kAbsent, which the kernel
// before has stored. A word is stored and loaded whole, so one that is not absent is the value: nothing else needs to
// be ordered.
#pragma once

#include <cstdint>

#include "common/hopper.cuh"

namespace gptkernels::cuda {

constexpr uint32_t kAbsent = 0xFFFFFFFFu;  // a NaN that no arithmetic gives

__device__ inline float4 operator+(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

#if GPTKERNELS_HOPPER

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

// The sum of kCount values: of the first half's sum and the second half's, and so on.
template <int kCount>
__device__ float4 tree_sum(const float4* v) {
  if constexpr (kCount == 1)
    return *v;
  else
    return tree_sum<kCount / 2>(v) + tree_sum<kCount - kCount / 2>(v + kCount / 2);
}

// Four neighbouring elements of the sum of kCount vectors, stride apart. Waits until all have been sent.
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
    // Where the model has computed NaNs, nothing is absent. This is seldom asked: it takes longer than the loads.
    if (tries % kPatience > 0) continue;
    bool absent = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) absent |= any_absent(v[i]);
    if (!absent) return sum;
  }
}

#endif

}  // namespace gptkernels::cuda
