// Attention's backward for sm_90a, in two kernels that sum in registers, in one order: no atomics, and nothing of the
// size of the scores is stored. With P the probabilities, g the gradient of out, and per row D = sum(g out) -
// dlogsumexp:
//
//   dS = P (g v^T - D)    dq = scale dS k    dk = scale dS^T q    dv = P^T g
//
// The first kernel walks over the keys of 128 queries for dq, and stores D; the second walks over the queries of 128
// keys for dk and dv. Both compute the scores again: 7 products for the 5 of a single kernel, which would have to add
// up dq from many blocks. In both, A operands are registers: P and dS are never in shared memory.
//
// Here are the kernels for head sizes up to 64; attention/sm90/backward_128.cu has those for more, and
// attention/sm90/backward_one_pass.cu the single kernel for many short heads.
#include "backward.cuh"

namespace gptkernels::cuda {
namespace {

template <int HS>
struct TileShape : BackwardShape<HS> {
  static constexpr int kStoredRows = 64;  // of a box of dq, dk and dv
  static constexpr int kTiles = 2;        // buffers for what stays during a tile
  static constexpr int kStages = 6;       // buffers for blocks
  static constexpr int kOutPanel = 64 * kPanelRowBytes;
  static constexpr int kOutBytes = BackwardShape<HS>::kPanels * kOutPanel;  // of a warpgroup
};

template <int HS>
struct DqueryShape : TileShape<HS> {
  using Base = TileShape<HS>;
  // Shared memory: query, dout, out (kTiles); keys and values (kStages); dquery (2 warpgroups); barriers; tiles;
  // masked blocks.
  static constexpr int kTileBytes = 3 * Base::kRowBytes;
  static constexpr int kBlocksAt = Base::kTiles * kTileBytes;
  static constexpr int kOutAt = kBlocksAt + Base::kStages * 2 * Base::kBlockBytes;
  static constexpr int kBarriersAt = kOutAt + 2 * Base::kOutBytes;
  static constexpr int kTilesAt = kBarriersAt + 8 * (2 * Base::kTiles + 2 * Base::kStages);
  static constexpr int kMaskedAt = kTilesAt + Base::kTiles * static_cast<int>(sizeof(BackwardTile));
  static constexpr int kSharedBytes = kMaskedAt + Base::kStages * static_cast<int>(sizeof(MaskedBlock)) + 1024;
};

template <int HS>
struct DkeyShape : TileShape<HS> {
  using Base = TileShape<HS>;
  static constexpr int kStatisticsBytes = Base::kBlock * 4;
  // Shared memory: key, value (kTiles); queries and dout, statistics (kStages); dkey, dvalue (2 warpgroups); barriers;
  // tiles; masked blocks; which of their queries have a shift.
  static constexpr int kTileBytes = 2 * Base::kRowBytes;
  static constexpr int kBlocksAt = Base::kTiles * kTileBytes;
  static constexpr int kOutAt = kBlocksAt + Base::kStages * 2 * Base::kBlockBytes;
  static constexpr int kStatisticsAt = kOutAt + 2 * Base::kOutBytes;
  static constexpr int kBarriersAt = kStatisticsAt + Base::kStages * 2 * kStatisticsBytes;
  static constexpr int kTilesAt = kBarriersAt + 8 * (2 * Base::kTiles + 2 * Base::kStages);
  static constexpr int kMaskedAt = kTilesAt + Base::kTiles * static_cast<int>(sizeof(BackwardTile));
  static constexpr int kShiftedAt = kMaskedAt + Base::kStages * static_cast<int>(sizeof(MaskedBlock));
  static constexpr int kSharedBytes = kShiftedAt + Base::kStages * kShiftedBytes + 1024;
};

#if GPTKERNELS_WGMMA

// The tile of 64 rows that a warpgroup has in registers, rounded, to global memory by way of shared memory.
template <typename T, int HS>
__device__ void store_tile(const float (&tile)[HS / 2], float factor, const CUtensorMap& map, uint32_t shared, int row,
                           int head, int batch, int barrier) {
  using Shape = TileShape<HS>;
  const int thread = threadIdx.x % kWarpgroup;
  if (thread == 0) tma_store_wait_read();
  warpgroup_barrier(barrier);
  stage_tile<T>(tile, factor, shared, Shape::kOutPanel);
  fence_async_shared();
  warpgroup_barrier(barrier);
  if (thread == 0) {
    for (int i = 0; i < Shape::kPanels; ++i)
      tma_store(map, shared + i * Shape::kOutPanel, i * kPanelColumns, row, head, batch);
    tma_store_commit();
  }
}

// A warpgroup passes over blocks that only the other one needs, while the buffers of the block at hand and of the one
// before are not free yet. Between that one and the next it passes over so many at most: then it computes a block that
// is hidden for it, or it would wait for a buffer of its own.
template <int kStages>
constexpr int kMostPassed = kStages - 3;

// D = A B with A (64 x 64) in registers and B's rows the columns of D.
template <typename T>
__device__ void multiply(float (&d)[32], const uint32_t (&a)[16], uint64_t b) {
  pin_registers(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma<T, false>(d, &a[4 * i], b + i * kStepK, i > 0);
  wgmma_commit();
}

// ---- dropout --------------------------------------------------------------------------------------------------------
//
// dS = P (D g v^T - delta) with D 0 or 1 / (1 - p): what is computed is (1 - p) dS, of which dq and dk are made by
// their last factors, with `delta` times 1 - p. From when the mask is drawn until dS a dropped P is negative.

struct MarkDropped {
  float (&weights)[32];

  __device__ explicit MarkDropped(float (&w)[32]) : weights(w) {}
  __device__ void operator()(int i, bool keep, bool keep_next) const {
    if (!keep) weights[i] = -weights[i];
    if (!keep_next) weights[i + 1] = -weights[i + 1];
  }
};

template <bool kDropout>
__device__ float dscore(float weight, float dp, float delta) {
  if constexpr (!kDropout) return weight * (dp - delta);
  return fmaf(fmaxf(weight, 0), dp, -fabsf(weight) * delta);
}

// Weights as A operands, negative ones as 0.
template <typename T>
__device__ void positive_to_a(uint32_t (&a)[16], const float (&weights)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) a[i] = pack_positive<T>(weights[2 * i], weights[2 * i + 1]);
}

// ---- dq -------------------------------------------------------------------------------------------------------------

template <typename T, int HS, bool kCausal, bool kDropout, bool kBounds, Masks kMasks>
__global__ void __launch_bounds__(BackwardShape<HS>::kThreads, 1)
    attention_backward_dquery_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {
  using Shape = DqueryShape<HS>;
  constexpr int kStages = Shape::kStages, kTiles = Shape::kTiles, kBlock = Shape::kBlock;
  extern __shared__ uint8_t shared_bytes[];
  const uint32_t start = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes));
  const uint32_t shared = (start + 1023) / 1024 * 1024;
  BackwardTile* tiles = reinterpret_cast<BackwardTile*>(shared_bytes + (shared - start) + Shape::kTilesAt);
  constexpr bool kMasked = kMasks != Masks::kNone;
  MaskedBlock* masked = reinterpret_cast<MaskedBlock*>(shared_bytes + (shared - start) + Shape::kMaskedAt);
  const BackwardBarriers<kTiles, kStages> barriers{shared + Shape::kBarriersAt};
  const auto tile_at = [&](int i) { return shared + i * Shape::kTileBytes; };
  const auto key_at = [&](int i) { return shared + Shape::kBlocksAt + i * 2 * Shape::kBlockBytes; };
  const auto value_at = [&](int i) { return key_at(i) + Shape::kBlockBytes; };

  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  let_next_kernel_start();

  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x != 0) return;
    RingPosition<kTiles> at;
    RingPosition<kStages> ring;
    for (int index = p.order.first();; index = p.order.take()) {
      barrier_wait(barriers.tile_empty(at.slot), at.phase ^ 1);
      TileOrder::Tile found;
      if (!p.order.find(index, found)) {
        tiles[at.slot].row = -1;
        barrier_arrive(barriers.tile_full(at.slot));
        return;
      }
      const int row = found.tile * Shape::kRows;
      const int batch = found.head / p.problem.heads, head = found.head % p.problem.heads;
      int first = 0, end = p.problem.keys;
      if constexpr (kBounds) {
        const KeyRange range = KeyRange::of(p.problem, batch);
        first = range.begin / kBlock;
        end = range.end;
      }
      if constexpr (kCausal) end = min(end, row + Shape::kRows + p.problem.query_offset);
      int blocks = max((end + kBlock - 1) / kBlock, first);  // before the end
      SeenBlocks seen;
      int mask_head = 0;
      if constexpr (kMasked) {
        mask_head = p.mask.blocks.mask_head(batch, head);
        seen = p.mask.blocks.of_queries(mask_head, row / kMaskBlock);
        blocks = seen.count<1>();
      }
      tiles[at.slot] = {row, found.head, first, blocks};
      const int key_head = head / p.problem.group;
      mbarrier_expect(barriers.tile_full(at.slot), Shape::kTileBytes);
      for (int i = 0; i < Shape::kPanels; ++i) {
        const uint32_t to = tile_at(at.slot) + i * Shape::kRowPanel;
        tma_load(to, p.query, i * kPanelColumns, row, head, batch, barriers.tile_full(at.slot));
        tma_load(to + Shape::kRowBytes, p.dout, i * kPanelColumns, row, head, batch, barriers.tile_full(at.slot));
        tma_load(to + 2 * Shape::kRowBytes, p.out, i * kPanelColumns, row, head, batch, barriers.tile_full(at.slot));
      }
      at.advance();
      const auto load_block = [&](int block) {
        barrier_wait(barriers.block_empty(ring.slot), ring.phase ^ 1);
        if constexpr (kMasked) masked[ring.slot] = {block * kBlock, seen.classes<1>(block), mask_head, 0};
        mbarrier_expect(barriers.block_full(ring.slot), 2 * Shape::kBlockBytes);
        for (int i = 0; i < Shape::kPanels; ++i) {
          tma_load(key_at(ring.slot) + i * Shape::kBlockPanel, p.key, i * kPanelColumns, block * kBlock, key_head,
                   batch, barriers.block_full(ring.slot));
          tma_load(value_at(ring.slot) + i * Shape::kBlockPanel, p.value, i * kPanelColumns, block * kBlock, key_head,
                   batch, barriers.block_full(ring.slot));
        }
        ring.advance();
      };
      if constexpr (kMasked) {
        seen.for_each_from_last<1>(load_block);
      } else {
#pragma unroll 1  // fewer registers
        for (int block = blocks - 1; block >= first; --block) load_block(block);
      }
    }
  }

  take_registers<240>();
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const float factor = p.problem.scale_log2;
  const DropoutDraw dropout(kDropout ? p.problem.dropout : DropoutArguments{});

  float scores_a[32], scores_b[32], dp[32], dquery[32];
  uint32_t q[16], g[16], ds[16];
  RingPosition<kStages> ring;
  RingPosition<kTiles> at;
  int half = warpgroup;  // of a tile
  while (true) {
    barrier_wait(barriers.tile_full(at.slot), at.phase);
    const BackwardTile tile = tiles[at.slot];
    if (tile.row < 0) break;
    // Causal, one half of a tile has a block more than the other: the warpgroups take it in turn.
    half ^= 1;
    const int own_row = half * 64 + warp * 16 + lane / 4;
    load_a(q, tile_at(at.slot), half * 64 + warp * 16);
    load_a(g, tile_at(at.slot) + Shape::kRowBytes, half * 64 + warp * 16);

    const int mask_head =
        kMasked ? p.mask.blocks.mask_head(tile.head / p.problem.heads, tile.head % p.problem.heads) : 0;
    MaskRow mask_rows[2] = {};  // kAdditive; loaded ahead of their use
    if constexpr (kMasks == Masks::kAdditive) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile.row + own_row + 8 * r;
        if (row < p.problem.queries) mask_rows[r] = p.mask.blocks.row(mask_head, row);
      }
    }
    // D and the bias of this thread's two rows.
    float bias[2], delta[2] = {0, 0};
    {
      uint32_t o[16];
      load_a(o, tile_at(at.slot) + 2 * Shape::kRowBytes, half * 64 + warp * 16);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 a = unpack_pair<T>(o[i]), b = unpack_pair<T>(g[i]);
        delta[i % 2] += a.x * b.x + a.y * b.y;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.row + own_row + 8 * r;
      const int64_t index = static_cast<int64_t>(tile.head) * p.problem.queries + row;
      const bool inside = row < p.problem.queries;
      delta[r] = quad_sum(delta[r]);
      if (inside && p.dlogsumexp) delta[r] -= p.dlogsumexp[index];
      const float logsumexp = inside ? p.logsumexp[index] : -INFINITY;
      if constexpr (kDropout) delta[r] *= keep_probability(p.problem);
      bias[r] = logsumexp == -INFINITY ? -INFINITY : -logsumexp * kLog2E;  // P = 0 for a query that sees no key
      if (kMasks == Masks::kAdditive && mask_rows[r].shift != 0 && bias[r] != -INFINITY) {
        bias[r] = shifted_bias<T>(logsumexp, mask_rows[r]);
        if constexpr (has_uniform_rows<T>(kMasks)) clear_row(q, r);
      }
      if (lane % 4 == 0) {
        p.row_bias[tile.head * p.pitch + row] = bias[r];
        p.row_delta[tile.head * p.pitch + row] = delta[r];
      }
    }
    __syncwarp();
    barrier_arrive_if(lane == 0, barriers.tile_empty(at.slot));
    at.advance();

    // Blocks that none of the warpgroup's queries sees.
    int block = tile.blocks - 1;
    const int first = kBounds ? tile.first : 0;
    const KeyRange range = kBounds ? KeyRange::of(p.problem, tile.head / p.problem.heads) : KeyRange{};
    // A block's hidden keys and values to 0, before any product reads them.
    const auto clear_block = [&](int slot, int of) {
      if (!kBounds || range.has_all(of * kBlock, kBlock)) return;
      clear_padding<kBlock, Shape::kPanels>(key_at(slot), range, of * kBlock, 1 + warpgroup);
      clear_padding<kBlock, Shape::kPanels>(value_at(slot), range, of * kBlock, 1 + warpgroup);
    };
    if constexpr (kCausal) {
      const int own_blocks = max((tile.row + half * 64 + 64 + p.problem.query_offset + kBlock - 1) / kBlock, first);
      for (; block >= own_blocks; --block) {
        barrier_wait(barriers.block_full(ring.slot), ring.phase);  // or its buffer may still be the other warpgroup's
        barrier_arrive_if(lane == 0, barriers.block_empty(ring.slot));
        ring.advance();
      }
    }
    // kMasked: on to the next block that the warpgroup's queries see.
    OwnBlock<1> own;
    int passed = 0;
    const auto find_own = [&] {
      const int passed_before = passed;
      for (passed = 0; block >= first; --block, ++passed) {
        barrier_wait(barriers.block_full(ring.slot), ring.phase);
        const MaskedBlock found = masked[ring.slot];
        own = OwnBlock<1>::of(found, half, [&](int, int r) {
          return p.mask.blocks.query_bits(found.mask_head, tile.row / kMaskBlock + half, found.first / kMaskBlock,
                                          warp * 16 + lane / 4 + 8 * r, lane % 4);
        });
        if (!own.hidden() || passed_before + passed == kMostPassed<kStages>) return;
        barrier_arrive_if(lane == 0, barriers.block_empty(ring.slot));
        ring.advance();
      }
    };
    if constexpr (kMasked) find_own();
    bool accumulate = false;
