// What the backward kernels for sm_90a share, whatever the head size (attention/sm90/backward.cu says how they work).
#pragma once

#include "common.cuh"
#include "cuda/attention/variants.h"
#include "cuda/common/launch.cuh"
#include "masks.cuh"

namespace gptkernels::cuda {

// Rows of the two statistics that the first kernel hands to the second: -logsumexp * log2(e), and D. Rows of a head
// are padded to tiles.
constexpr int kStatisticsTile = 128;

inline int64_t statistics_pitch(int64_t queries) {
  return ceil_div(queries, kStatisticsTile) * kStatisticsTile;
}

template <int HS>
struct BackwardShape {
  static constexpr int kRows = 128;  // of a tile: queries for dq, keys for dk and dv; 64 for each warpgroup
  static constexpr int kBlock = 64;  // of what a tile walks over
  static constexpr int kPanels = HS / kPanelColumns;
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kRowPanel = kRows * kPanelRowBytes;
  static constexpr int kRowBytes = kPanels * kRowPanel;
  static constexpr int kBlockPanel = kBlock * kPanelRowBytes;
  static constexpr int kBlockBytes = kPanels * kBlockPanel;
};

template <typename T>
struct Sm90Backward {
  CUtensorMap query, key, value, out, dout;  // boxes of kRows for what stays, of kBlock for what is walked over
  CUtensorMap dquery, dkey, dvalue;
  const float* logsumexp;
  const float* dlogsumexp;
  float* row_bias;   // -logsumexp * log2(e)
  float* row_delta;  // D
  int64_t pitch;
  Sm90Problem<T> problem;
  TileOrder order;
  Sm90Mask mask;
};

struct alignas(16) BackwardTile {
  int row;
  int head;    // of all batches; for dk and dv a key head
  int first;   // block
  int blocks;  // of one head
};

#if GPTKERNELS_WGMMA

// Barriers of the ring of tiles and of the ring of blocks, in shared memory from `first` on: full by the loading thread
// and its bytes, empty by the 8 computing warps.
template <int kTiles, int kStages>
struct BackwardBarriers {
  uint32_t first;

  __device__ uint32_t tile_full(int i) const { return first + 8 * i; }
  __device__ uint32_t tile_empty(int i) const { return first + 8 * (kTiles + i); }
  __device__ uint32_t block_full(int i) const { return first + 8 * (2 * kTiles + i); }
  __device__ uint32_t block_empty(int i) const { return first + 8 * (2 * kTiles + kStages + i); }

  __device__ void init() const {
    constexpr int kComputingWarps = 8;
    for (int i = 0; i < kTiles; ++i) {
      barrier_init(tile_full(i), 1);
      barrier_init(tile_empty(i), kComputingWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(block_full(i), 1);
      barrier_init(block_empty(i), kComputingWarps);
    }
    mbarrier_init_fence();
  }
};

// The tile of 64 rows that a warpgroup has in registers, times `factor` and rounded, to shared memory in panels that
// are `panel_bytes` apart.
template <typename T, int n>
__device__ void stage_tile(const float (&tile)[n], float factor, uint32_t shared, uint32_t panel_bytes) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < n / 8; ++i) {
    const float* t = &tile[8 * i];
    store_matrices(shared + i / 4 * panel_bytes + panel_offset(warp * 16 + lane % 16, i % 4 * 2 + lane / 16),
                   pack_pair<T>(t[0] * factor, t[1] * factor), pack_pair<T>(t[2] * factor, t[3] * factor),
                   pack_pair<T>(t[4] * factor, t[5] * factor), pack_pair<T>(t[6] * factor, t[7] * factor));
  }
}

// A warp's 16 rows of a panel of 64 columns as A operands.
__device__ inline void load_a(uint32_t* a, uint32_t panel, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    load_matrices(*reinterpret_cast<uint32_t (*)[4]>(a + 4 * i),
                  panel + panel_offset(row + lane % 16, 2 * i + lane / 16));
}

// D += A B with A (64 x 64) in registers and B (64 x 2n) as it lies.
template <typename T, int n>
__device__ void multiply_add(float (&d)[n], uint32_t (&a)[16], uint64_t b, bool accumulate) {
  pin_registers(a);
  pin_registers(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma<T, true>(d, &a[4 * i], b + i * kStepRows, i > 0 || accumulate);
  wgmma_commit();
}

__device__ inline float2 load_shared_pair(uint32_t shared) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(shared) : "memory");
  return pair;
}

#endif

// Head sizes of 72 to 128 (attention/sm90/backward_128.cu).
template <typename T>
Status attention_backward_sm90_128(const AttentionBackward<T>& p, Stream stream);

