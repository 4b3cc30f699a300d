// The two kernels of backward.cu, with the same notation, for head sizes of 72 to 128. The sums take 64 registers per
// thread for dq and 128 for dk and dv, so fewer operands fit in registers:
//
// - The kernel for dq keeps only the queries and dS in registers. For dP = g v' it reads both operands from shared
//   memory.
// - The kernel for dk and dv reads keys and values from shared memory, and waits for S' and dP' before the next
//   exponentials. During the exponentials only its MMAs for dk and the other warpgroup's MMAs run.
//
// dq is stored through the buffer of dout, dk through that of keys, and dv through that of values. There is no pause
// between tiles: a tile's last iteration starts the MMAs of the next tile's first block (block j+1 below), while a
// thread of the loading warpgroup stores the results. Therefore each tile must have at least one block.
//
//   for dq, for each block j of keys of all tiles:      for dk and dv, for each block j of queries:
//     start dP = g v(j)'                                  P' = exp2(S' * scale_log2 + bias); wait for dk
//     P = exp2(S(j) * scale_log2 + bias)                  start dv += P' g(j); release block j-1
//     start S(j+1) = q k(j+1)'                            dS' = P' (dP' - delta); wait for dv
//     wait for dP; release values j, keys j-1             start S' = k q(j+1)', dP' = v g(j+1)'
//     dS = P (dP - delta); start dq += dS k(j)            start dk += dS' q(j)
//     at a tile's end: wait for dq; store dq              at a tile's end: wait for dk; store dk and dv
//     wait for S(j+1)                                     wait for S' and dP'
#include "backward_loader.cuh"
#include "backward_softmax.cuh"

namespace gptkernels::cuda {
namespace {

struct DqueryShared : BackwardShape<128> {
  // A warpgroup that waits for keys holds the keys of two blocks, and may have skipped one block at the start of a
  // tile, so fewer than 4 buffers of keys could deadlock. It also holds the values of one block and of the skipped
  // block, so fewer than 2 buffers of values could deadlock.
  static constexpr int kKeys = 4;
  static constexpr int kValues = 2;
  static constexpr int kDouts = 2;  // dq is stored through dout