#pragma unroll
    for (int i = 0; i < 32; ++i) dquery[i] = 0;

    const auto step = [&](float (&current)[32], float (&next)[32]) {
      const RingPosition<kStages> now = ring;
      multiply<T>(dp, g, panel_descriptor(value_at(now.slot)));
      ring.advance();
      const OwnBlock<1> seen = own;
      if constexpr (kMasked) {
        --block;
        find_own();
      } else if (block > first) {
        barrier_wait(barriers.block_full(ring.slot), ring.phase);
        clear_block(ring.slot, block - 1);
      }
      multiply<T>(next, q, panel_descriptor(key_at(ring.slot)));  // after the last block nobody reads it

      const int first_key = kMasked ? seen.first : block * kBlock;
      if (kMasked && !seen.seen()) {
        if (kMasks == Masks::kAdditive && seen.adds())
          add_values(current, p.problem, p.mask, tile.head / p.problem.heads, tile.head % p.problem.heads,
                     tile.row + own_row, first_key);
        hide(current, seen.bits);
      }
      int end = kBounds ? range.end : p.problem.keys;
      if constexpr (kCausal) end = min(end, tile.row + half * 64 + p.problem.query_offset + 1);
      if (kMasked) end = INT_MAX;
      if (first_key + kBlock > end || (kBounds && first_key < range.begin)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          int limit = kBounds ? range.end : p.problem.keys;
          if constexpr (kCausal) limit = min(limit, tile.row + own_row + 8 * r + p.problem.query_offset + 1);
          limit -= first_key + 2 * (lane % 4);
          const int begin = kBounds ? range.begin - first_key - 2 * (lane % 4) : 0;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (8 * i >= limit || (kBounds && 8 * i < begin)) current[4 * i + 2 * r] = -INFINITY;
            if (8 * i + 1 >= limit || (kBounds && 8 * i + 1 < begin)) current[4 * i + 2 * r + 1] = -INFINITY;
          }
        }
      }
      float last = 0;