// Many short heads (attention/sm90/backward_one_pass.cu), of calls that attention_backward_sm90_serves.
template <typename T>
bool attention_backward_sm90_head_serves(const AttentionBackward<T>& p);
template <typename T>
int64_t attention_backward_sm90_head_workspace(const AttentionBackward<T>& p);
template <typename T>
Status attention_backward_sm90_head(const AttentionBackward<T>& p, Stream stream);

// Scores take scale_log2, gradients scale.
template <typename T>
Sm90Problem<T> backward_problem(const AttentionBackward<T>& p) {
  Sm90Problem<T> problem = sm90_problem(p.sizes, p.scale, p.mask, p.dropout);
  problem.scale = static_cast<float>(gradient_scale(p));
  return problem;
}

// Bytes of the workspace before what a mask wants: the tiles taken by either kernel, and the statistics.
inline int64_t backward_workspace(const AttentionSizes& s) {
  return 256 + 2 * s.batches * s.heads * statistics_pitch(s.queries) * static_cast<int64_t>(sizeof(float));
}

// Both kernels; each takes its tiles in the order that suits it.
template <typename T, typename DqueryShape, typename DkeyShape, auto kDquery, auto kDkey>
Status launch_backward(const AttentionBackward<T>& p, Stream stream) {
  constexpr int kRows = DqueryShape::kRows, kBlock = DqueryShape::kBlock, kThreads = DqueryShape::kThreads;
  const AttentionSizes& s = p.sizes;
  const int64_t heads = s.batches * s.heads, key_heads = s.batches * s.key_heads;
  const int64_t pitch = statistics_pitch(s.queries);
  // Workspace: the tiles taken by either kernel, then the statistics.
  int* taken = static_cast<int*>(p.workspace);
  float* statistics = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + 256);
  Sm90Backward<T> arguments = {
      .query = panel_map(p.query, s, s.heads, s.queries, kRows),
      .key = panel_map(p.key, s, s.key_heads, s.keys, kBlock),
      .value = panel_map(p.value, s, s.key_heads, s.keys, kBlock),
      .out = panel_map(p.out, s, s.heads, s.queries, kRows),
      .dout = panel_map(p.dout, s, s.heads, s.queries, kRows),
      .dquery = panel_map(p.dquery, s, s.heads, s.queries, DqueryShape::kStoredRows),
      .dkey = panel_map(p.dkey, s, s.key_heads, s.keys, DkeyShape::kStoredRows),
      .dvalue = panel_map(p.dvalue, s, s.key_heads, s.keys, DkeyShape::kStoredRows),
      .logsumexp = p.logsumexp,
      .dlogsumexp = p.dlogsumexp,
      .row_bias = statistics,
      .row_delta = statistics + heads * pitch,
      .pitch = pitch,
      .problem = backward_problem(p),
  };
  if (has_mask(p.mask))
    arguments.mask = Sm90Mask::of(p.mask, s, p.scale, true,
                                  static_cast<char*>(p.workspace) + ceil_div(backward_workspace(s), 256) * 256);
  if (max_dynamic_shared_memory<kDquery>() < DqueryShape::kSharedBytes ||
      max_dynamic_shared_memory<kDkey>() < DkeyShape::kSharedBytes)
    return cudaErrorInvalidConfiguration;
  const Status cleared = cudaMemsetAsync(taken, 0, 2 * sizeof(int), stream);
  if (cleared != cudaSuccess) return cleared;
  if (has_mask(p.mask)) {
    const Status found = find_mask_blocks(arguments.mask.blocks, p.mask, s, stream);
    if (found != cudaSuccess) return found;
  }
  const auto blocks = [](int64_t tiles) { return static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors())); };
  const int64_t token_bytes = 2 * DqueryShape::kPanels * kPanelRowBytes;

  const int64_t query_tiles = ceil_div(s.queries, kRows);
  arguments.order = TileOrder::of(query_tiles, heads, s.keys * token_bytes, p.mask.causal || has_mask(p.mask), taken);
  kDquery<<<blocks(query_tiles * heads), kThreads, DqueryShape::kSharedBytes, stream>>>(arguments);

  const int64_t key_tiles = ceil_div(s.keys, kRows);
  arguments.query = panel_map(p.query, s, s.heads, s.queries, kBlock);
  arguments.dout = panel_map(p.dout, s, s.heads, s.queries, kBlock);
  arguments.key = panel_map(p.key, s, s.key_heads, s.keys, kRows);
  arguments.value = panel_map(p.value, s, s.key_heads, s.keys, kRows);
  arguments.order =
      TileOrder::of(key_tiles, key_heads, s.queries * token_bytes * (s.heads / s.key_heads), false, taken + 1);
  launch_early<kDkey>(blocks(key_tiles * key_heads), kThreads, DkeyShape::kSharedBytes, stream, arguments);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
