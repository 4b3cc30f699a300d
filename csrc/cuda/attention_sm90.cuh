// What the attention kernels for sm_90a share: barriers, the order of tiles, and which keys a query sees.
#pragma once

#include <cmath>

#include "../attention.h"
#include "../philox.h"
#include "common/approximate.cuh"
#include "common/hopper.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/tensor_map.cuh"
#include "common/warpgroups.cuh"
#include "common/wgmma.cuh"

namespace gptkernels::cuda {

#if GPTKERNELS_WGMMA

// Keeps what x (never -inf) is computed from ahead of what follows, where the assembler would move it behind a wait: a
// store that never happens needs x.
__device__ inline void complete(float x) {
  asm volatile("{\n.reg .pred never;\nsetp.eq.f32 never, %0, 0fFF800000;\n@never st.shared.f32 [%1], %0;\n}" ::"f"(x),
               "r"(0)
               : "memory");
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

#endif

// ---- which keys a query sees ----------------------------------------------------------------------------------------

// What a kernel needs to know beside q, k and v. The plain form, causal or not, is compiled without the rest.
template <typename T>
struct Sm90Problem {
  int queries;
  int keys;
  int heads;
  int batches;
  int group;  // query heads for each key head
  int query_offset;
  float scale;
  float scale_log2;  // scale * log2(e)
  AttentionMask<T> mask;
  AttentionDropout dropout;
};

template <typename T>
Sm90Problem<T> sm90_problem(const AttentionSizes& sizes, double scale, const AttentionMask<T>& mask,
                            const AttentionDropout& dropout) {
  return {.queries = static_cast<int>(sizes.queries),
          .keys = static_cast<int>(sizes.keys),
          .heads = static_cast<int>(sizes.heads),
          .batches = static_cast<int>(sizes.batches),
          .group = static_cast<int>(sizes.heads / sizes.key_heads),
          .query_offset = static_cast<int>(mask.query_offset),
          .scale = static_cast<float>(scale),
          .scale_log2 = static_cast<float>(scale * 1.4426950408889634),
          .mask = mask,
          .dropout = dropout};
}

template <typename T>
CUtensorMap panel_map(const HeadsView<T>& t, const AttentionSizes& sizes, int64_t heads, int64_t tokens, int rows) {
  return panel_map<std::remove_const_t<T>>(t.data, sizes.head_size, t.token, tokens, t.head, heads, t.batch,
                                           sizes.batches, rows);
}

// ---- the order of tiles ---------------------------------------------------------------------------------------------

// Tiles of all heads in the order in which blocks take them, each block the next one when it has room: heads in
// sections whose keys and values fit the L2 cache together; in a section the longest tiles first, so that short ones
// fill up the end.
struct TileOrder {
  int tiles;          // of a head
  int heads;          // of all batches
  int section;        // heads
  bool longest_last;  // whether tiles get longer with their number
  int* next;          // tiles taken by all blocks, beside each block's first; 0 before the launch

  struct Tile {
    int tile;
    int head;  // of all batches
  };

  // For heads whose keys and values take `head_bytes`.
  static TileOrder of(int64_t tiles, int64_t heads, int64_t head_bytes, bool longest_last, void* next) {
    constexpr int64_t kSectionBytes = 16 << 20;
    const int64_t section = std::clamp<int64_t>(kSectionBytes / std::max<int64_t>(head_bytes, 1), 1, heads);
    return {static_cast<int>(tiles), static_cast<int>(heads), static_cast<int>(section), longest_last,
            static_cast<int*>(next)};
  }

#ifdef __CUDACC__
  // By one thread of a block: the number of its first tile, and of the next ones.
  __device__ int first() const { return blockIdx.x; }
  __device__ int take() const { return gridDim.x + atomicAdd(next, 1); }

  __device__ bool find(int index, Tile& tile) const {
    if (index >= tiles * heads) return false;
    const int start = index / (section * tiles) * section;
    const int within = index - start * tiles;
    const int wide = min(section, heads - start);
    const int row = within / wide;
    tile.tile = longest_last ? tiles - 1 - row : row;
    tile.head = start + within - row * wide;
    return true;
  }
#endif
};

// ---- what these kernels serve
// -----------------------------------------------------------------------------------------

template <typename T>
bool suits_tma(const HeadsView<T>& t, const AttentionSizes& s, int64_t heads, int64_t tokens) {
  return tma_takes<std::remove_const_t<T>>(t.data, t.token, tokens, t.head, heads, t.batch, s.batches);
}

// Causal or not, with nothing else that hides a key, no dropout, and sizes that 32 bits index.
template <typename T, auto kKernel, typename Params>
bool sm90_serves(const Params& p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  const AttentionSizes& s = p.sizes;
  const AttentionMask<T>& mask = p.mask;
  return built_for_wgmma<kKernel>() && tensor_map_encoder() && s.head_size % 8 == 0 && p.scale > 0 &&
         p.dropout.probability == 0 && !mask.key_begin && !mask.key_end && !mask.allowed && !mask.bias &&
         std::abs(mask.query_offset) < kLargest && s.queries < kLargest && s.keys < kLargest &&
         s.batches * s.heads * (ceil_div(s.queries, 128) + ceil_div(s.keys, 128)) < kLargest &&
         suits_tma(p.query, s, s.heads, s.queries) && suits_tma(p.key, s, s.key_heads, s.keys) &&
         suits_tma(p.value, s, s.key_heads, s.keys) && suits_tma(p.out, s, s.heads, s.queries);
}

}  // namespace gptkernels::cuda
