// The order in which attention's blocks take the tiles of all heads.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#include "cuda/common/random_delay.cuh"
#endif

namespace gptkernels::cuda {

// Heads are in sections whose keys and values fit the L2 cache together; in a section the longest tiles come first, so
// that short ones fill up the end.
struct HeadTiles {
  int tiles;          // of a head
  int heads;          // of all batches
  int section;        // heads
  bool longest_last;  // whether tiles get longer with their number

  struct Tile {
    int tile;
    int head;  // of all batches
  };

  // For heads whose keys and values take `head_bytes`.
  static HeadTiles of(int64_t tiles, int64_t heads, int64_t head_bytes, bool longest_last, int64_t section_bytes) {
    const int64_t section = std::clamp<int64_t>(section_bytes / std::max<int64_t>(head_bytes, 1), 1, heads);
    return {static_cast<int>(tiles), static_cast<int>(heads), static_cast<int>(section), longest_last};
  }

#ifdef __CUDACC__
  // The tile that is taken as number `index` of all.
  __device__ Tile at(int index) const {
    const int start = index / (section * tiles) * section;
    const int within = index - start * tiles;
    const int wide = min(section, heads - start);
    const int row = within / wide;
    return {longest_last ? tiles - 1 - row : row, start + within - row * wide};
  }
#endif
};

// For persistent blocks: each takes the next tile when it has room.
struct TileOrder : HeadTiles {
  int* next;  // tiles taken by all blocks, beside each block's first; 0 before the launch

  static TileOrder of(int64_t tiles, int64_t heads, int64_t head_bytes, bool longest_last, void* next) {
    constexpr int64_t kSectionBytes = 16 << 20;
    return {HeadTiles::of(tiles, heads, head_bytes, longest_last, kSectionBytes), static_cast<int*>(next)};
  }

#ifdef __CUDACC__
  // By one thread of a block: the number of its first tile, and of the next ones.
  __device__ int first() const { return blockIdx.x; }
  __device__ int take() const {
    random_delay();
    return gridDim.x + atomicAdd(next, 1);
  }

  __device__ bool find(int index, Tile& tile) const {
    if (index >= tiles * heads) return false;
    tile = at(index);
    return true;
  }
#endif
};

}  // namespace gptkernels::cuda