  Buffer<kRowBytes> query, out, dout[kDouts];
  Buffer<kBlockBytes> key[kKeys], value[kValues];
  // tile_full: query, out and dout are loaded. tile_empty: query and out have been read. dout_empty: the TMA store of
  // dq has read the buffer.
  Barrier tile_full, tile_empty, dout_empty[kDouts], dquery_full[kDouts];
  Barrier key_full[kKeys], key_empty[kKeys], value_full[kValues], value_empty[kValues];
  Barrier tile_taken, tile_wanted;  // between the loading threads
  BackwardTile next_tile;           // tile of query, out and dout
  BackwardTile loaded_tile;         // tile whose keys and values are loaded next; at most one tile ahead
  MaskedBlock masked[kKeys];

#if GPTKERNELS_WGMMA
  __device__ void init() const {
    barrier_init(tile_full, 1);
    barrier_init(tile_empty, kComputingWarps + 1);
    barrier_init(tile_taken, 1);
    barrier_init(tile_wanted, 1);
    init_barriers(dout_empty, 1);
    init_barriers(dquery_full, kComputingWarps);
    init_barriers(key_full, 1);
    init_barriers(key_empty, kComputingWarps);
    init_barriers(value_full, 1);
    init_barriers(value_empty, kComputingWarps);
    mbarrier_init_fence();
  }
#endif
};

// A warpgroup that waits for a block holds the block that it computed last, and may have skipped a block between the
// two, so fewer than 3 stages could deadlock.
constexpr int kStages = 3, kTiles = 2;
using DkeyShared = RingShared<128, 2, kTiles, kStages>;
constexpr int kThreads = DkeyShared::kThreads;

#if GPTKERNELS_WGMMA

constexpr int kBlock = DkeyShared::kBlock, kPanels = DkeyShared::kPanels;
constexpr int kKeys = DqueryShared::kKeys, kValues = DqueryShared::kValues, kDouts = DqueryShared::kDouts;

// ---- dq -------------------------------------------------------------------------------------------------------------

template <typename Mask, typename T>
__device__ void load_query_tiles(const Sm90Backward<T>& p, DqueryShared& shared) {
  RingPosition<kDouts> dout;
  unsigned phase = 0;
  for (int index = -1;; phase ^= 1, dout.advance()) {
    barrier_wait(shared.tile_wanted, phase ^ 1);
    index = index < 0 ? p.order.first() : p.order.take();
    TileOrder::Tile found = {};
    const bool any = p.order.find(index, found);
    const int row = any ? found.tile * DqueryShared::kRows : -1;
    const BackwardTile tile = {row, found.head, 0, any ? max(key_blocks<Mask>(p, found.head, row), 1) : 0};
    shared.loaded_tile = tile;
    barrier_arrive(shared.tile_taken);
    barrier_wait(shared.tile_empty, phase ^ 1);
    shared.next_tile = tile;
    const uint32_t tile_full = shared.tile_full;
    if (!any) {
      barrier_arrive(tile_full);
      return;
    }
    barrier_wait(shared.dout_empty[dout.slot], dout.phase ^ 1);
    const int batch = found.head / p.problem.heads, head = found.head % p.problem.heads;
    mbarrier_expect(tile_full, 3 * DqueryShared::kRowBytes);
    load_panels<kPanels>(shared.query, kRowPanel, p.query, row, head, batch, tile_full);
    load_panels<kPanels>(shared.dout[dout.slot], kRowPanel, p.dout, row, head, batch, tile_full);
    load_panels<kPanels>(shared.out, kRowPanel, p.out, row, head, batch, tile_full);
  }
}

template <typename Mask, typename T>
__device__ void load_key_blocks(const Sm90Backward<T>& p, DqueryShared& shared) {
  constexpr int kAhead = 3;  // blocks that are still to be loaded when the next tile is taken
  RingPosition<kKeys> key;
  RingPosition<kValues> value;
  for (unsigned phase = 0;; phase ^= 1) {
    barrier_wait(shared.tile_taken, phase);
    const BackwardTile tile = shared.loaded_tile;
    if (tile.row < 0) return;
    const int batch = tile.head / p.problem.heads, key_head = tile.head % p.problem.heads / p.problem.group;
    const int wanted = min(kAhead, tile.blocks) - 1, mask_head = Mask::kBlocks ? p.mask_head(tile.head) : 0;
    const SeenBlocks seen = Mask::kBlocks ? p.mask.blocks.of_queries(mask_head, tile.row / kMaskBlock) : SeenBlocks{};
    const auto load = [&](const CUtensorMap& map, uint32_t to, int block, uint32_t full) {
      mbarrier_expect(full, DqueryShared::kBlockBytes);
      load_panels<kPanels>(to, kBlockPanel, map, block * kBlock, key_head, batch, full);
    };
    const auto load_block = [&](int block, int left) {
      if (left == wanted) barrier_arrive(shared.tile_wanted);
      barrier_wait(shared.key_empty[key.slot], key.phase ^ 1);
      if constexpr (Mask::kBlocks) shared.masked[key.slot] = {block * kBlock, seen.classes<1>(block), mask_head, 0};
      load(p.key, shared.key[key.slot], block, shared.key_full[key.slot]);
      key.advance();
      barrier_wait(shared.value_empty[value.slot], value.phase ^ 1);
      load(p.value, shared.value[value.slot], block, shared.value_full[value.slot]);
      value.advance();
    };
    if constexpr (Mask::kBlocks) {
      int left = tile.blocks;
      seen.for_each_from_last<1>([&](int block) { load_block(block, --left); });
      if (left > 0) load_block(0, 0);
    } else {
#pragma unroll 1  // saves registers
      for (int block = tile.blocks - 1; block >= 0; --block) load_block(block, block);
    }
  }
}

template <typename T>
__device__ void store_dquery(const Sm90Backward<T>& p, DqueryShared& shared) {
  RingPosition<kDouts> dout;
  for (unsigned phase = 0;; phase ^= 1, dout.advance()) {
    barrier_wait(shared.tile_full, phase);
    const int row = shared.next_tile.row, head = shared.next_tile.head;
    barrier_arrive(shared.tile_empty);
    if (row < 0) break;
    barrier_wait(shared.dquery_full[dout.slot], dout.phase);
    store_panels<kPanels>(p.dquery, shared.dout[dout.slot], kRowPanel, row, head % p.problem.heads,
                          head / p.problem.heads);
    tma_store_wait_read();
    barrier_arrive(shared.dout_empty[dout.slot]);
  }
  tma_store_wait();
}

template <typename Mask, typename T>
__device__ void sum_dquery(const Sm90Backward<T>& p, DqueryShared& shared) {
  const int lane = threadIdx.x % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x % kWarpgroup / 32, 0);
  const int warp_row = warpgroup * 64 + warp * 16;
  const uint32_t own_rows = warpgroup * 64 * kPanelRowBytes;