#pragma unroll
      for (int i = 0; i < 32; ++i) current[i] = exp2_approximately(fmaf(current[i], factor, bias[i / 2 % 2]));
#pragma unroll
      for (int i = 0; i < 32; i += 8) last = fmaxf(last, current[i + 7]);
      complete(last);
      if constexpr (kDropout)
        for_kept<32>(dropout, tile.head, tile.row + half * 64 + warp * 16, first_key, MarkDropped(current));
      wgmma_wait<1>();  // dp, and dq of the block before
      pin_registers(dp);
      pin_registers(ds);
#pragma unroll
      for (int i = 0; i < 32; ++i) dp[i] = dscore<kDropout>(current[i], dp[i], delta[i / 2 % 2]);
      accumulators_to_a<T>(ds, dp);
      multiply_add<T>(dquery, ds, panel_descriptor(key_at(now.slot)), accumulate);
      accumulate = true;
      wgmma_wait<1>();  // the scores of the block ahead
      pin_registers(next);
      return now;
    };

    // A block is free once its dq is done: a step later.
    int freed = -1;
    const auto free_block = [&] { barrier_arrive_if(lane == 0 && freed >= 0, barriers.block_empty(max(freed, 0))); };
    if (block >= first) {
      barrier_wait(barriers.block_full(ring.slot), ring.phase);
      clear_block(ring.slot, block);
      multiply<T>(scores_a, q, panel_descriptor(key_at(ring.slot)));
      wgmma_wait<0>();
      pin_registers(scores_a);
      while (true) {
        const int a = step(scores_a, scores_b).slot;
        free_block();
        freed = a;
        if ((kMasked ? block : --block) < first) break;
        const int b = step(scores_b, scores_a).slot;
        free_block();
        freed = b;
        if ((kMasked ? block : --block) < first) break;
      }
      wgmma_wait<0>();
      pin_registers(dquery);
      free_block();
    }
    store_tile<T, HS>(dquery, kDropout ? p.problem.scale / keep_probability(p.problem) : p.problem.scale, p.dquery,
                      shared + Shape::kOutAt + warpgroup * Shape::kOutBytes, tile.row + half * 64,
                      tile.head % p.problem.heads, tile.head / p.problem.heads, 1 + warpgroup);
  }
  if (thread == 0) tma_store_wait();
}

