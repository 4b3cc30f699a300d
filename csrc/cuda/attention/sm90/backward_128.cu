// Attention's backward for sm_90a and head sizes of 72 to 128: the two kernels of attention/sm90/backward.cu. With 128
// channels the sums of dq are 64 registers a thread, those of dk and dv 128, so that other things are not in registers:
//
// - The first kernel has only the queries there; its product with dout reads both operands from shared memory.
// - The second reads keys and values from shared memory, and has the scores of one block only. A warpgroup starts its
//   next products when it has packed dS, and waits for scores and dp; its exponentials are under its own dk and the
//   other warpgroup's products.
//
// Shared memory has no room for results either: dq goes through the tile's dout, dk and dv through its keys and values.
// Neither kernel stops between tiles: the last step of one starts the products of the next one's first block, and a
// thread of the loading warpgroup stores the results meanwhile.
#include "backward.cuh"

namespace gptkernels::cuda {
namespace {

struct DqueryShape : BackwardShape<128> {
  static constexpr int kStoredRows = kRows;  // of a box of dq
  static constexpr int kKeys = 4;            // buffers for blocks of keys: a block's are used in three steps,
  static constexpr int kValues = 2;          // its values in one
  static constexpr int kDouts = 2;           // buffers for dout, through which dq is stored; query and out have one
  static constexpr int kOutAt = kRowBytes;
  static constexpr int kDoutAt = 2 * kRowBytes;
  static constexpr int kKeysAt = kDoutAt + kDouts * kRowBytes;
  static constexpr int kValuesAt = kKeysAt + kKeys * kBlockBytes;
  static constexpr int kBarriersAt = kValuesAt + kValues * kBlockBytes;
  static constexpr int kAhead = 3;  // a tile is taken when this many blocks of the one before are still to be loaded
  static constexpr int kTilesAt = kBarriersAt + 8 * (4 + 2 * kDouts + 2 * kKeys + 2 * kValues);
  static constexpr int kMaskedAt = kTilesAt + 2 * static_cast<int>(sizeof(BackwardTile));  // beside keys
  static constexpr int kSharedBytes = kMaskedAt + kKeys * static_cast<int>(sizeof(MaskedBlock)) + 1024;
};

struct DkeyShape : BackwardShape<128> {
  static constexpr int kStoredRows = kRows;  // of a box of dk and dv
  static constexpr int kStages = 3;          // buffers for blocks of queries, dout and their statistics
  static constexpr int kTiles = 2;           // buffers for keys and values, through which dk and dv are stored
  static constexpr int kStatisticsBytes = kBlock * 4;
  static constexpr int kTileBytes = 2 * kRowBytes;
  static constexpr int kBlocksAt = kTiles * kTileBytes;
  static constexpr int kStatisticsAt = kBlocksAt + kStages * 2 * kBlockBytes;
  static constexpr int kBarriersAt = kStatisticsAt + kStages * 2 * kStatisticsBytes;
  static constexpr int kTilesAt = kBarriersAt + 8 * (3 * kTiles + 2 * kStages);
  static constexpr int kMaskedAt = kTilesAt + kTiles * static_cast<int>(sizeof(BackwardTile));    // beside blocks
  static constexpr int kShiftedAt = kMaskedAt + kStages * static_cast<int>(sizeof(MaskedBlock));  // the same
  static constexpr int kSharedBytes = kShiftedAt + kStages * kShiftedBytes + 1024;
};

#if GPTKERNELS_WGMMA

constexpr int kComputingWarps = 8;
constexpr int kRowPanel = BackwardShape<128>::kRowPanel, kBlockPanel = BackwardShape<128>::kBlockPanel;

// D = A B over the 128 channels with A (64 x 128) in registers and B's rows the columns of D.
template <typename T>
__device__ void multiply(float (&d)[32], const uint32_t (&a)[32], uint32_t b) {
  const uint64_t block = panel_descriptor(b);
  pin_registers(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 8; ++i)
    wgmma<T, false>(d, &a[4 * i], block + (i / 4 * (kBlockPanel >> 4) + i % 4 * kStepK), i > 0);
  wgmma_commit();
}

// The same with A in shared memory: 64 rows of a tile.
template <typename T>
__device__ void multiply(float (&d)[32], uint32_t a, uint32_t b) {
  const uint64_t rows = panel_descriptor(a), block = panel_descriptor(b);
  pin_registers(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 8; ++i)
    wgmma<T, false>(d, rows + (i / 4 * (kRowPanel >> 4) + i % 4 * kStepK),
                    block + (i / 4 * (kBlockPanel >> 4) + i % 4 * kStepK), i > 0);
  wgmma_commit();
}

__device__ inline void store_rows(const CUtensorMap& map, uint32_t shared, int row, int head, int batch) {
  for (int i = 0; i < BackwardShape<128>::kPanels; ++i)
    tma_store(map, shared + i * kRowPanel, i * kPanelColumns, row, head, batch);
}

// ---- dq -------------------------------------------------------------------------------------------------------------

template <typename T, bool kCausal, Masks kMasks>
__global__ void __launch_bounds__(DqueryShape::kThreads, 1)
    attention_backward_dquery_128_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {
  using Shape = DqueryShape;
  constexpr int kKeys = Shape::kKeys, kValues = Shape::kValues, kDouts = Shape::kDouts;
  constexpr int kBlock = Shape::kBlock, kRowBytes = Shape::kRowBytes;
  extern __shared__ uint8_t shared_bytes[];
  const uint32_t start = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes));
  const uint32_t shared = (start + 1023) / 1024 * 1024;
  // The tile that is loaded next, and the one whose blocks are.
  BackwardTile* next_tile = reinterpret_cast<BackwardTile*>(shared_bytes + (shared - start) + Shape::kTilesAt);
  BackwardTile* loaded_tile = next_tile + 1;
  constexpr bool kMasked = kMasks != Masks::kNone;
  MaskedBlock* masked = reinterpret_cast<MaskedBlock*>(shared_bytes + (shared - start) + Shape::kMaskedAt);
  const auto mask_head_of = [&](int of) { return p.mask.blocks.mask_head(of / p.problem.heads, of % p.problem.heads); };
  const auto dout_at = [&](int i) { return shared + Shape::kDoutAt + i * kRowBytes; };
  const auto key_at = [&](int i) { return shared + Shape::kKeysAt + i * Shape::kBlockBytes; };
  const auto value_at = [&](int i) { return shared + Shape::kValuesAt + i * Shape::kBlockBytes; };
  // The tile's query, out and dout are full together; query and out are empty once they are in registers, dout when dq
  // has been stored through it.
  const uint32_t tile_full = shared + Shape::kBarriersAt, tile_empty = tile_full + 8;
  const auto dout_empty = [&](int i) { return tile_full + 8 * (2 + i); };
  const auto dquery_full = [&](int i) { return tile_full + 8 * (2 + kDouts + i); };
  const auto key_full = [&](int i) { return tile_full + 8 * (2 + 2 * kDouts + i); };
  const auto key_empty = [&](int i) { return tile_full + 8 * (2 + 2 * kDouts + kKeys + i); };
  const auto value_full = [&](int i) { return tile_full + 8 * (2 + 2 * kDouts + 2 * kKeys + i); };
  const auto value_empty = [&](int i) { return tile_full + 8 * (2 + 2 * kDouts + 2 * kKeys + kValues + i); };
  const uint32_t tile_taken = value_empty(kValues), tile_wanted = tile_taken + 8;  // between the loading threads