  float scores_a[32], scores_b[32], dp[32], dquery[64], bias[2], delta[2];
  uint32_t q[32], ds[16];
  RowStatistics<T, Mask> statistics;
  RingPosition<kKeys> key;      // of the latest scores
  RingPosition<kValues> value;  // of the next dP = g v'
  RingPosition<kDouts> dout;
  unsigned phase = 0;
  int row, head, block;
  int passed = 0;        // skipped blocks whose values are still to be released
  int freed = -1;        // slot of the keys that the running MMAs for dq read
  OwnBlock<1> own = {};  // mask of the latest scores
  bool accumulate = false;
  const auto thread_row = [&](int tile_row) { return tile_row + warp_row + lane / 4; };

  // Loads the next tile's queries into registers, and skips the blocks that only the other warpgroup's queries see.
  // Returns false after the last tile.
  const auto begin_tile = [&] {
    barrier_wait(shared.tile_full, phase);
    phase ^= 1;
    row = shared.next_tile.row;
    if (row < 0) return false;
    head = shared.next_tile.head;
    block = shared.next_tile.blocks - 1;
    statistics.load(p, head, thread_row(row));
    load_a(q, shared.query, warp_row);
    load_a(q + 16, shared.query + kRowPanel, warp_row);
    if constexpr (Mask::kCausal) {
      const int own_end = row + warpgroup * 64 + 64 + p.problem.query_offset;
      const int own_last = max((own_end + kBlock - 1) / kBlock - 1, 0);
      for (; block > own_last; --block, ++passed) pass_over(shared.key_full, shared.key_empty, key);
    }
    return true;
  };

  // Computes delta and bias, and releases the buffers of query and out, and the values of the blocks that begin_tile()
  // skipped.
  const auto finish_statistics = [&] {
    delta[0] = delta[1] = 0;
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      uint32_t o[16], g[16];
      load_a(o, shared.out + panel * kRowPanel, warp_row);
      load_a(g, shared.dout[dout.slot] + panel * kRowPanel, warp_row);
      add_products<T>(delta, o, g);
    }
    __syncwarp();
    barrier_arrive_if(lane == 0, shared.tile_empty);
    statistics.template finish<false>(p, head, thread_row(row), delta, bias);
    for (; passed > 0; --passed) pass_over(shared.value_full, shared.value_empty, value);
  };
  const auto start_scores = [&](float (&scores)[32], bool more) {
    if (more) barrier_wait(shared.key_full[key.slot], key.phase);
    if constexpr (Mask::kBlocks)
      if (more) own = own_block<false>(p.mask.blocks, shared.masked[key.slot], row + warpgroup * 64);
    multiply<T>(scores, q, shared.key[key.slot]);
  };

  // Processes the block whose scores are in `current`, and leaves the next block's scores in `next`. Returns false
  // after the last block of the last tile.
  const auto step = [&](float (&current)[32], float (&next)[32]) {
    const int key_now = key.slot, dout_now = dout.slot, tile_row = row;
    barrier_wait(shared.value_full[value.slot], value.phase);
    multiply<T, 128>(dp, panel_descriptor(shared.dout[dout_now] + own_rows), shared.value[value.slot]);
    hide_keys<Mask>(current, p, own, head, tile_row + warpgroup * 64, thread_row(tile_row),
                    Mask::kBlocks ? own.first : block * kBlock);
    probabilities_of_rows(current, p.problem.scale_log2, bias);

    // The next scores are started only here, because an MMA with A in registers blocks its warps until it runs.
    key.advance();
    const bool last = block == 0;
    bool more = true;
    if (last) {
      dout.advance();
      more = begin_tile();
    } else {
      --block;
    }
    start_scores(next, more);  // after the last tile, the result is not used

    wgmma_wait<1>();  // for dp and the previous dq
    pin_registers(dp);
    pin_registers(ds);
    barrier_arrive_if(lane == 0, shared.value_empty[value.slot]);
    value.advance();
    barrier_arrive_if(lane == 0 && freed >= 0, shared.key_empty[max(freed, 0)]);
    freed = key_now;
    score_gradients_of_rows<false>(dp, current, delta);
    accumulators_to_a<T>(ds, dp);
    multiply_add<T>(dquery, ds, shared.key[key_now], accumulate);
    accumulate = true;
    if (last) {
      wgmma_wait<0>();
      pin_registers(dquery);
      barrier_arrive_if(lane == 0, shared.key_empty[key_now]);
      freed = -1;
      accumulate = false;
      warpgroup_barrier(1 + warpgroup);  // all warps of the warpgroup have used dout
      stage_tile<T>(dquery, p.problem.scale, shared.dout[dout_now] + own_rows, kRowPanel);
      fence_async_shared();
      __syncwarp();
      barrier_arrive_if(lane == 0, shared.dquery_full[dout_now]);
      if (more) finish_statistics();
    }
    wgmma_wait<1>();  // for the next scores
    pin_registers(next);
    return more;
  };