// ---- dk and dv ------------------------------------------------------------------------------------------------------

template <typename T, int HS, bool kCausal, bool kDropout, bool kBounds, Masks kMasks>
__global__ void __launch_bounds__(BackwardShape<HS>::kThreads, 1)
    attention_backward_dkey_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {
  using Shape = DkeyShape<HS>;
  constexpr int kStages = Shape::kStages, kTiles = Shape::kTiles, kBlock = Shape::kBlock;
  extern __shared__ uint8_t shared_bytes[];
  const uint32_t start = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes));
  const uint32_t shared = (start + 1023) / 1024 * 1024;
  BackwardTile* tiles = reinterpret_cast<BackwardTile*>(shared_bytes + (shared - start) + Shape::kTilesAt);
  constexpr bool kMasked = kMasks != Masks::kNone;
  MaskedBlock* masked = reinterpret_cast<MaskedBlock*>(shared_bytes + (shared - start) + Shape::kMaskedAt);
  constexpr bool kUniform = has_uniform_rows<T>(kMasks);
  const auto shifted_at = [&](int i) { return shared + Shape::kShiftedAt + i * kShiftedBytes; };
  const BackwardBarriers<kTiles, kStages> barriers{shared + Shape::kBarriersAt};
  const auto tile_at = [&](int i) { return shared + i * Shape::kTileBytes; };
  const auto query_at = [&](int i) { return shared + Shape::kBlocksAt + i * 2 * Shape::kBlockBytes; };
  const auto dout_at = [&](int i) { return query_at(i) + Shape::kBlockBytes; };
  const auto bias_at = [&](int i) { return shared + Shape::kStatisticsAt + i * 2 * Shape::kStatisticsBytes; };
  const auto delta_at = [&](int i) { return bias_at(i) + Shape::kStatisticsBytes; };

  if (threadIdx.x == 0) barriers.init();
  __syncthreads();

  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x != 0) return;
    const int key_heads = p.problem.heads / p.problem.group;
    wait_for_previous_kernel();
    const int query_blocks = (p.problem.queries + kBlock - 1) / kBlock;
    RingPosition<kTiles> at;
    RingPosition<kStages> ring;
    for (int index = p.order.first();; index = p.order.take()) {
      barrier_wait(barriers.tile_empty(at.slot), at.phase ^ 1);
      TileOrder::Tile found;
      if (!p.order.find(index, found)) {
        tiles[at.slot].row = -1;
        barrier_arrive(barriers.tile_full(at.slot));
        return;
      }
      const int row = found.tile * Shape::kRows;
      int first = 0;
      if constexpr (kCausal) first = min(max(row - p.problem.query_offset, 0) / kBlock, query_blocks);
      const int batch = found.head / key_heads, key_head = found.head % key_heads;
      const auto mask_head_of = [&](int member) {
        return p.mask.blocks.mask_head(batch, key_head * p.problem.group + member);
      };
      const auto seen_by = [&](int member) { return p.mask.blocks.of_keys(mask_head_of(member), row / kMaskBlock); };
      int blocks = query_blocks - first;
      if constexpr (kMasked) {
        blocks = 0;
        for (int member = 0; member < p.problem.group; ++member) blocks += SeenBlocks(seen_by(member)).count<1>();
      }
      if constexpr (kBounds) {
        const KeyRange range = KeyRange::of(p.problem, batch);
        if (row + Shape::kRows <= range.begin || row >= range.end) first = query_blocks;  // nothing but padding
        blocks = query_blocks - first;
      }
      tiles[at.slot] = {row, found.head, first, blocks};
      mbarrier_expect(barriers.tile_full(at.slot), Shape::kTileBytes);
      for (int i = 0; i < Shape::kPanels; ++i) {
        const uint32_t to = tile_at(at.slot) + i * Shape::kRowPanel;
        tma_load(to, p.key, i * kPanelColumns, row, key_head, batch, barriers.tile_full(at.slot));
        tma_load(to + Shape::kRowBytes, p.value, i * kPanelColumns, row, key_head, batch, barriers.tile_full(at.slot));
      }
      at.advance();
      for (int member = 0; member < p.problem.group; ++member) {
        const int head = key_head * p.problem.group + member;
        const int64_t statistics = (static_cast<int64_t>(batch) * p.problem.heads + head) * p.pitch;
        const SeenBlocks seen = kMasked ? seen_by(member) : SeenBlocks{};
        const auto load_block = [&](int block) {
          const uint32_t full = barriers.block_full(ring.slot);
          barrier_wait(barriers.block_empty(ring.slot), ring.phase ^ 1);
          if constexpr (kMasked)
            masked[ring.slot] = {block * kBlock, seen.classes<1>(block), mask_head_of(member), member};
          mbarrier_expect(full, 2 * (Shape::kBlockBytes + Shape::kStatisticsBytes) + (kUniform ? kShiftedBytes : 0));
          if constexpr (kUniform)
            bulk_load(shifted_at(ring.slot), p.mask.blocks.shifted_rows(mask_head_of(member), block), kShiftedBytes,
                      full);
          for (int i = 0; i < Shape::kPanels; ++i) {
            tma_load(query_at(ring.slot) + i * Shape::kBlockPanel, p.query, i * kPanelColumns, block * kBlock, head,
                     batch, full);
            tma_load(dout_at(ring.slot) + i * Shape::kBlockPanel, p.dout, i * kPanelColumns, block * kBlock, head,
                     batch, full);
          }
          bulk_load(bias_at(ring.slot), p.row_bias + statistics + block * kBlock, Shape::kStatisticsBytes, full);
          bulk_load(delta_at(ring.slot), p.row_delta + statistics + block * kBlock, Shape::kStatisticsBytes, full);
          ring.advance();
        };
        if constexpr (kMasked) {
          seen.for_each_from_last<1>(load_block);
        } else {
#pragma unroll 1  // fewer registers
          for (int block = first; block < query_blocks; ++block) load_block(block);
        }
      }
    }
  }

  take_registers<240>();
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const float factor = p.problem.scale_log2;
  const DropoutDraw dropout(kDropout ? p.problem.dropout : DropoutArguments{});

  float scores_a[32], scores_b[32], dp[32], dkey[32], dvalue[32];
  uint32_t k[16], weights[16], ds[16];
  RingPosition<kStages> ring;
  RingPosition<kTiles> at;
  int half = warpgroup;  // of a tile
  while (true) {
    barrier_wait(barriers.tile_full(at.slot), at.phase);
    const BackwardTile tile = tiles[at.slot];
    if (tile.row < 0) break;
    // The warpgroups take the longer half in turn.
    half ^= 1;
    const int own_row = half * 64 + warp * 16 + lane / 4;
    load_a(k, tile_at(at.slot), half * 64 + warp * 16);
    const KeyRange range =
        kBounds ? KeyRange::of(p.problem, tile.head / (p.problem.heads / p.problem.group)) : KeyRange{};
    const bool padded = kBounds && !range.has_all(tile.row + half * 64, 64);
    if (padded)
      clear_padding<64, 1>(tile_at(at.slot) + Shape::kRowBytes + half * 64 * kPanelRowBytes, range,
                           tile.row + half * 64, 1 + warpgroup);
    const uint64_t v = panel_descriptor(tile_at(at.slot) + Shape::kRowBytes + half * 64 * kPanelRowBytes);
#pragma unroll
    for (int i = 0; i < 32; ++i) dkey[i] = dvalue[i] = 0;

    // The first blocks may have only queries that see none of the warpgroup's keys.
    int own_first = tile.first;
    if constexpr (kCausal) own_first = max(tile.first, (tile.row + half * 64 - p.problem.query_offset) / kBlock);
    const int end = tile.first + tile.blocks;
    const int skipped = min(own_first, end) - tile.first;
    int block = own_first;
    int member = 0;
    const auto skip = [&] {
      for (int i = 0; i < skipped; ++i) {
        barrier_wait(barriers.block_full(ring.slot), ring.phase);  // or its buffer may still be the other warpgroup's
        barrier_arrive_if(lane == 0, barriers.block_empty(ring.slot));
        ring.advance();
      }
      block = own_first;
    };

    // kMasked: on to the next block whose queries see a key of the warpgroup's; `left` with it are not done.
    OwnBlock<1> own;
    int left = kMasked ? tile.blocks : 0;
    int passed = 0;
    const int first_head = tile.head * p.problem.group;
    const auto find_own = [&] {
      const int passed_before = passed;
      for (passed = 0; left > 0; --left, ++passed) {
        barrier_wait(barriers.block_full(ring.slot), ring.phase);
        const MaskedBlock found = masked[ring.slot];
        own = OwnBlock<1>::of(found, half, [&](int, int r) {
          return p.mask.blocks.bits_of_key(found.mask_head, found.first / kMaskBlock, tile.row / kMaskBlock + half,
                                           warp * 16 + lane / 4 + 8 * r, lane % 4);
        });
        if (!own.hidden() || passed_before + passed == kMostPassed<kStages>) return;
        barrier_arrive_if(lane == 0, barriers.block_empty(ring.slot));
        ring.advance();
      }
    };

    const auto step = [&](float (&current)[32], float (&next)[32]) {
      const RingPosition<kStages> now = ring;
      const OwnBlock<1> seen = own;
      const int first_query = kMasked ? seen.first : block * kBlock;
      const int head = first_head + (kMasked ? seen.member : member);
      pin_registers(dp);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        wgmma<T, false>(dp, v + i * kStepK, panel_descriptor(dout_at(now.slot)) + i * kStepK, i > 0);
      wgmma_commit();
      ring.advance();
      bool more = true;
      if constexpr (kMasked) {
        --left;
        find_own();
        more = false;  // has been waited for
      } else if (++block == end) {
        more = ++member < p.problem.group;
        if (more) skip();
      }
      if (more) barrier_wait(barriers.block_full(ring.slot), ring.phase);
      multiply<T>(next, k, panel_descriptor(query_at(ring.slot)));  // after the last block nobody reads it

      if constexpr (kUniform) clear_uniform(current, load_shifted(shifted_at(now.slot)));
      if (kMasked && !seen.seen()) {
        if (kMasks == Masks::kAdditive && seen.adds())
          add_values_of_keys(current, p.problem, p.mask, head / p.problem.heads, head % p.problem.heads,
                             tile.row + own_row, first_query);
        hide(current, seen.bits);
      }
      // Queries before a key do not see it, and keys beyond the end are nobody's: their gradients are not stored.
      if (kCausal && first_query + p.problem.query_offset < tile.row + half * 64 + 63) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int limit = tile.row + own_row + 8 * r - p.problem.query_offset - first_query -
                            2 * (lane % 4);  // the first to see it
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (8 * i < limit) current[4 * i + 2 * r] = -INFINITY;
            if (8 * i + 1 < limit) current[4 * i + 2 * r + 1] = -INFINITY;
          }
        }
      }
      if (kBounds && padded) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (!range.has(tile.row + own_row + 8 * r)) {
#pragma unroll
            for (int i = 0; i < 8; ++i) current[4 * i + 2 * r] = current[4 * i + 2 * r + 1] = -INFINITY;
          }
      }
      float last = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 bias = load_shared_pair(bias_at(now.slot) + (8 * i + 2 * (lane % 4)) * 4);
        current[4 * i] = exp2_approximately(fmaf(current[4 * i], factor, bias.x));
        current[4 * i + 1] = exp2_approximately(fmaf(current[4 * i + 1], factor, bias.y));
        current[4 * i + 2] = exp2_approximately(fmaf(current[4 * i + 2], factor, bias.x));
        current[4 * i + 3] = exp2_approximately(fmaf(current[4 * i + 3], factor, bias.y));
        last = fmaxf(last, current[4 * i + 3]);
      }
      complete(last);
      if constexpr (kDropout)
        for_kept_transposed<32>(dropout, head, tile.row + half * 64 + warp * 16, first_query, MarkDropped(current));
      wgmma_wait<1>();  // dp, and dv and dk of the block before
      pin_registers(dp);
      pin_registers(weights);
      pin_registers(ds);
      if constexpr (kDropout)
        positive_to_a<T>(weights, current);
      else
        accumulators_to_a<T>(weights, current);
      multiply_add<T>(dvalue, weights, panel_descriptor(dout_at(now.slot)), true);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 delta = load_shared_pair(delta_at(now.slot) + (8 * i + 2 * (lane % 4)) * 4);
        dp[4 * i] = dscore<kDropout>(current[4 * i], dp[4 * i], delta.x);
        dp[4 * i + 1] = dscore<kDropout>(current[4 * i + 1], dp[4 * i + 1], delta.y);
        dp[4 * i + 2] = dscore<kDropout>(current[4 * i + 2], dp[4 * i + 2], delta.x);
        dp[4 * i + 3] = dscore<kDropout>(current[4 * i + 3], dp[4 * i + 3], delta.y);
      }
      accumulators_to_a<T>(ds, dp);
      multiply_add<T>(dkey, ds, panel_descriptor(query_at(now.slot)), true);
      wgmma_wait<2>();  // the scores of the block ahead
      pin_registers(next);
      return now;
    };

    int freed = -1;
    const auto free_block = [&](int slot) {
      barrier_arrive_if(lane == 0 && freed >= 0, barriers.block_empty(max(freed, 0)));
      freed = slot;
    };
    if constexpr (kMasked)
      find_own();
    else
      skip();
    if (kMasked ? left > 0 : block < end) {
      if (!kMasked) barrier_wait(barriers.block_full(ring.slot), ring.phase);
      multiply<T>(scores_a, k, panel_descriptor(query_at(ring.slot)));
      wgmma_wait<0>();
      pin_registers(scores_a);
      while (true) {
        free_block(step(scores_a, scores_b).slot);
        if (kMasked ? left == 0 : member == p.problem.group) break;
        free_block(step(scores_b, scores_a).slot);
        if (kMasked ? left == 0 : member == p.problem.group) break;
      }
      wgmma_wait<0>();
      pin_registers(dkey);
      pin_registers(dvalue);
      free_block(-1);
    } else if (!kMasked) {
      for (member = 1; member < p.problem.group; ++member) skip();
    }
    barrier_arrive_if(lane == 0, barriers.tile_empty(at.slot));
    at.advance();
    const int key_heads = p.problem.heads / p.problem.group;
    const uint32_t out = shared + Shape::kOutAt + warpgroup * Shape::kOutBytes;
    store_tile<T, HS>(dvalue, kDropout ? 1 / keep_probability(p.problem) : 1, p.dvalue, out, tile.row + half * 64,
                      tile.head % key_heads, tile.head / key_heads, 1 + warpgroup);
    store_tile<T, HS>(dkey, kDropout ? p.problem.scale / keep_probability(p.problem) : p.problem.scale, p.dkey, out,
                      tile.row + half * 64, tile.head % key_heads, tile.head / key_heads, 1 + warpgroup);
  }
  if (thread == 0) tma_store_wait();
}

