// The order in which attention's thread blocks take the tiles of all heads.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#include "cuda/common/random_delay.cuh"
#endif

namespace gptkernels::cuda {

// Heads are in sections whose keys and values fit the L2 cache together. In a section the longest tiles come first, so
// that short ones fill the last SMs.
struct HeadTiles {
  int tiles;          // in a head
  int heads;          // in all batches
  int section;        // heads in a section
  bool longest_last;  // whether tiles get longer with their number

  struct Tile {
    int tile;
    int head;  // batch * heads + head
  };

  // A head's keys and values have `head_bytes`.
  static HeadTiles of(int64_t tiles, int64_t heads, int64_t head_bytes, bool longest_last, int64_t section_bytes) {
    const int64_t section = std::clamp<int64_t>(section_bytes / std::max<int64_t>(head_bytes, 1), 1, heads);
    return {static_cast<int>(tiles), static_cast<int>(heads), static_cast<int>(section), longest_last};
  }

#ifdef __CUDACC__
  // Returns the tile that is taken as number `index`.
  __device__ Tile at(int index) const {
    const int start = index / (section * tiles) * section;
    const int within = index - start * tiles;
    const int wide = min(section, heads - start);
    const int row = within / wide;
    return {longest_last ? tiles - 1 - row : row, start + within - row * wide};
  }
#endif
};

// The same for persistent thread blocks: each takes the next tile when it has room.
struct TileOrder : HeadTiles {
  // The counter of tiles taken after each thread block's first, 0 before the launch; or null: they are dealt out in
  // turn.
  int* next;

  static TileOrder of(int64_t tiles, int64_t heads, int64_t head_bytes, bool longest_last, void* next) {
    constexpr int64_t kSectionBytes = 16 << 20;
    return {HeadTiles::of(tiles, heads, head_bytes, longest_last, kSectionBytes), static_cast<int*>(next)};
  }

#ifdef __CUDACC__
  // One thread of a block calls these for the number of its first tile, and of each next one.
  __device__ int first() const { return blockIdx.x; }
  __device__ int take() const {
    random_delay();
    return gridDim.x + atomicAdd(next, 1);
  }
  // Returns the number of the tile after `round` others. Without a counter tiles are dealt out there and back, so that
  // a thread block whose first tile is long has a short one next.
  __device__ int after(int round) const {
    if (next) return take();
    const int width = static_cast<int>(gridDim.x), own = static_cast<int>(blockIdx.x);
    return round * width + (round % 2 ? width - 1 - own : own);
  }

  __device__ bool find(int index, Tile& tile) const {
    if (index >= tiles * heads) return false;
    tile = at(index);
    return true;
  }
#endif
};

}  // namespace gptkernels::cuda