  if (threadIdx.x == 0) {
    barrier_init(tile_taken, 1);
    barrier_init(tile_wanted, 1);
    barrier_init(tile_full, 1);
    barrier_init(tile_empty, kComputingWarps + 1);
    for (int i = 0; i < kDouts; ++i) {
      barrier_init(dout_empty(i), 1);
      barrier_init(dquery_full(i), kComputingWarps);
    }
    for (int i = 0; i < kKeys; ++i) {
      barrier_init(key_full(i), 1);
      barrier_init(key_empty(i), kComputingWarps);
    }
    for (int i = 0; i < kValues; ++i) {
      barrier_init(value_full(i), 1);
      barrier_init(value_empty(i), kComputingWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  let_next_kernel_start();

  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 32) {  // stores dq
      RingPosition<kDouts> dout;
      for (unsigned phase = 0;; phase ^= 1, dout.advance()) {
        barrier_wait(tile_full, phase);
        const int row = next_tile->row, head = next_tile->head;
        barrier_arrive(tile_empty);
        if (row < 0) break;
        barrier_wait(dquery_full(dout.slot), dout.phase);
        store_rows(p.dquery, dout_at(dout.slot), row, head % p.problem.heads, head / p.problem.heads);
        tma_store_commit();
        tma_store_wait_read();
        barrier_arrive(dout_empty(dout.slot));
      }
      tma_store_wait();
    }
    if (threadIdx.x == 64) {  // takes tiles and loads what stays during one
      RingPosition<kDouts> dout;
      unsigned phase = 0;
      for (int index = -1;; phase ^= 1, dout.advance()) {
        barrier_wait(tile_wanted, phase ^ 1);
        index = index < 0 ? p.order.first() : p.order.take();
        TileOrder::Tile found = {};
        const bool any = p.order.find(index, found);
        const int row = any ? found.tile * Shape::kRows : -1;
        int end = p.problem.keys;
        if constexpr (kCausal) end = min(end, row + Shape::kRows + p.problem.query_offset);
        int blocks = max((end + kBlock - 1) / kBlock, 1);  // the first also where nobody sees it
        if constexpr (kMasked)
          if (any)
            blocks = max(p.mask.blocks.of_queries(mask_head_of(found.head), row / kMaskBlock).template count<1>(), 1);
        *loaded_tile = {row, found.head, 0, blocks};
        barrier_arrive(tile_taken);
        barrier_wait(tile_empty, phase ^ 1);
        *next_tile = {row, found.head, 0, blocks};
        if (!any) {
          barrier_arrive(tile_full);
          return;
        }
        barrier_wait(dout_empty(dout.slot), dout.phase ^ 1);
        const int batch = found.head / p.problem.heads, head = found.head % p.problem.heads;
        mbarrier_expect(tile_full, 3 * kRowBytes);
        for (int i = 0; i < Shape::kPanels; ++i) {
          const uint32_t to = shared + i * kRowPanel;
          tma_load(to, p.query, i * kPanelColumns, row, head, batch, tile_full);
          tma_load(dout_at(dout.slot) + i * kRowPanel, p.dout, i * kPanelColumns, row, head, batch, tile_full);
          tma_load(to + Shape::kOutAt, p.out, i * kPanelColumns, row, head, batch, tile_full);
        }
      }
    }
    if (threadIdx.x != 0) return;
    RingPosition<kKeys> key;
    RingPosition<kValues> value;
    const auto load = [&](const CUtensorMap& map, uint32_t to, int block, int head, int batch, uint32_t full) {
      mbarrier_expect(full, Shape::kBlockBytes);
      for (int i = 0; i < Shape::kPanels; ++i)
        tma_load(to + i * kBlockPanel, map, i * kPanelColumns, block * kBlock, head, batch, full);
    };
    for (unsigned phase = 0;; phase ^= 1) {
      barrier_wait(tile_taken, phase);
      const BackwardTile tile = *loaded_tile;
      if (tile.row < 0) return;
      const int batch = tile.head / p.problem.heads, key_head = tile.head % p.problem.heads / p.problem.group;
      const int wanted = min(Shape::kAhead, tile.blocks) - 1;
      SeenBlocks seen = {};
      int mask_head = 0;
      if constexpr (kMasked) {
        mask_head = mask_head_of(tile.head);
        seen = p.mask.blocks.of_queries(mask_head, tile.row / kMaskBlock);
      }
      // `left` blocks of the tile are to be loaded after this one.
      const auto load_block = [&](int block, int left) {
        if (left == wanted) barrier_arrive(tile_wanted);
        barrier_wait(key_empty(key.slot), key.phase ^ 1);
        if constexpr (kMasked) masked[key.slot] = {block * kBlock, seen.classes<1>(block), mask_head, 0};
        load(p.key, key_at(key.slot), block, key_head, batch, key_full(key.slot));
        key.advance();
        barrier_wait(value_empty(value.slot), value.phase ^ 1);
        load(p.value, value_at(value.slot), block, key_head, batch, value_full(value.slot));
        value.advance();
      };
      if constexpr (kMasked) {
        int left = tile.blocks;
        seen.for_each_from_last<1>([&](int block) { load_block(block, --left); });
        if (left > 0) load_block(0, 0);
      } else {
#pragma unroll 1  // more would need registers that this warpgroup has not
        for (int block = tile.blocks - 1; block >= 0; --block) load_block(block, block);
      }
    }
  }

  take_registers<240>();
  const int lane = threadIdx.x % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x % kWarpgroup / 32, 0);
  const int first_row = warpgroup * 64 + warp * 16;  // in a tile, of the warp
  const uint32_t own_rows = warpgroup * 64 * kPanelRowBytes;
  const float factor = p.problem.scale_log2;