#else

template <typename T, int HS, bool kCausal, bool kDropout, bool kBounds, Masks kMasks>
__global__ void __launch_bounds__(kStubThreads)
    attention_backward_dquery_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {}
template <typename T, int HS, bool kCausal, bool kDropout, bool kBounds, Masks kMasks>
__global__ void __launch_bounds__(kStubThreads)
    attention_backward_dkey_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {}

#endif

template <typename T, int HS, bool kCausal, bool kDropout, bool kBounds, Masks kMasks = Masks::kNone>
Status launch(const AttentionBackward<T>& p, Stream stream) {
  return launch_backward<T, DqueryShape<HS>, DkeyShape<HS>,
                         attention_backward_dquery_wgmma_kernel<T, HS, kCausal, kDropout, kBounds, kMasks>,
                         attention_backward_dkey_wgmma_kernel<T, HS, kCausal, kDropout, kBounds, kMasks>>(p, stream);
}

}  // namespace

template <typename T>
bool attention_backward_sm90_serves(const AttentionBackward<T>& p) {
  const AttentionSizes& s = p.sizes;
  const bool sized = s.head_size <= 64 || (s.head_size <= 128 && p.dropout.probability == 0 && !has_bounds(p.mask));
  return sized && serves_mask<T>(p) &&
         sm90_serves<T, attention_backward_dkey_wgmma_kernel<T, 64, true, false, false, Masks::kNone>>(p) &&
         suits_tma(p.dout, s, s.heads, s.queries) && suits_tma(p.dquery, s, s.heads, s.queries) &&
         suits_tma(p.dkey, s, s.key_heads, s.keys) && suits_tma(p.dvalue, s, s.key_heads, s.keys);
}

