// The order in which attention's thread blocks take the tiles of all heads.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#include "cuda/common/random_delay.cuh"
#endif

namespace gptkernels::cuda {

// Heads are grouped into sections whose keys and values (for dk and dv: queries and dout) are meant to stay in the L2
// cache. In a section the longest tiles come first, so that short tiles fill the SMs at the end.
struct HeadTiles {
  int tiles;    // per head
  int heads;    // of all batches
  int section;  // heads per section
  bool longest_last;

  struct Tile {
    int tile;
    int head;  // batch * heads + head
  };

  static HeadTiles of(int64_t tiles, int64_t heads, int64_t head_bytes, bool longest_last, int64_t section_bytes) {
    const int64_t fitting = section_bytes / (head_bytes > 0 ? head_bytes : 1);
    const int64_t section = fitting < 1 ? 1 : fitting < heads ? fitting : heads;
    return {static_cast<int>(tiles), static_cast<int>(heads), static_cast<int>(section), longest_last};
  }

#ifdef __CUDACC__
  __device__ Tile at(int index) const {
    const int start = index / (section * tiles) * section;
    const int within = index - start * tiles;
    const int wide = min(section, heads - start);
    const int row = within / wide;
    return {longest_last ? tiles - 1 - row : row, start + within - row * wide};
  }
#endif
};

// Persistent thread blocks take tiles in this order. A thread block takes its next tile when it has started all or
// nearly all loads of its current tile.
struct TileOrder : HeadTiles {
  // Counts the calls of take(), from 0 at the launch. If it is null, after() assigns the tiles without a counter.
  int* next;

  static TileOrder of(int64_t tiles, int64_t heads, int64_t head_bytes, bool longest_last, void* next) {
    constexpr int64_t kSectionBytes = 16 << 20;
    return {HeadTiles::of(tiles, heads, head_bytes, longest_last, kSectionBytes), static_cast<int*>(next)};
  }

#ifdef __CUDACC__
  __device__ int first() const { return blockIdx.x; }
  __device__ int take() const {
    random_delay();
    return gridDim.x + atomicAdd(next, 1);
  }
  // Without a counter, every second round is in reverse order, so that a thread block with a long first tile has a
  // short second tile.
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
