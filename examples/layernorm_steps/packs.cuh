// The kernel of steps 4 and 5: a warp processes a row in packs of 16 bytes.
#pragma once

#include "problem.h"

constexpr int kVec = 8;  // elements of a pack
constexpr int kPacks = kWidth / 32 / kVec;

struct alignas(16) Pack {
  bfloat16 v[kVec];
};

__device__ inline float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  return value;
}

// The L2 cache evicts lines that are marked evict_last only after other lines.
template <bool kEvictLast>
__device__ void store_statistic(float* p, float value) {
  if constexpr (kEvictLast) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
    asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(p), "f"(value), "l"(policy) : "memory");
  } else {
    *p = value;
  }
}

// A warp per row.
template <bool kEvictLast>
__global__ void layernorm_packs_kernel(Layernorm p) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const Pack* from = reinterpret_cast<const Pack*>(p.x + int64_t(row) * kWidth) + threadIdx.x;
  Pack* out = reinterpret_cast<Pack*>(p.out + int64_t(row) * kWidth) + threadIdx.x;
  Pack packs[kPacks];
  for (int i = 0; i < kPacks; ++i) packs[i] = from[i * 32];
  float x[kPacks][kVec], sum = 0, squares = 0;
  for (int i = 0; i < kPacks; ++i)
    for (int k = 0; k < kVec; ++k) x[i][k] = float(packs[i].v[k]), sum += x[i][k];
  const float mean = warp_sum(sum) / kWidth;
  for (int i = 0; i < kPacks; ++i)
    for (int k = 0; k < kVec; ++k) squares += (x[i][k] - mean) * (x[i][k] - mean);
  const float rstd = rsqrtf(warp_sum(squares) / kWidth + p.eps);
  for (int i = 0; i < kPacks; ++i) {
    const Pack weight = reinterpret_cast<const Pack*>(p.weight)[threadIdx.x + i * 32];
    const Pack bias = reinterpret_cast<const Pack*>(p.bias)[threadIdx.x + i * 32];
    Pack y;
    for (int k = 0; k < kVec; ++k)
      y.v[k] = __float2bfloat16((x[i][k] - mean) * rstd * float(weight.v[k]) + float(bias.v[k]));
    out[i * 32] = y;
  }
  if (threadIdx.x == 0) {
    store_statistic<kEvictLast>(p.mean + row, mean);
    store_statistic<kEvictLast>(p.rstd + row, rstd);
  }
}
