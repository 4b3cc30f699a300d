// Step 4: asynchronous copies and two buffers. While the tensor cores work on a tile, cp.async copies the next tile's
// keys and values to shared memory, without registers.
#include "mma.cuh"

const char* const kStep = "4 cp.async, two buffers";

__device__ void start_tile(uint32_t tile, const Attention& p, Part part, int head, int first) {
  for (int i = threadIdx.x; i < kTile * 8; i += kThreads)
    gptkernels::cuda::copy_async_16(chunk_at(tile, i / 8, i % 8), row_of(p, part, head, first + i / 8) + i % 8 * 8,
                                    true);
}

__global__ void __launch_bounds__(kThreads, 4) attention_async_kernel(Attention p) {
  using namespace gptkernels::cuda;
  __shared__ __align__(128) uint8_t tiles[5][kTileBytes];  // the queries, and two buffers of keys and values
  const uint32_t queries = shared_window(tiles);
  const auto keys_of = [&](int tile) { return queries + (1 + tile % 2 * 2) * kTileBytes; };
  const auto values_of = [&](int tile) { return keys_of(tile) + kTileBytes; };
  const int head = blockIdx.y;
  const int last = gridDim.x - 1 - blockIdx.x;
  const auto start = [&](int tile) {
    if (tile <= last) {
      start_tile(keys_of(tile), p, kKey, head, tile * kTile);
      start_tile(values_of(tile), p, kValue, head, tile * kTile);
    }
    copy_async_commit();  // an empty group after the last tile
  };

  start_tile(queries, p, kQuery, head, last * kTile);
  copy_async_commit();
  start(0);
  copy_async_wait<1>();
  __syncthreads();  // for the other threads' copies
  WarpAttention warp(queries);
  for (int tile = 0; tile <= last; ++tile) {
    start(tile + 1);
    copy_async_wait<1>();  // waits for this tile
    __syncthreads();
    warp.add(keys_of(tile), values_of(tile), tile == last);
    __syncthreads();  // all warps have read the buffer
  }
  warp.softmax.store(p, head, last * kTile + threadIdx.x / 32 * 16, warp.out);
}

void attention(const Attention& p) {
  attention_async_kernel<<<dim3(p.tokens / kTile, p.batches * p.heads), kThreads>>>(p);
}