  if (!begin_tile()) return;
  start_scores(scores_a, true);
  finish_statistics();
  wgmma_wait<0>();
  pin_registers(scores_a);
  while (true) {
    if (!step(scores_a, scores_b)) break;
    if (!step(scores_b, scores_a)) break;
  }
  wgmma_wait<0>();
}

// ---- dk and dv ------------------------------------------------------------------------------------------------------

template <typename T>
__device__ void store_dkey_and_dvalue(const Sm90Backward<T>& p, DkeyShared& shared) {
  const int key_heads = p.problem.heads / p.problem.group;
  for (RingPosition<kTiles> at;; at.advance()) {
    barrier_wait(shared.tile_full[at.slot], at.phase);
    const int row = shared.tiles[at.slot].row, head = shared.tiles[at.slot].head;
    if (row < 0) break;
    barrier_wait(shared.gradients_full[at.slot], at.phase);
    store_panels<kPanels>(p.dkey, shared.tile[at.slot][0], kRowPanel, row, head % key_heads, head / key_heads);
    store_panels<kPanels>(p.dvalue, shared.tile[at.slot][1], kRowPanel, row, head % key_heads, head / key_heads);
    tma_store_wait_read();
    barrier_arrive(shared.tile_empty[at.slot]);
  }
  tma_store_wait();
}

template <typename Mask, typename T>
__device__ void sum_dkey_and_dvalue(const Sm90Backward<T>& p, DkeyShared& shared) {
  const int lane = threadIdx.x % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x % kWarpgroup / 32, 0);

  float scores[32], dp[32], dkey[64], dvalue[64];
  uint32_t weights[16];
  RingPosition<kStages> ring;
  RingPosition<kTiles> at;
  // Bit 6 of `row` is the warpgroup's half of the tile. The warpgroups exchange halves after every tile, because under
  // the causal mask one half is seen by one block of queries more than the other half.
  int row = warpgroup * 64;
  int block, end, member = 0;
  OwnBlock<1> own = {};  // mask of the latest scores
  bool accumulate = false;
  int freed = -1;                                                 // slot of the block that the running MMAs for dk read
  const auto half = [&] { return (row & 64) * kPanelRowBytes; };  // offset in a panel

  // Skips the blocks at a head's start whose queries see none of the warpgroup's keys.
  const auto begin_head = [&] {
    block = shared.tiles[at.slot].first;
    if constexpr (Mask::kCausal) {
      const int own_first = min((row - p.problem.query_offset) / kBlock, end - 1);
      for (; block < own_first; ++block) pass_over(shared.block_full, shared.block_empty, ring);
    }
  };
  const auto begin_tile = [&] {
    barrier_wait(shared.tile_full[at.slot], at.phase);
    const BackwardTile& tile = shared.tiles[at.slot];
    if (tile.row < 0) return false;
    row = tile.row + (~row & 64);
    end = tile.first + tile.blocks;
    member = 0;
    begin_head();
    return true;
  };
  const auto start_scores_and_dp = [&](bool more) {
    if (more) barrier_wait(shared.block_full[ring.slot], ring.phase);
    if constexpr (Mask::kBlocks)
      if (more) own = own_block<true>(p.mask.blocks, shared.masked[ring.slot], row);
    multiply<T, 128>(scores, panel_descriptor(shared.tile[at.slot][0] + half()), shared.block[ring.slot][0]);
    multiply<T, 128>(dp, panel_descriptor(shared.tile[at.slot][1] + half()), shared.block[ring.slot][1]);
  };
  const auto start_dvalue = [&] {
    const int now = ring.slot;
    hide_queries<Mask>(scores, p, own, Mask::kAdds ? shared.tiles[at.slot].head * p.problem.group + own.member : 0, row,
                       row + warp * 16 + lane / 4, Mask::kBlocks ? own.first : block * kBlock);
    probabilities_of_columns(scores, p.problem.scale_log2, shared.bias[now]);
    complete(fmaxf(fmaxf(scores[7], scores[15]), fmaxf(scores[23], scores[31])));
    wgmma_wait<0>();  // for the previous dk
    pin_registers(weights);
    barrier_arrive_if(lane == 0 && freed >= 0, shared.block_empty[max(freed, 0)]);
    freed = now;
    accumulators_to_a<T>(weights, scores);
    multiply_add<T>(dvalue, weights, shared.block[now][1], accumulate);
  };

  if (!begin_tile()) return;
  start_scores_and_dp(true);
  wgmma_wait<0>();
  pin_registers(scores);
  pin_registers(dp);
  start_dvalue();
  while (true) {
    const int now = ring.slot, tile = at.slot;
    score_gradients_of_columns<false>(dp, scores, shared.delta[now]);
    wgmma_wait<0>();  // for dv
    pin_registers(weights);
    accumulators_to_a<T>(weights, dp);

    ring.advance();
    const uint32_t own_rows = half();
    bool last = false, more = true;
    if (++block == end) {
      if (!Mask::kBlocks && ++member < p.problem.group) {
        begin_head();
      } else {
        last = true;
        at.advance();
        more = begin_tile();
      }
    }
    start_scores_and_dp(more);
    multiply_add<T>(dkey, weights, shared.block[now][0], accumulate);  // runs during the next exponentials
    accumulate = true;
    if (last) {
      wgmma_wait<0>();
      pin_registers(dkey);
      pin_registers(dvalue);
      accumulate = false;
      warpgroup_barrier(1 + warpgroup);  // all warps of the warpgroup have used keys and values
      stage_tile<T>(dkey, p.problem.scale, shared.tile[tile][0] + own_rows, kRowPanel);
      stage_tile<T>(dvalue, 1, shared.tile[tile][1] + own_rows, kRowPanel);
      fence_async_shared();
      __syncwarp();
      barrier_arrive_if(lane == 0, shared.gradients_full[tile]);
    }
    wgmma_wait<1>();  // for scores and dp
    pin_registers(scores);
    pin_registers(dp);
    // After the last tile, the result is not used. If the loop ended before this call, ptxas would serialize the
    // wgmmas.
    start_dvalue();
    if (!more) break;
  }
  wgmma_wait<0>();
}