  float scores_a[32], scores_b[32], dp[32], dquery[64];
  uint32_t q[32], ds[16];
  float logsumexp[2], dlogsumexp[2];  // of this thread's two rows, loaded ahead of their use
  MaskRow mask_rows[2];               // kAdditive: the same
  float bias[2], delta[2];
  RingPosition<kKeys> key;      // of the scores under way
  RingPosition<kValues> value;  // of the block at hand
  RingPosition<kDouts> dout;
  unsigned phase = 0;  // of tile_full
  int row, head, block;
  int passed = 0;   // blocks that the tile passed over, with values that are still to be freed
  int freed = -1;   // the keys that were used last: they are free once their dq is done, a step later
  OwnBlock<1> own;  // kMasked: of the block whose scores are under way
  const auto find_own = [&] {
    const MaskedBlock found = masked[key.slot];
    own = OwnBlock<1>::of(found, warpgroup, [&](int, int r) {
      return p.mask.blocks.query_bits(found.mask_head, row / kMaskBlock + warpgroup, found.first / kMaskBlock,
                                      warp * 16 + lane / 4 + 8 * r, lane % 4);
    });
  };

  // The next tile's queries to registers, and over the blocks that none of the warpgroup's queries sees; false after
  // the last tile.
  const auto begin_tile = [&] {
    barrier_wait(tile_full, phase);
    phase ^= 1;
    row = next_tile->row;
    if (row < 0) return false;
    head = next_tile->head;
    block = next_tile->blocks - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own_row = row + first_row + lane / 4 + 8 * r;
      const int64_t index = static_cast<int64_t>(head) * p.problem.queries + own_row;
      const bool inside = own_row < p.problem.queries;
      logsumexp[r] = inside ? p.logsumexp[index] : -INFINITY;
      dlogsumexp[r] = inside && p.dlogsumexp ? p.dlogsumexp[index] : 0;
    }
    if constexpr (kMasks == Masks::kAdditive) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        mask_rows[r] =
            p.mask.blocks.row(mask_head_of(head), min(row + first_row + lane / 4 + 8 * r, p.problem.queries - 1));
    }
    load_a(q, shared, first_row);
    load_a(q + 16, shared + kRowPanel, first_row);
    if constexpr (has_uniform_rows<T>(kMasks)) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (mask_rows[r].shift != 0) clear_row(q, r);
    }
    if constexpr (kCausal) {
      const int own_end = row + warpgroup * 64 + 64 + p.problem.query_offset;
      const int own_last = max((own_end + kBlock - 1) / kBlock - 1, 0);
      for (; block > own_last; --block) {
        barrier_wait(key_full(key.slot), key.phase);
        barrier_arrive_if(lane == 0, key_empty(key.slot));
        key.advance();
        ++passed;
      }
    }
    return true;
  };

  // D and the bias of this thread's rows. The tile's query and out are then free, and so are the values that it passed
  // over.
  const auto load_statistics = [&] {
    delta[0] = delta[1] = 0;
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      uint32_t o[16], g[16];
      load_a(o, shared + Shape::kOutAt + panel * kRowPanel, first_row);
      load_a(g, dout_at(dout.slot) + panel * kRowPanel, first_row);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 a = unpack_pair<T>(o[i]), b = unpack_pair<T>(g[i]);
        delta[i % 2] += a.x * b.x + a.y * b.y;
      }
    }
    __syncwarp();
    barrier_arrive_if(lane == 0, tile_empty);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      delta[r] = quad_sum(delta[r]) - dlogsumexp[r];
      bias[r] = logsumexp[r] == -INFINITY ? -INFINITY : -logsumexp[r] * kLog2E;  // P = 0 for a query that sees no key
      if constexpr (kMasks == Masks::kAdditive) {
        if (mask_rows[r].shift != 0 && bias[r] != -INFINITY) bias[r] = shifted_bias<T>(logsumexp[r], mask_rows[r]);
      }
      if (lane % 4 == 0) {
        const int64_t at = head * p.pitch + row + first_row + lane / 4 + 8 * r;
        p.row_bias[at] = bias[r];
        p.row_delta[at] = delta[r];
      }
    }
    for (; passed > 0; --passed) {
      barrier_wait(value_full(value.slot), value.phase);
      barrier_arrive_if(lane == 0, value_empty(value.slot));
      value.advance();
    }
  };

  bool accumulate = false;
  // The block whose scores are in `current`; those of the block ahead are in `next` when this returns. False after the
  // last block of all.
  const auto step = [&](float (&current)[32], float (&next)[32]) {
    const int key_now = key.slot, tile_row = row, first_key = kMasked ? own.first : block * kBlock;
    const int tile_dout = dout.slot;
    barrier_wait(value_full(value.slot), value.phase);
    multiply<T>(dp, dout_at(dout.slot) + own_rows, value_at(value.slot));

    if (kMasked && !own.seen()) {
      if (kMasks == Masks::kAdditive && own.adds())
        add_values(current, p.problem, p.mask, head / p.problem.heads, head % p.problem.heads,
                   tile_row + first_row + lane / 4, first_key);
      hide(current, own.bits);
    }
    int end = kMasked ? INT_MAX : p.problem.keys;
    if constexpr (kCausal) end = min(end, tile_row + warpgroup * 64 + p.problem.query_offset + 1);
    if (first_key + kBlock > end) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int limit = p.problem.keys;
        if constexpr (kCausal) limit = min(limit, tile_row + first_row + lane / 4 + 8 * r + p.problem.query_offset + 1);
        limit -= first_key + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (8 * i >= limit) current[4 * i + 2 * r] = -INFINITY;
          if (8 * i + 1 >= limit) current[4 * i + 2 * r + 1] = -INFINITY;
        }
      }
    }
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) current[i] = exp2_approximately(fmaf(current[i], factor, bias[i / 2 % 2]));
#pragma unroll
    for (int i = 0; i < 32; i += 8) largest = fmaxf(largest, current[i + 7]);
    complete(largest);

    // A product with A in registers holds up the warp until it runs: not ahead of the exponentials.
    key.advance();
    const bool last = block == 0;
    bool more = true;
    if (last) {
      dout.advance();
      more = begin_tile();
    } else {
      --block;
    }
    if (more) barrier_wait(key_full(key.slot), key.phase);
    if constexpr (kMasked)
      if (more) find_own();
    multiply<T>(next, q, key_at(key.slot));  // after the last block of all nobody reads it

    wgmma_wait<1>();  // dp, and dq of the block before
    pin_registers(dp);
    pin_registers(ds);
    barrier_arrive_if(lane == 0, value_empty(value.slot));
    value.advance();
    barrier_arrive_if(lane == 0 && freed >= 0, key_empty(max(freed, 0)));
    freed = key_now;
