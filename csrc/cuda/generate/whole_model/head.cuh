// The LM head of a whole-model step: logits (1, Vp) = layernorm(x) @ head^T, 16 bits, C known at compile time.
//
// Each warp keeps the loads of four rows in flight: as soon as two rows have been multiplied, it loads the next two.
// The groups of four rows are dealt to the warps round robin, so that at any moment all warps read neighbouring memory.
#pragma once

#include "cuda/generate/product.cuh"
#include "layer_common.cuh"

namespace gptkernels::cuda {

constexpr int kHeadRows = 4;    // rows in flight per warp
constexpr int kHeadBlocks = 2;  // blocks per SM

template <typename T, int C>
__global__ void __launch_bounds__(kDecodeThreads, kHeadBlocks)
    decode_head_kernel(const __grid_constant__ DecodeProduct<T> p) {
#if GPTKERNELS_HOPPER
  constexpr int kPacks = C / (kPack<T> * kWarp), kPairs = kHeadRows / 2;
  static_assert(C % (kPack<T> * kWarp) == 0);
  let_next_kernel_start();
  const int lane = threadIdx.x % kWarp;
  const unsigned count = static_cast<unsigned>(ceil_div(p.sizes.rows, kHeadRows)), warps = gridDim.x * kDecodeWarps;
  Packed<T, kPack<T>> weights[kPairs][2][kPacks];
  const auto load_pair = [&](unsigned group, int pair) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = min(int64_t{group} * kHeadRows + pair * 2 + i, p.sizes.rows - 1);
#pragma unroll
      for (int k = 0; k < kPacks; ++k)
        weights[pair][i][k] = load_weights(p.weight + row * C + (lane + k * kWarp) * kPack<T>);
    }
  };
  unsigned group = blockIdx.x * kDecodeWarps + threadIdx.x / kWarp;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) load_pair(group, pair);
  DecodeNorm<T, kPacks> norm;
  norm.load(p, C / kPack<T>);
  wait_for_previous_kernel();
  DecodeVector<T, kPacks> x;
  x.load(p.x, C / kPack<T>);
  norm.apply(x, p, C / kPack<T>);
  while (group < count) {
    const unsigned next = group + warps;
    float sums[kHeadRows], sum;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[pair * 2 + i] = x.dot(weights[pair][i]);
      if (next < count) load_pair(next, pair);
    }
    const int64_t row = int64_t{group} * kHeadRows + reduce_scatter<kWarp>(sums, sum);
    constexpr int kLanesPerSum = kWarp / kHeadRows;  // lanes that hold the same sum
    if (lane % kLanesPerSum == 0 && row < p.sizes.rows) p.epilogue.narrow_out[row] = narrow<T>(sum);
    group = next;
  }
#endif
}

template <typename T, int C>
Status decode_head(const DecodeProduct<T>& p, Stream stream) {
  launch_early<decode_head_kernel<T, C>>(static_cast<unsigned>(kHeadBlocks * multiprocessors()), kDecodeThreads, 0,
                                         stream, p);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
