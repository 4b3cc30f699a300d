// A warp's matmuls by mma.sync, for steps 3 and 4. A thread block has 64 queries, 16 for each warp, and tiles of 64
// keys. A tile is 64 rows of 128 bytes in shared memory. The 16-byte chunk c of row r is stored at chunk c ^ (r % 8),
// so that the 16 bytes of 8 rows that ldmatrix reads at once are in different banks.
#pragma once

#include "cuda/ptx/sm80.cuh"
#include "softmax.cuh"

constexpr int kTile = 64;  // queries or keys
constexpr int kTileBytes = kTile * kChannels * sizeof(bfloat16);
constexpr int kThreads = kTile / 16 * 32;

__device__ inline uint32_t chunk_at(uint32_t tile, int row, int chunk) {
  return tile + row * 128 + ((chunk ^ row % 8) << 4);
}

struct WarpAttention {
  OnlineSoftmax softmax;
  float out[kAccumulators] = {};
  uint32_t queries[4][4];  // as operands of 16 x 16

  __device__ explicit WarpAttention(uint32_t tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = 0; i < 4; ++i)
      gptkernels::cuda::load_matrices(queries[i], chunk_at(tile, warp * 16 + lane % 16, 2 * i + lane / 16));
  }

  // In the `diagonal` tile, keys and queries belong to the same tokens.
  __device__ void add(uint32_t keys, uint32_t values, bool diagonal) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float scores[kAccumulators] = {}, rescale[2];
    uint32_t b[4];
    for (int i = 0; i < 4; ++i) {    // 16 channels
      for (int j = 0; j < 4; ++j) {  // 16 keys
        gptkernels::cuda::load_matrices(b, chunk_at(keys, 16 * j + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
        product(scores + 8 * j, queries[i], b);
      }
    }
    if (diagonal) mask_diagonal(scores, warp * 16);
    softmax.add(scores, rescale);
    for (int i = 0; i < kAccumulators; ++i) out[i] *= rescale[i / 2 % 2];
    for (int i = 0; i < 4; ++i) {  // 16 keys, whose weights become an operand
      uint32_t weights[4];
      for (int k = 0; k < 4; ++k) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(scores[8 * i + 2 * k], scores[8 * i + 2 * k + 1]);
        weights[k] = reinterpret_cast<const uint32_t&>(pair);
      }
      for (int j = 0; j < 4; ++j) {  // 16 channels
        gptkernels::cuda::load_matrices_transposed(b, chunk_at(values, 16 * i + lane % 16, 2 * j + lane / 16));
        product(out + 8 * j, weights, b);
      }
    }
  }

 private:
  __device__ static void product(float* d, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    gptkernels::cuda::mma<bfloat16>(reinterpret_cast<float (&)[4]>(d[0]), a, b[0], b[1]);
    gptkernels::cuda::mma<bfloat16>(reinterpret_cast<float (&)[4]>(d[4]), a, b[2], b[3]);
  }
};
