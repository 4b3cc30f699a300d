// Step 3: tensor cores. A warp multiplies 16 queries by 64 keys with mma.sync (mma.cuh), computes the softmax on the
// accumulators, and multiplies the weights by 64 values.
#include "mma.cuh"

const char* const kStep = "3 tensor cores (mma.sync)";

__device__ void load_tile(uint8_t* tile, const Attention& p, Part part, int head, int first) {
  for (int i = threadIdx.x; i < kTile * 8; i += kThreads)
    *reinterpret_cast<uint4*>(tile + chunk_at(0, i / 8, i % 8)) =
        reinterpret_cast<const uint4*>(row_of(p, part, head, first + i / 8))[i % 8];
}

__global__ void __launch_bounds__(kThreads) attention_mma_kernel(Attention p) {
  __shared__ __align__(128) uint8_t queries[kTileBytes], keys[kTileBytes], values[kTileBytes];
  const int head = blockIdx.y;
  const int last = gridDim.x - 1 - blockIdx.x;  // the thread blocks with the most tiles start first
  load_tile(queries, p, kQuery, head, last * kTile);
  __syncthreads();
  WarpAttention warp(gptkernels::cuda::shared_window(queries));
  for (int tile = 0; tile <= last; ++tile) {
    __syncthreads();  // all warps have read the previous tile
    load_tile(keys, p, kKey, head, tile * kTile);
    load_tile(values, p, kValue, head, tile * kTile);
    __syncthreads();
    warp.add(gptkernels::cuda::shared_window(keys), gptkernels::cuda::shared_window(values), tile == last);
  }
  warp.softmax.store(p, head, last * kTile + threadIdx.x / 32 * 16, warp.out);
}

void attention(const Attention& p) {
  attention_mma_kernel<<<dim3(p.tokens / kTile, p.batches * p.heads), kThreads>>>(p);
}
