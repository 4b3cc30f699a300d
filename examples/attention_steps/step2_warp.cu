// Step 2: online softmax, a warp per query. No scores are written to memory. Each lane computes the score of one of 32
// keys, and the warp adds the keys' values, with weights relative to the largest score so far. When a larger score
// occurs, the sums are rescaled. The warps of a thread block have neighbouring queries of one head, and share keys and
// values in shared memory.
#include "problem.h"

const char* const kStep = "2 online softmax, a warp";

constexpr int kWarps = 16;
constexpr int kKeys = 32;  // keys of a tile
constexpr int kPairs = kChannels / 2;
constexpr int kRowPairs = kPairs + 1;  // odd, so that the lanes read 32 different banks
using Pair = __nv_bfloat162;

__device__ float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

__device__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

__global__ void __launch_bounds__(kWarps * 32) attention_warp_kernel(Attention p) {
  __shared__ Pair keys[kKeys][kRowPairs], values[kKeys][kRowPairs];
  __shared__ float2 queries[kWarps][kPairs];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
  const int first = (gridDim.x - 1 - blockIdx.x) * kWarps;  // the thread blocks with the most keys start first
  const int query = first + warp;
  const auto pairs = [&](Part part, int token) { return reinterpret_cast<const Pair*>(row_of(p, part, head, token)); };
  queries[warp][lane] = __bfloat1622float2(pairs(kQuery, query)[lane]);

  float max = -INFINITY, sum = 0;
  float2 out = {0, 0};
  for (int tile = 0; tile < first + kWarps; tile += kKeys) {
    __syncthreads();  // all warps have read the previous tile
    for (int row = warp; row < kKeys; row += kWarps) {
      keys[row][lane] = pairs(kKey, tile + row)[lane];
      values[row][lane] = pairs(kValue, tile + row)[lane];
    }
    __syncthreads();

    float score = 0;
    for (int i = 0; i < kPairs; ++i) {
      const float2 q = queries[warp][i], k = __bfloat1622float2(keys[lane][i]);
      score += q.x * k.x + q.y * k.y;
    }
    score = tile + lane <= query ? score * kScale : -INFINITY;
    const float larger = fmaxf(max, warp_max(score));  // finite: every query sees key 0
    const float rescale = __expf(max - larger), weight = __expf(score - larger);
    max = larger;
    sum = sum * rescale + warp_sum(weight);
    out.x *= rescale, out.y *= rescale;
    for (int key = 0; key < kKeys; ++key) {
      const float w = __shfl_sync(~0u, weight, key);
      const float2 v = __bfloat1622float2(values[key][lane]);
      out.x += w * v.x, out.y += w * v.y;
    }
  }
  reinterpret_cast<Pair*>(out_of(p, head, query))[lane] = __floats2bfloat162_rn(out.x / sum, out.y / sum);
}

void attention(const Attention& p) {
  attention_warp_kernel<<<dim3(p.tokens / kWarps, p.batches * p.heads), kWarps * 32>>>(p);
}