#pragma unroll
    for (int i = 0; i < 32; ++i) dp[i] = current[i] * (dp[i] - delta[i / 2 % 2]);
    accumulators_to_a<T>(ds, dp);
    multiply_add<T>(dquery, ds, panel_descriptor(key_at(key_now), kBlockPanel), accumulate);
    accumulate = true;
    if (last) {
      wgmma_wait<0>();
      pin_registers(dquery);
      barrier_arrive_if(lane == 0, key_empty(key_now));
      freed = -1;
      accumulate = false;
      warpgroup_barrier(1 + warpgroup);  // all its warps are done with dout
      stage_tile<T>(dquery, p.problem.scale, dout_at(tile_dout) + own_rows, kRowPanel);
      fence_async_shared();
      __syncwarp();
      barrier_arrive_if(lane == 0, dquery_full(tile_dout));
      if (more) load_statistics();
    }
    wgmma_wait<1>();  // the scores of the block ahead
    pin_registers(next);
    return more;
  };

  if (!begin_tile()) return;
  barrier_wait(key_full(key.slot), key.phase);
  if constexpr (kMasked) find_own();
  multiply<T>(scores_a, q, key_at(key.slot));
  load_statistics();
  wgmma_wait<0>();
  pin_registers(scores_a);
  while (true) {
    if (!step(scores_a, scores_b)) break;
    if (!step(scores_b, scores_a)) break;
  }
  wgmma_wait<0>();
}