#endif

template <typename T, typename Mask>
__global__ void __launch_bounds__(GPTKERNELS_WGMMA ? kThreads : kStubThreads, 1)
    attention_backward_dquery_128_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {
#if GPTKERNELS_WGMMA
  extern __shared__ uint8_t shared_bytes[];
  DqueryShared& shared = aligned<DqueryShared>(shared_bytes);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  let_next_kernel_start();
  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<24>();
    if (threadIdx.x == 0) load_key_blocks<Mask>(p, shared);
    if (threadIdx.x == 32) store_dquery(p, shared);
    if (threadIdx.x == 64) load_query_tiles<Mask>(p, shared);
  } else {
    alloc_registers<240>();
    sum_dquery<Mask>(p, shared);
  }
#endif
}

template <typename T, typename Mask>
__global__ void __launch_bounds__(GPTKERNELS_WGMMA ? kThreads : kStubThreads, 1)
    attention_backward_dkey_128_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {
#if GPTKERNELS_WGMMA
  extern __shared__ uint8_t shared_bytes[];
  DkeyShared& shared = aligned<DkeyShared>(shared_bytes);
  if (threadIdx.x == 0) shared.init(1);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<24>();
    if (threadIdx.x == 32) store_dkey_and_dvalue(p, shared);
    if (threadIdx.x != 0) return;
    wait_for_previous_kernel();
    load_key_tiles<1, Mask>(p, shared);
  } else {
    alloc_registers<240>();
    sum_dkey_and_dvalue<Mask>(p, shared);
  }
#endif
}

template <typename T, typename Mask>
Status launch(const AttentionBackward<T>& p, Stream stream) {
  return launch_backward<T, DqueryShared, DkeyShared, attention_backward_dquery_128_wgmma_kernel<T, Mask>,
                         attention_backward_dkey_128_wgmma_kernel<T, Mask>>(p, stream);
}

}  // namespace

template <typename T>
Status attention_backward_sm90_128(const AttentionBackward<T>& p, Stream stream) {
  if (p.mask.allowed) return launch<T, BoolMask>(p, stream);
  if (p.mask.bias) return launch<T, AdditiveMask>(p, stream);
  return p.mask.causal ? launch<T, CausalMask>(p, stream) : launch<T, NoMask>(p, stream);
}

#define INSTANTIATE(T) template Status attention_backward_sm90_128<T>(const AttentionBackward<T>&, Stream);
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
