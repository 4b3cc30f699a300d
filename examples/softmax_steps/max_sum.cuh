// The online softmax of steps 3 to 5. Whenever the maximum grows, the sum of exp(x - max) is rescaled.
#pragma once

#include <cfloat>

#include "problem.h"

struct MaxSum {
  float max;
  float sum;  // sum of exp(x - max)
};

// The maximum is finite, so that no difference is inf - inf.
__device__ inline MaxSum no_elements() {
  return {-FLT_MAX, 0};
}

__device__ inline MaxSum merge(MaxSum a, MaxSum b) {
  const float max = fmaxf(a.max, b.max);
  return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

__device__ inline MaxSum warp_merge(MaxSum m) {
  for (int offset = 16; offset > 0; offset /= 2)
    m = merge(m, {__shfl_xor_sync(~0u, m.max, offset), __shfl_xor_sync(~0u, m.sum, offset)});
  return m;
}

// A kernel may call this function only once, because a second call could overwrite `warps` while other warps still read
// it.
__device__ inline MaxSum block_merge(MaxSum m) {
  __shared__ MaxSum warps[32];
  const int lane = threadIdx.x % 32;
  m = warp_merge(m);
  if (lane == 0) warps[threadIdx.x / 32] = m;
  __syncthreads();
  return warp_merge(lane < blockDim.x / 32 ? warps[lane] : no_elements());
}

// ---- packs of 16 bytes, for steps 4 and 5 ----

constexpr int kVec = 8;  // elements of a pack
constexpr int kPacks = kWidth / kVec;

struct alignas(16) Pack {
  bfloat16 v[kVec];
};

// Only packs at the end of a row have padded columns, so the others need one comparison instead of eight.
__device__ inline void hide_padding(Pack& pack, int column) {
  if (column + kVec <= kVocab) return;
  for (int k = 0; k < kVec; ++k)
    if (column + k >= kVocab) pack.v[k] = __float2bfloat16(-INFINITY);
}

// The pack's maximum is computed first, so that the sum is rescaled once per pack.
__device__ inline void add_pack(MaxSum& m, Pack pack, int column) {
  hide_padding(pack, column);
  float max = m.max, sum = 0;
  for (int k = 0; k < kVec; ++k) max = fmaxf(max, float(pack.v[k]));
  for (int k = 0; k < kVec; ++k) sum += __expf(float(pack.v[k]) - max);
  m = {max, m.sum * __expf(m.max - max) + sum};
}

__device__ inline Pack gradients(Pack pack, int column, int target, MaxSum row) {
  hide_padding(pack, column);
  const float scale = 1 / row.sum;
  float p[kVec];
  for (int k = 0; k < kVec; ++k) p[k] = __expf(float(pack.v[k]) - row.max) * scale;
  if (column <= target && target < column + kVec)
    for (int k = 0; k < kVec; ++k) p[k] -= column + k == target;
  for (int k = 0; k < kVec; ++k) pack.v[k] = __float2bfloat16(p[k]);
  return pack;
}