// ---- dk and dv ------------------------------------------------------------------------------------------------------

// Causal, one half of a tile has a block more than the other: the warpgroups take the longer half in turn. Of a tile's
// half only its first row is kept: tiles begin at multiples of 128.
__device__ inline int other_half(int row) {
  return ~row & 64;
}

// The bytes of a panel before it.
__device__ inline uint32_t half_at(int row) {
  return (row & 64) * kPanelRowBytes;
}

template <typename T, bool kCausal, Masks kMasks>
__global__ void __launch_bounds__(DkeyShape::kThreads, 1)
    attention_backward_dkey_128_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {
  using Shape = DkeyShape;
  constexpr int kStages = Shape::kStages, kTiles = Shape::kTiles, kBlock = Shape::kBlock;
  extern __shared__ uint8_t shared_bytes[];
  const uint32_t start = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes));
  const uint32_t shared = (start + 1023) / 1024 * 1024;
  BackwardTile* tiles = reinterpret_cast<BackwardTile*>(shared_bytes + (shared - start) + Shape::kTilesAt);
  const auto key_at = [&](int i) { return shared + i * Shape::kTileBytes; };
  const auto value_at = [&](int i) { return key_at(i) + Shape::kRowBytes; };
  const auto query_at = [&](int i) { return shared + Shape::kBlocksAt + i * 2 * Shape::kBlockBytes; };
  const auto dout_at = [&](int i) { return query_at(i) + Shape::kBlockBytes; };
  const auto bias_at = [&](int i) { return shared + Shape::kStatisticsAt + i * 2 * Shape::kStatisticsBytes; };
  const auto delta_at = [&](int i) { return bias_at(i) + Shape::kStatisticsBytes; };
  constexpr bool kMasked = kMasks != Masks::kNone;
  MaskedBlock* masked = reinterpret_cast<MaskedBlock*>(shared_bytes + (shared - start) + Shape::kMaskedAt);
  constexpr bool kUniform = has_uniform_rows<T>(kMasks);
  const auto shifted_at = [&](int i) { return shared + Shape::kShiftedAt + i * kShiftedBytes; };
  const auto mask_head_of = [&](int of) { return p.mask.blocks.mask_head(of / p.problem.heads, of % p.problem.heads); };
  const uint32_t barriers = shared + Shape::kBarriersAt;
  const auto tile_full = [&](int i) { return barriers + 8 * i; };
  const auto tile_empty = [&](int i) { return barriers + 8 * (kTiles + i); };  // when dk and dv are stored
  const auto gradients_full = [&](int i) { return barriers + 8 * (2 * kTiles + i); };
  const auto block_full = [&](int i) { return barriers + 8 * (3 * kTiles + i); };
  const auto block_empty = [&](int i) { return barriers + 8 * (3 * kTiles + kStages + i); };

  if (threadIdx.x == 0) {
    for (int i = 0; i < kTiles; ++i) {
      barrier_init(tile_full(i), 1);
      barrier_init(tile_empty(i), 1);
      barrier_init(gradients_full(i), kComputingWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(block_full(i), 1);
      barrier_init(block_empty(i), kComputingWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  const int key_heads = p.problem.heads / p.problem.group;
  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 32) {  // stores dk and dv
      for (RingPosition<kTiles> at;; at.advance()) {
        barrier_wait(tile_full(at.slot), at.phase);
        const int row = tiles[at.slot].row, head = tiles[at.slot].head;
        if (row < 0) break;
        barrier_wait(gradients_full(at.slot), at.phase);
        store_rows(p.dkey, key_at(at.slot), row, head % key_heads, head / key_heads);
        store_rows(p.dvalue, value_at(at.slot), row, head % key_heads, head / key_heads);
        tma_store_commit();
        tma_store_wait_read();
        barrier_arrive(tile_empty(at.slot));
      }
      tma_store_wait();
    }
    if (threadIdx.x != 0) return;
    wait_for_previous_kernel();
    const int query_blocks = (p.problem.queries + kBlock - 1) / kBlock;
    RingPosition<kTiles> at;
    RingPosition<kStages> ring;
    for (int index = p.order.first();; index = p.order.take()) {
      barrier_wait(tile_empty(at.slot), at.phase ^ 1);
      TileOrder::Tile found;
      if (!p.order.find(index, found)) {
        if constexpr (kMasked) tiles[at.slot].head = 0;  // whose values are looked up, for nobody
        tiles[at.slot].row = -1;
        barrier_arrive(tile_full(at.slot));
        return;
      }
      const int row = found.tile * Shape::kRows;
      int first = 0;  // at most the last block, though nobody sees it
      if constexpr (kCausal) first = min(max(row - p.problem.query_offset, 0) / kBlock, query_blocks - 1);
      const auto seen_by = [&](int member) {
        return p.mask.blocks.of_keys(mask_head_of(found.head * p.problem.group + member), row / kMaskBlock);
      };
      int blocks = query_blocks - first;
      if constexpr (kMasked) {
        blocks = 0;
        for (int member = 0; member < p.problem.group; ++member) blocks += SeenBlocks(seen_by(member)).count<1>();
      }
      const bool none = kMasked && blocks == 0;  // then a hidden one
      tiles[at.slot] = {row, found.head, first, none ? 1 : blocks};
      const int batch = found.head / key_heads, key_head = found.head % key_heads;
      mbarrier_expect(tile_full(at.slot), Shape::kTileBytes);
      for (int i = 0; i < Shape::kPanels; ++i) {
        tma_load(key_at(at.slot) + i * kRowPanel, p.key, i * kPanelColumns, row, key_head, batch, tile_full(at.slot));
        tma_load(value_at(at.slot) + i * kRowPanel, p.value, i * kPanelColumns, row, key_head, batch,
                 tile_full(at.slot));
      }
      at.advance();
      for (int member = 0; member < p.problem.group; ++member) {
        const int head = key_head * p.problem.group + member;
        const int64_t statistics = (static_cast<int64_t>(batch) * p.problem.heads + head) * p.pitch;
        const SeenBlocks seen = kMasked ? seen_by(member) : SeenBlocks{};
        const auto load_block = [&](int block) {
          const uint32_t full = block_full(ring.slot);
          barrier_wait(block_empty(ring.slot), ring.phase ^ 1);
          if constexpr (kMasked)
            masked[ring.slot] = {block * kBlock, seen.classes<1>(block),
                                 mask_head_of(found.head * p.problem.group + member), member};
          mbarrier_expect(full, 2 * (Shape::kBlockBytes + Shape::kStatisticsBytes) + (kUniform ? kShiftedBytes : 0));
          if constexpr (kUniform)
            bulk_load(shifted_at(ring.slot),
                      p.mask.blocks.shifted_rows(mask_head_of(found.head * p.problem.group + member), block),
                      kShiftedBytes, full);
          for (int i = 0; i < Shape::kPanels; ++i) {
            tma_load(query_at(ring.slot) + i * kBlockPanel, p.query, i * kPanelColumns, block * kBlock, head, batch,
                     full);
            tma_load(dout_at(ring.slot) + i * kBlockPanel, p.dout, i * kPanelColumns, block * kBlock, head, batch,
                     full);
          }
          bulk_load(bias_at(ring.slot), p.row_bias + statistics + block * kBlock, Shape::kStatisticsBytes, full);
          bulk_load(delta_at(ring.slot), p.row_delta + statistics + block * kBlock, Shape::kStatisticsBytes, full);
          ring.advance();
        };
        if constexpr (kMasked) {
          seen.for_each_from_last<1>(load_block);
          if (none && member == 0) load_block(0);
        } else {
#pragma unroll 1
          for (int block = first; block < query_blocks; ++block) load_block(block);
        }
      }
    }
  }

  take_registers<240>();
  const int lane = threadIdx.x % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x % kWarpgroup / 32, 0);
  const float factor = p.problem.scale_log2;

  float scores[32], dp[32], dkey[64], dvalue[64];
  uint32_t weights[16];  // P, then dS
  RingPosition<kStages> ring;
  RingPosition<kTiles> at;
  int row = warpgroup * 64;  // the first of the warpgroup's 64
  int block, end, member = 0;
  OwnBlock<1> own;  // kMasked: of the block at hand
  const auto find_own = [&] {
    const MaskedBlock found = masked[ring.slot];
    own = OwnBlock<1>::of(found, row / 64 % 2, [&](int, int r) {
      return p.mask.blocks.bits_of_key(found.mask_head, found.first / kMaskBlock, row / kMaskBlock,
                                       warp * 16 + lane / 4 + 8 * r, lane % 4);
    });
  };

  // Over the first blocks of a head, which may have only queries that see none of the warpgroup's keys.
  const auto begin_head = [&] {
    block = tiles[at.slot].first;
    if constexpr (kCausal) {
      const int own_first = min((row - p.problem.query_offset) / kBlock, end - 1);
      for (; block < own_first; ++block) {
        barrier_wait(block_full(ring.slot), ring.phase);
        barrier_arrive_if(lane == 0, block_empty(ring.slot));
        ring.advance();
      }
    }
  };
  // False after the last tile.
  const auto begin_tile = [&] {
    barrier_wait(tile_full(at.slot), at.phase);
    if (tiles[at.slot].row < 0) return false;
    row = tiles[at.slot].row + other_half(row);
    end = tiles[at.slot].first + tiles[at.slot].blocks;
    member = 0;
    begin_head();
    return true;
  };

  // The scores of the block at hand, which are done, to P, while dk of the block before runs; dv is under way when this
  // returns.
  bool accumulate = false;
  int freed = -1;  // the block that was used last: it is free once its dk is done
  const auto probabilities = [&] {
    const int now = ring.slot, first_query = block * kBlock;
    if constexpr (kUniform) clear_uniform(scores, load_shifted(shifted_at(now)));
    if (kMasked && !own.seen()) {
      if (kMasks == Masks::kAdditive && own.adds()) {
        const int of = tiles[at.slot].head * p.problem.group + own.member;
        add_values_of_keys(scores, p.problem, p.mask, of / p.problem.heads, of % p.problem.heads,
                           row + warp * 16 + lane / 4, own.first);
      }
      hide(scores, own.bits);
    }
    // Queries before a key do not see it, and keys beyond the end are nobody's: their gradients are not stored.
    if (kCausal && first_query + p.problem.query_offset < row + 63) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int limit = row + warp * 16 + lane / 4 + 8 * r - p.problem.query_offset - first_query -
                          2 * (lane % 4);  // the first to see it
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (8 * i < limit) scores[4 * i + 2 * r] = -INFINITY;
          if (8 * i + 1 < limit) scores[4 * i + 2 * r + 1] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 bias = load_shared_pair(bias_at(now) + (8 * i + 2 * (lane % 4)) * 4);
      scores[4 * i] = exp2_approximately(fmaf(scores[4 * i], factor, bias.x));
      scores[4 * i + 1] = exp2_approximately(fmaf(scores[4 * i + 1], factor, bias.y));
      scores[4 * i + 2] = exp2_approximately(fmaf(scores[4 * i + 2], factor, bias.x));
      scores[4 * i + 3] = exp2_approximately(fmaf(scores[4 * i + 3], factor, bias.y));
    }
    complete(fmaxf(fmaxf(scores[7], scores[15]), fmaxf(scores[23], scores[31])));
    wgmma_wait<0>();  // dk of the block before
    pin_registers(weights);
    barrier_arrive_if(lane == 0 && freed >= 0, block_empty(max(freed, 0)));
    freed = now;
    accumulators_to_a<T>(weights, scores);
    multiply_add<T>(dvalue, weights, panel_descriptor(dout_at(now), kBlockPanel), accumulate);
  };

  if (!begin_tile()) return;
  barrier_wait(block_full(ring.slot), ring.phase);
  if constexpr (kMasked) find_own();
  multiply<T>(scores, key_at(at.slot) + half_at(row), query_at(ring.slot));
  multiply<T>(dp, value_at(at.slot) + half_at(row), dout_at(ring.slot));
  wgmma_wait<0>();
  pin_registers(scores);
  pin_registers(dp);
  probabilities();
  while (true) {
    const int now = ring.slot;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 delta = load_shared_pair(delta_at(now) + (8 * i + 2 * (lane % 4)) * 4);
      dp[4 * i] = scores[4 * i] * (dp[4 * i] - delta.x);
      dp[4 * i + 1] = scores[4 * i + 1] * (dp[4 * i + 1] - delta.y);
      dp[4 * i + 2] = scores[4 * i + 2] * (dp[4 * i + 2] - delta.x);
      dp[4 * i + 3] = scores[4 * i + 3] * (dp[4 * i + 3] - delta.y);
    }
    wgmma_wait<0>();  // dv
    pin_registers(weights);
    accumulators_to_a<T>(weights, dp);

    ring.advance();
    const int tile = at.slot;
    const uint32_t own_rows = half_at(row);
    bool last = false, more = true;
    if (++block == end) {
      if (!kMasked && ++member < p.problem.group) {
        begin_head();
      } else {
        last = true;
        at.advance();
        more = begin_tile();
      }
    }
    if (more) barrier_wait(block_full(ring.slot), ring.phase);
    if constexpr (kMasked)
      if (more) find_own();
    // Scores and dp of the block ahead, dk of the block at hand: this runs under the next exponentials.
    multiply<T>(scores, key_at(at.slot) + half_at(row), query_at(ring.slot));
    multiply<T>(dp, value_at(at.slot) + half_at(row), dout_at(ring.slot));
    multiply_add<T>(dkey, weights, panel_descriptor(query_at(now), kBlockPanel), accumulate);
    accumulate = true;
    if (last) {
      wgmma_wait<0>();
      pin_registers(dkey);
      pin_registers(dvalue);
      accumulate = false;
      warpgroup_barrier(1 + warpgroup);  // all its warps are done with keys and values
      stage_tile<T>(dkey, p.problem.scale, key_at(tile) + own_rows, kRowPanel);
      stage_tile<T>(dvalue, 1, value_at(tile) + own_rows, kRowPanel);
      fence_async_shared();
      __syncwarp();
      barrier_arrive_if(lane == 0, gradients_full(tile));
    }
    wgmma_wait<1>();  // scores and dp
    pin_registers(scores);
    pin_registers(dp);
    // After the last block of all too, for nobody: with a way out of the loop before this, ptxas makes every wgmma
    // wait.
    probabilities();
    if (!more) break;
  }
  wgmma_wait<0>();
}

#else

template <typename T, bool kCausal, Masks kMasks>
__global__ void __launch_bounds__(kStubThreads)
    attention_backward_dquery_128_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {}
template <typename T, bool kCausal, Masks kMasks>
__global__ void __launch_bounds__(kStubThreads)
    attention_backward_dkey_128_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {}

#endif

template <typename T, bool kCausal, Masks kMasks = Masks::kNone>
Status launch(const AttentionBackward<T>& p, Stream stream) {
  return launch_backward<T, DqueryShape, DkeyShape, attention_backward_dquery_128_wgmma_kernel<T, kCausal, kMasks>,
                         attention_backward_dkey_128_wgmma_kernel<T, kCausal, kMasks>>(p, stream);
}

}  // namespace

template <typename T>
Status attention_backward_sm90_128(const AttentionBackward<T>& p, Stream stream) {
  if (p.mask.allowed) return launch<T, false, Masks::kBool>(p, stream);
  if (p.mask.bias) return launch<T, false, Masks::kAdditive>(p, stream);
  return p.mask.causal ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
}

#define INSTANTIATE(T) template Status attention_backward_sm90_128<T>(const AttentionBackward<T>&, Stream);
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
