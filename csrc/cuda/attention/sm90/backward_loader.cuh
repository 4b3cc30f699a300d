// A layout of shared memory, and loading functions, that several of the backward kernels for sm_90a use.
#pragma once

#include "backward_mask.cuh"
#include "loader.cuh"

namespace gptkernels::cuda {

template <int kBytes>
struct Buffer {
  uint8_t bytes[kBytes];
#if GPTKERNELS_WGMMA
  __device__ operator uint32_t() const { return shared_address(bytes); }
#endif
};
struct Barrier {
  uint64_t word;
#if GPTKERNELS_WGMMA
  __device__ operator uint32_t() const { return shared_address(&word); }
#endif
};

#if GPTKERNELS_WGMMA

// Swizzled panels are aligned to 1024 bytes.
template <typename Shared>
__device__ Shared& aligned(uint8_t* memory) {
  const uint32_t first = (shared_address(memory) + 1023) / 1024 * 1024;
  return *static_cast<Shared*>(__cvta_shared_to_generic(first));
}

template <int n>
__device__ void init_barriers(const Barrier (&barriers)[n], int arrivals) {
  for (int i = 0; i < n; ++i) barrier_init(barriers[i], arrivals);
}

#endif

template <int HS, int kTileParts, int kTileBuffers, int kBlockBuffers>
struct RingShared : BackwardShape<HS> {
  using Shape = BackwardShape<HS>;
  static constexpr int kTiles = kTileBuffers, kStages = kBlockBuffers;

  Buffer<Shape::kRowBytes> tile[kTiles][kTileParts];        // for dq: query, dout, out; for dk, dv: key, value
  Buffer<Shape::kBlockBytes> block[kStages][2];             // for dq: key, value; for dk, dv: query, dout
  Buffer<HS == 64 ? Shape::kBlockBytes : 16> out[2];        // HS = 128 uses `tile`
  Buffer<Shape::kBlock * 4> bias[kStages], delta[kStages];  // of a block's queries
  Barrier tile_full[kTiles], tile_empty[kTiles], gradients_full[kTiles], block_full[kStages], block_empty[kStages];
  BackwardTile tiles[kTiles];
  MaskedBlock masked[kStages];

#if GPTKERNELS_WGMMA
  __device__ void init(int tile_readers) const {
    init_barriers(tile_full, 1);
    init_barriers(tile_empty, tile_readers);
    init_barriers(gradients_full, kComputingWarps);
    init_barriers(block_full, 1);
    init_barriers(block_empty, kComputingWarps);
    mbarrier_init_fence();
  }
#endif
};

#if GPTKERNELS_WGMMA

// After the last tile, writes row -1, at which the computing warps stop, and returns false.
template <typename T, typename Shared, typename Position>
__device__ bool take_tile(const Sm90Backward<T>& p, Shared& shared, const Position& at, int index,
                          TileOrder::Tile& found) {
  barrier_wait(shared.tile_empty[at.slot], at.phase ^ 1);
  if (p.order.find(index, found)) return true;
  shared.tiles[at.slot].row = -1;
  shared.tiles[at.slot].head = 0;  // must be valid: this head's mask may be read, although the result is not used
  barrier_arrive(shared.tile_full[at.slot]);
  return false;
}

template <typename Mask, typename T>
__device__ int key_blocks(const Sm90Backward<T>& p, int head, int row) {
  if constexpr (Mask::kBlocks) return p.mask.blocks.of_queries(p.mask_head(head), row / kMaskBlock).template count<1>();
  int end = p.problem.keys;
  if constexpr (Mask::kCausal) end = min(end, row + 128 + p.problem.query_offset);
  return max((end + 63) / 64, 0);
}

// Loads tiles of keys and values, and the blocks of queries (with dout, bias and delta) that see them. At least
// kLeastBlocks (0 or 1) blocks are loaded for each query head, or, with a block mask, for all query heads together that
// share the keys.
template <int kLeastBlocks, typename Mask, typename T, typename Shared>
__device__ void load_key_tiles(const Sm90Backward<T>& p, Shared& shared) {
  constexpr int kBlock = Shared::kBlock, kPanels = Shared::kPanels;
  constexpr int kTiles = Shared::kTiles, kStages = Shared::kStages;
  const int group = p.problem.group, key_heads = p.problem.heads / group;
  const int query_blocks = (p.problem.queries + kBlock - 1) / kBlock;
  RingPosition<kTiles> at;
  RingPosition<kStages> ring;
  TileOrder::Tile found;
  for (int index = p.order.first(); take_tile(p, shared, at, index, found); index = p.order.take()) {
    const int row = found.tile * Shared::kRows;
    const int batch = found.head / key_heads, key_head = found.head % key_heads;
    const auto seen_by = [&](int head) {
      return p.mask.blocks.of_keys(p.mask.blocks.mask_head(batch, head), row / kMaskBlock);
    };
    int first = 0;
    if constexpr (Mask::kCausal)
      first = min(max(row - p.problem.query_offset, 0) / kBlock, query_blocks - kLeastBlocks);
    int blocks = query_blocks - first;
    if constexpr (Mask::kBlocks) {
      blocks = 0;
      for (int member = 0; member < group; ++member) blocks += seen_by(key_head * group + member).template count<1>();
    }
    const bool none = Mask::kBlocks && blocks < kLeastBlocks;
    shared.tiles[at.slot] = {row, found.head, first, none ? 1 : blocks};
    const uint32_t tile_full = shared.tile_full[at.slot];
    mbarrier_expect(tile_full, 2 * Shared::kRowBytes);
    load_panels<kPanels>(shared.tile[at.slot][0], kRowPanel, p.key, row, key_head, batch, tile_full);
    load_panels<kPanels>(shared.tile[at.slot][1], kRowPanel, p.value, row, key_head, batch, tile_full);
    at.advance();
    for (int member = 0; member < group; ++member) {
      const int head = key_head * group + member;
      const int64_t statistics = (static_cast<int64_t>(batch) * p.problem.heads + head) * p.pitch;
      const SeenBlocks seen = Mask::kBlocks ? seen_by(head) : SeenBlocks{};
      const auto load_block = [&](int block) {
        constexpr int kStatisticsBytes = kBlock * 4;
        const uint32_t full = shared.block_full[ring.slot];
        barrier_wait(shared.block_empty[ring.slot], ring.phase ^ 1);
        if constexpr (Mask::kBlocks)
          shared.masked[ring.slot] = {block * kBlock, seen.classes<1>(block), p.mask.blocks.mask_head(batch, head),
                                      member};
        mbarrier_expect(full, 2 * (Shared::kBlockBytes + kStatisticsBytes));
        load_panels<kPanels>(shared.block[ring.slot][0], kBlockPanel, p.query, block * kBlock, head, batch, full);
        load_panels<kPanels>(shared.block[ring.slot][1], kBlockPanel, p.dout, block * kBlock, head, batch, full);
        bulk_load(shared.bias[ring.slot], p.row_bias + statistics + block * kBlock, kStatisticsBytes, full);
        bulk_load(shared.delta[ring.slot], p.row_delta + statistics + block * kBlock, kStatisticsBytes, full);
        ring.advance();
      };
      if constexpr (Mask::kBlocks) {
        seen.for_each_from_last<1>(load_block);
        if (none && member == 0) load_block(0);
      } else {
#pragma unroll 1  // saves registers
        for (int block = first; block < query_blocks; ++block) load_block(block);
      }
    }
  }
}

#endif

}  // namespace gptkernels::cuda