template <typename T>
int64_t attention_backward_sm90_workspace(const AttentionBackward<T>& p) {
  if (attention_backward_sm90_head_serves(p)) return attention_backward_sm90_head_workspace(p);
  return ceil_div(backward_workspace(p.sizes), 256) * 256 + mask_workspace(p.mask, p.sizes, true);
}

template <typename T>
Status attention_backward_sm90(const AttentionBackward<T>& p, Stream stream) {
  if (attention_backward_sm90_head_serves(p)) return attention_backward_sm90_head(p, stream);
  if (p.sizes.head_size > 64) return attention_backward_sm90_128(p, stream);
  const auto with = [&]<bool kDropout, bool kBounds>() {
    return p.mask.causal ? launch<T, 64, true, kDropout, kBounds>(p, stream)
                         : launch<T, 64, false, kDropout, kBounds>(p, stream);
  };
  if (has_mask(p.mask)) {
    const auto masked = [&]<Masks kMasks>() {
      return p.dropout.probability > 0 ? launch<T, 64, false, true, false, kMasks>(p, stream)
                                       : launch<T, 64, false, false, false, kMasks>(p, stream);
    };
    return p.mask.allowed ? masked.template operator()<Masks::kBool>() : masked.template operator()<Masks::kAdditive>();
  }
  const bool bounds = has_bounds(p.mask);
  if (p.dropout.probability > 0)
    return bounds ? with.template operator()<true, true>() : with.template operator()<true, false>();
  return bounds ? with.template operator()<false, true>() : with.template operator()<false, false>();
}

#define INSTANTIATE(T)                                                                \
  template bool attention_backward_sm90_serves<T>(const AttentionBackward<T>&);       \
  template int64_t attention_backward_sm90_workspace<T>(const AttentionBackward<T>&); \
  template Status attention_backward_sm90<T>(const AttentionBackward<T>&, Stream);
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
