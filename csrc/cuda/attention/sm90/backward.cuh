// Sizes, arguments and launch of the backward kernels for sm_90a, which backward.cu describes.
#pragma once

#include "common.cuh"
#include "cuda/attention/variants.h"
#include "cuda/common/launch.cuh"
#include "masks.cuh"

namespace gptkernels::cuda {

constexpr int kComputingWarps = 8;
constexpr int kRowPanel = 128 * kPanelRowBytes;   // of a tile
constexpr int kBlockPanel = 64 * kPanelRowBytes;  // of a block

// A tile is 128 queries for dq, or 128 keys for dk and dv; the thread block iterates over blocks of 64 keys or queries.
template <int HS>
struct BackwardShape {
  static constexpr int kRows = 128;
  static constexpr int kBlock = 64;
  static constexpr int kPanels = HS / kPanelColumns;
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kRowBytes = kPanels * kRowPanel;
  static constexpr int kBlockBytes = kPanels * kBlockPanel;
  static constexpr int kStoredRows = HS == 64 ? 64 : kRows;  // rows per TMA box of results
};

struct alignas(16) BackwardTile {
  int row;   // -1 after the last tile
  int head;  // query head (for dk and dv: key head), counted over all batches
  int first;
  int blocks;  // number per query head; for dk and dv with a block mask, for all query heads that share the keys
};

template <typename T>
struct Sm90Backward {
  CUtensorMap query, key, value, out, dout;  // boxes of tiles or blocks
  CUtensorMap dquery, dkey, dvalue;
  const float* logsumexp;
  const float* dlogsumexp;
  // The kernel for dq computes delta and the bias of each query, and the kernel for dk and dv reads them.
  float* row_bias;   // -logsumexp * log2(e), or shifted_bias()
  float* row_delta;  // delta; with dropout, (1 - p) delta
  int64_t pitch;     // elements per head
  Sm90Problem<T> problem;
  TileOrder order;
  Sm90Mask mask;

#ifdef __CUDACC__
  // `head` is counted over all batches.
  __device__ int mask_head(int head) const { return mask.blocks.mask_head(head / problem.heads, head % problem.heads); }
#endif
};

template <typename T>
Status attention_backward_sm90_128(const AttentionBackward<T>& p, Stream stream);

// backward_one_pass.cu, for many heads of up to 1024 queries. The call must satisfy attention_backward_sm90_supports().
template <typename T>
bool attention_backward_sm90_head_supports(const AttentionBackward<T>& p);
template <typename T>
int64_t attention_backward_sm90_head_workspace(const AttentionBackward<T>& p);
template <typename T>
Status attention_backward_sm90_head(const AttentionBackward<T>& p, Stream stream);

// `scale_log2` is the factor of the scores, `scale` the factor of dq and dk.
template <typename T>
Sm90Problem<T> backward_problem(const AttentionBackward<T>& p) {
  Sm90Problem<T> problem = sm90_problem(p.sizes, p.scale, p.mask, p.dropout);
  problem.scale = static_cast<float>(gradient_scale(p));
  return problem;
}

inline int64_t statistics_pitch(int64_t queries) {
  constexpr int kRows = BackwardShape<64>::kRows;
  return ceil_div(queries, kRows) * kRows;
}

// The bytes of TileOrder's counters and the statistics. The arrays of a mask follow in the workspace.
inline int64_t backward_workspace(const AttentionSizes& s) {
  const int64_t statistics = 2 * s.batches * s.heads * statistics_pitch(s.queries);
  return ceil_div(256 + statistics * static_cast<int64_t>(sizeof(float)), 256) * 256;
}

template <typename T, typename DqueryShared, typename DkeyShared, auto kDquery, auto kDkey>
Status launch_backward(const AttentionBackward<T>& p, Stream stream) {
  constexpr int kRows = DqueryShared::kRows, kBlock = DqueryShared::kBlock, kThreads = DqueryShared::kThreads;
  constexpr int kStoredRows = DqueryShared::kStoredRows;
  constexpr int kDqueryBytes = sizeof(DqueryShared) + 1024, kDkeyBytes = sizeof(DkeyShared) + 1024;
  static_assert(kDqueryBytes <= 227 * 1024 && kDkeyBytes <= 227 * 1024);
  const AttentionSizes& s = p.sizes;
  const int64_t heads = s.batches * s.heads, key_heads = s.batches * s.key_heads;
  const int64_t pitch = statistics_pitch(s.queries);
  int* taken = static_cast<int*>(p.workspace);
  float* statistics = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + 256);
  Sm90Backward<T> arguments = {
      .query = panel_map(p.query, s, s.heads, s.queries, kRows),
      .key = panel_map(p.key, s, s.key_heads, s.keys, kBlock),
      .value = panel_map(p.value, s, s.key_heads, s.keys, kBlock),
      .out = panel_map(p.out, s, s.heads, s.queries, kRows),
      .dout = panel_map(p.dout, s, s.heads, s.queries, kRows),
      .dquery = panel_map(p.dquery, s, s.heads, s.queries, kStoredRows),
      .dkey = panel_map(p.dkey, s, s.key_heads, s.keys, kStoredRows),
      .dvalue = panel_map(p.dvalue, s, s.key_heads, s.keys, kStoredRows),
      .logsumexp = p.logsumexp,
      .dlogsumexp = p.dlogsumexp,
      .row_bias = statistics,
      .row_delta = statistics + heads * pitch,
      .pitch = pitch,
      .problem = backward_problem(p),
  };
  if (max_dynamic_shared_memory<kDquery>() < kDqueryBytes || max_dynamic_shared_memory<kDkey>() < kDkeyBytes)
    return cudaErrorInvalidConfiguration;
  const Status cleared = cudaMemsetAsync(taken, 0, 2 * sizeof(int), stream);
  if (cleared != cudaSuccess) return cleared;
  if (has_mask(p.mask)) {
    char* const memory = static_cast<char*>(p.workspace) + backward_workspace(s);
    arguments.mask = Sm90Mask::of(p.mask, s, p.scale, true, memory);
    const Status found = find_mask_blocks(arguments.mask.blocks, p.mask, s, stream);
    if (found != cudaSuccess) return found;
  }
  const auto blocks = [](int64_t tiles) { return static_cast<unsigned>(min(tiles, int64_t{multiprocessors()})); };
  const int64_t token_bytes = 2 * DqueryShared::kPanels * kPanelRowBytes;

  const int64_t query_tiles = ceil_div(s.queries, kRows);
  arguments.order = TileOrder::of(query_tiles, heads, s.keys * token_bytes, p.mask.causal || has_mask(p.mask), taken);
  kDquery<<<blocks(query_tiles * heads), kThreads, kDqueryBytes, stream>>>(arguments);

  const int64_t key_tiles = ceil_div(s.keys, kRows);
  arguments.query = panel_map(p.query, s, s.heads, s.queries, kBlock);
  arguments.dout = panel_map(p.dout, s, s.heads, s.queries, kBlock);
  arguments.key = panel_map(p.key, s, s.key_heads, s.keys, kRows);
  arguments.value = panel_map(p.value, s, s.key_heads, s.keys, kRows);
  arguments.order =
      TileOrder::of(key_tiles, key_heads, s.queries * token_bytes * (s.heads / s.key_heads), false, taken + 1);
  launch_early<kDkey>(blocks(key_tiles * key_heads), kThreads, kDkeyBytes, stream, arguments);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
