// Attention's backward for sm_90a and head sizes up to 64 (larger ones: backward_128.cu). One kernel computes dq,
// another dk and dv; each sums in registers in a fixed order. ' is the transpose, S = q k', P are the probabilities, g
// is the gradient of out, and scale_log2 = scale log2(e). For each query, delta = sum(g * out) - dlogsumexp and
// bias = -logsumexp log2(e).
//
//   dS = P (g v' - delta)    dq = scale dS k    dk = scale dS' q    dv = P' g
//
// Both kernels compute S and g v', which makes 7 matmuls. A single kernel needs 5, but must add up the dq of many
// thread blocks, or process a whole head per thread block (backward_one_pass.cu). P and dS are operands in registers.
//
//   kernel for dq, for each tile of 128 queries:                kernel for dk and dv, for each tile of 128 keys:
//     delta = sum(g * out) - dlogsumexp; store it                 for each block j of 64 queries that see the tile:
//     for each block j of 64 keys, the last one first:              start dP' = v g(j)'
//       start dP = g v(j)'                                          start S'(j+1) = k q(j+1)'
//       start S(j+1) = q k(j+1)'                                    P' = exp2(S'(j) * scale_log2 + bias); wait for dP'
//       P = exp2(S(j) * scale_log2 + bias); wait for dP             start dv += P' g(j)
//       dS = P (dP - delta); start dq += dS k(j)                    dS' = P' (dP' - delta); start dk += dS' q(j)
//       wait for S(j+1); release block j-1                          wait for S'(j+1); release block j-1
//     store scale dq                                              store dv and scale dk
//
// One thread loads ahead. Two warpgroups compute 64 rows of a tile each.
#include "backward_loader.cuh"
#include "backward_softmax.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kTiles = 2, kStages = 6;
using DqueryShared = RingShared<64, 3, kTiles, kStages>;
using DkeyShared = RingShared<64, 2, kTiles, kStages>;
constexpr int kThreads = DkeyShared::kThreads;

#if GPTKERNELS_WGMMA

constexpr int kBlock = DkeyShared::kBlock;

template <typename T>
__device__ void store_tile(const float (&tile)[32], float factor, const CUtensorMap& map, uint32_t shared, int row,
                           int head, int batch, int barrier) {
  const int thread = threadIdx.x % kWarpgroup;
  if (thread == 0) tma_store_wait_read();
  warpgroup_barrier(barrier);
  stage_tile<T>(tile, factor, shared, kBlockPanel);
  fence_async_shared();
  warpgroup_barrier(barrier);
  if (thread == 0) store_panels<1>(map, shared, kBlockPanel, row, head, batch);
}

// ---- dq -------------------------------------------------------------------------------------------------------------

template <typename Mask, typename T>
__device__ void load_query_tiles(const Sm90Backward<T>& p, DqueryShared& shared) {
  RingPosition<kTiles> at;
  RingPosition<kStages> ring;
  TileOrder::Tile found;
  for (int index = p.order.first(); take_tile(p, shared, at, index, found); index = p.order.take()) {
    const uint32_t tile_full = shared.tile_full[at.slot];
    const int row = found.tile * DqueryShared::kRows;
    const int batch = found.head / p.problem.heads, head = found.head % p.problem.heads;
    const int blocks = key_blocks<Mask>(p, found.head, row);
    shared.tiles[at.slot] = {row, found.head, 0, blocks};
    mbarrier_expect(tile_full, 3 * DqueryShared::kRowBytes);
    load_panels<1>(shared.tile[at.slot][0], kRowPanel, p.query, row, head, batch, tile_full);
    load_panels<1>(shared.tile[at.slot][1], kRowPanel, p.dout, row, head, batch, tile_full);
    load_panels<1>(shared.tile[at.slot][2], kRowPanel, p.out, row, head, batch, tile_full);
    at.advance();
    const int key_head = head / p.problem.group, mask_head = Mask::kBlocks ? p.mask_head(found.head) : 0;
    const SeenBlocks seen = Mask::kBlocks ? p.mask.blocks.of_queries(mask_head, row / kMaskBlock) : SeenBlocks{};
    const auto load_block = [&](int block) {
      const uint32_t full = shared.block_full[ring.slot];
      barrier_wait(shared.block_empty[ring.slot], ring.phase ^ 1);
      if constexpr (Mask::kBlocks) shared.masked[ring.slot] = {block * kBlock, seen.classes<1>(block), mask_head, 0};
      mbarrier_expect(full, 2 * DqueryShared::kBlockBytes);
      load_panels<1>(shared.block[ring.slot][0], kBlockPanel, p.key, block * kBlock, key_head, batch, full);
      load_panels<1>(shared.block[ring.slot][1], kBlockPanel, p.value, block * kBlock, key_head, batch, full);
      ring.advance();
    };
    if constexpr (Mask::kBlocks) {
      seen.for_each_from_last<1>(load_block);
    } else {
#pragma unroll 1  // saves registers
      for (int block = blocks - 1; block >= 0; --block) load_block(block);
    }
  }
}

template <typename Mask, bool kDropout, typename T>
__device__ void sum_dquery(const Sm90Backward<T>& p, DqueryShared& shared) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const DropoutDraw dropout(kDropout ? p.problem.dropout : DropoutArguments{});
  float scores_a[32], scores_b[32], dp[32], dquery[32], bias[2], delta[2];
  uint32_t q[16], g[16], ds[16];
  RingPosition<kStages> ring;
  RingPosition<kTiles> at;
  int half = warpgroup;  // of a tile
  while (true) {
    barrier_wait(shared.tile_full[at.slot], at.phase);
    const BackwardTile tile = shared.tiles[at.slot];
    if (tile.row < 0) break;
    // Under the causal mask, one half of a tile sees one more block than the other half, so the warpgroups exchange
    // halves after every tile.
    half ^= 1;
    const int first_row = tile.row + half * 64, row = first_row + warp * 16 + lane / 4;
    const uint32_t dropout_head = dropout.head_number(tile.head, tile.head / p.problem.heads);
    {
      uint32_t o[16];
      RowStatistics<T, Mask> statistics;
      load_a(q, shared.tile[at.slot][0], half * 64 + warp * 16);
      load_a(g, shared.tile[at.slot][1], half * 64 + warp * 16);
      statistics.load(p, tile.head, row);
      load_a(o, shared.tile[at.slot][2], half * 64 + warp * 16);
      delta[0] = delta[1] = 0;
      add_products<T>(delta, o, g);
      statistics.template finish<kDropout>(p, tile.head, row, delta, bias);
    }
    __syncwarp();
    barrier_arrive_if(lane == 0, shared.tile_empty[at.slot]);
    at.advance();

    int block = tile.blocks - 1;
    if constexpr (Mask::kCausal) {
      const int own_blocks = max((first_row + 64 + p.problem.query_offset + kBlock - 1) / kBlock, 0);
      for (; block >= own_blocks; --block) pass_over(shared.block_full, shared.block_empty, ring);
    }
    SeenByWarpgroup<kStages, false> seen;
    seen.left = tile.blocks;
    if constexpr (Mask::kBlocks) seen.find(p.mask.blocks, shared, ring, first_row);
    bool accumulate = false;
#pragma unroll
    for (int i = 0; i < 32; ++i) dquery[i] = 0;

    // Processes block j, whose scores are in `current`, and leaves the scores of block j+1 in `next`. Returns j's
    // stage.
    const auto step = [&](float (&current)[32], float (&next)[32]) {
      const int now = ring.slot;
      multiply<T>(dp, g, shared.block[now][1]);
      ring.advance();
      const OwnBlock<1> own = seen.own;
      if constexpr (Mask::kBlocks) {
        --seen.left;
        seen.find(p.mask.blocks, shared, ring, first_row);
      } else if (block > 0) {
        barrier_wait(shared.block_full[ring.slot], ring.phase);
      }
      // After the last block, the result is not used.
      multiply<T>(next, q, shared.block[ring.slot][0]);

      const int first_key = Mask::kBlocks ? own.first : block * kBlock;
      hide_keys<Mask>(current, p, own, tile.head, first_row, row, first_key);
      probabilities_of_rows(current, p.problem.scale_log2, bias);
      if constexpr (kDropout)
        for_kept<32>(dropout, dropout_head, first_row + warp * 16, first_key, MarkDropped(current));
      wgmma_wait<1>();  // for dp and the previous dq
      pin_registers(dp);
      pin_registers(ds);
      score_gradients_of_rows<kDropout>(dp, current, delta);
      accumulators_to_a<T>(ds, dp);
      multiply_add<T>(dquery, ds, shared.block[now][0], accumulate);
      accumulate = true;
      wgmma_wait<1>();  // for the next scores
      pin_registers(next);
      return now;
    };

    // The matmul for dq still reads stage `freed`, until the next step has waited for dq.
    int freed = -1;
    const auto free_block = [&](int slot) {
      barrier_arrive_if(lane == 0 && freed >= 0, shared.block_empty[max(freed, 0)]);
      freed = slot;
    };
    const auto is_last = [&] { return Mask::kBlocks ? seen.left == 0 : --block < 0; };
    if (Mask::kBlocks ? seen.left > 0 : block >= 0) {
      barrier_wait(shared.block_full[ring.slot], ring.phase);
      multiply<T>(scores_a, q, shared.block[ring.slot][0]);
      wgmma_wait<0>();
      pin_registers(scores_a);
      while (true) {
        free_block(step(scores_a, scores_b));
        if (is_last()) break;
        free_block(step(scores_b, scores_a));
        if (is_last()) break;
      }
      wgmma_wait<0>();
      pin_registers(dquery);
      free_block(-1);
    }
    store_tile<T>(dquery, last_factor<kDropout>(p, p.problem.scale), p.dquery, shared.out[warpgroup], first_row,
                  tile.head % p.problem.heads, tile.head / p.problem.heads, 1 + warpgroup);
  }
  if (thread == 0) tma_store_wait();
}

// ---- dk and dv ------------------------------------------------------------------------------------------------------

template <typename Mask, bool kDropout, typename T>
__device__ void sum_dkey_and_dvalue(const Sm90Backward<T>& p, DkeyShared& shared) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int key_heads = p.problem.heads / p.problem.group;
  const DropoutDraw dropout(kDropout ? p.problem.dropout : DropoutArguments{});
  float scores_a[32], scores_b[32], dp[32], dkey[32], dvalue[32];
  uint32_t k[16], weights[16], ds[16];
  RingPosition<kStages> ring;
  RingPosition<kTiles> at;
  int half = warpgroup;  // of a tile
  while (true) {
    barrier_wait(shared.tile_full[at.slot], at.phase);
    const BackwardTile tile = shared.tiles[at.slot];
    if (tile.row < 0) break;
    half ^= 1;  // as in sum_dquery()
    const int first_row = tile.row + half * 64, row = first_row + warp * 16 + lane / 4;
    load_a(k, shared.tile[at.slot][0], half * 64 + warp * 16);
    const uint64_t v = panel_descriptor(shared.tile[at.slot][1] + half * 64 * kPanelRowBytes);
    const uint32_t head_shift = dropout.head_number(0, tile.head / key_heads);  // from a head to its number
#pragma unroll
    for (int i = 0; i < 32; ++i) dkey[i] = dvalue[i] = 0;

    // Skips the blocks at a head's start whose queries see none of the warpgroup's keys.
    int own_first = tile.first;
    if constexpr (Mask::kCausal) own_first = max(tile.first, (first_row - p.problem.query_offset) / kBlock);
    const int end = tile.first + tile.blocks;
    const int hidden = min(own_first, end) - tile.first;
    int block = own_first, member = 0;
    const auto begin_head = [&] {
      for (int i = 0; i < hidden; ++i) pass_over(shared.block_full, shared.block_empty, ring);
      block = own_first;
    };
    SeenByWarpgroup<kStages, true> seen;
    seen.left = Mask::kBlocks ? tile.blocks : 0;

    const auto step = [&](float (&current)[32], float (&next)[32]) {
      const int now = ring.slot;
      const OwnBlock<1> own = seen.own;
      const int first_query = Mask::kBlocks ? own.first : block * kBlock;
      const int head = tile.head * p.problem.group + (Mask::kBlocks ? own.member : member);
      multiply<T, 64>(dp, v, shared.block[now][1]);
      ring.advance();
      bool more = true;
      if constexpr (Mask::kBlocks) {
        --seen.left;
        seen.find(p.mask.blocks, shared, ring, first_row);
        more = false;  // find() has waited already
      } else if (++block == end) {
        more = ++member < p.problem.group;
        if (more) begin_head();
      }
      if (more) barrier_wait(shared.block_full[ring.slot], ring.phase);
      multiply<T>(next, k, shared.block[ring.slot][0]);

      hide_queries<Mask>(current, p, own, head, first_row, row, first_query);
      probabilities_of_columns(current, p.problem.scale_log2, shared.bias[now]);
      float last = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) last = fmaxf(last, current[4 * i + 3]);
      complete(last);
      if constexpr (kDropout)
        for_kept_transposed<32>(dropout, head + head_shift, first_row + warp * 16, first_query, MarkDropped(current));
      wgmma_wait<1>();  // for dp and the previous dv, dk
      pin_registers(dp);
      pin_registers(weights);
      pin_registers(ds);
      weights_to_a<kDropout, T>(weights, current);
      multiply_add<T>(dvalue, weights, shared.block[now][1], true);
      score_gradients_of_columns<kDropout>(dp, current, shared.delta[now]);
      accumulators_to_a<T>(ds, dp);
      multiply_add<T>(dkey, ds, shared.block[now][0], true);
      wgmma_wait<2>();  // for the next scores
      pin_registers(next);
      return now;
    };

    int freed = -1;
    const auto free_block = [&](int slot) {
      barrier_arrive_if(lane == 0 && freed >= 0, shared.block_empty[max(freed, 0)]);
      freed = slot;
    };
    const auto is_last = [&] { return Mask::kBlocks ? seen.left == 0 : member == p.problem.group; };
    if constexpr (Mask::kBlocks)
      seen.find(p.mask.blocks, shared, ring, first_row);
    else
      begin_head();
    if (Mask::kBlocks ? seen.left > 0 : block < end) {
      if (!Mask::kBlocks) barrier_wait(shared.block_full[ring.slot], ring.phase);
      multiply<T>(scores_a, k, shared.block[ring.slot][0]);
      wgmma_wait<0>();
      pin_registers(scores_a);
      while (true) {
        free_block(step(scores_a, scores_b));
        if (is_last()) break;
        free_block(step(scores_b, scores_a));
        if (is_last()) break;
      }
      wgmma_wait<0>();
      pin_registers(dkey);
      pin_registers(dvalue);
      free_block(-1);
    } else if (!Mask::kBlocks) {
      for (member = 1; member < p.problem.group; ++member) begin_head();
    }
    barrier_arrive_if(lane == 0, shared.tile_empty[at.slot]);
    at.advance();
    store_tile<T>(dvalue, last_factor<kDropout>(p, 1), p.dvalue, shared.out[warpgroup], first_row,
                  tile.head % key_heads, tile.head / key_heads, 1 + warpgroup);
    store_tile<T>(dkey, last_factor<kDropout>(p, p.problem.scale), p.dkey, shared.out[warpgroup], first_row,
                  tile.head % key_heads, tile.head / key_heads, 1 + warpgroup);
  }
  if (thread == 0) tma_store_wait();
}

#endif

template <typename T, typename Mask, bool kDropout>
__global__ void __launch_bounds__(GPTKERNELS_WGMMA ? kThreads : kStubThreads, 1)
    attention_backward_dquery_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {
#if GPTKERNELS_WGMMA
  extern __shared__ uint8_t shared_bytes[];
  DqueryShared& shared = aligned<DqueryShared>(shared_bytes);
  if (threadIdx.x == 0) shared.init(kComputingWarps);
  __syncthreads();
  let_next_kernel_start();
  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<24>();
    if (threadIdx.x == 0) load_query_tiles<Mask>(p, shared);
  } else {
    alloc_registers<240>();
    sum_dquery<Mask, kDropout>(p, shared);
  }
#endif
}

template <typename T, typename Mask, bool kDropout>
__global__ void __launch_bounds__(GPTKERNELS_WGMMA ? kThreads : kStubThreads, 1)
    attention_backward_dkey_wgmma_kernel(const __grid_constant__ Sm90Backward<T> p) {
#if GPTKERNELS_WGMMA
  extern __shared__ uint8_t shared_bytes[];
  DkeyShared& shared = aligned<DkeyShared>(shared_bytes);
  if (threadIdx.x == 0) shared.init(kComputingWarps);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<24>();
    if (threadIdx.x != 0) return;
    wait_for_previous_kernel();
    load_key_tiles<0, Mask>(p, shared);
  } else {
    alloc_registers<240>();
    sum_dkey_and_dvalue<Mask, kDropout>(p, shared);
  }
#endif
}

template <typename T, typename Mask, bool kDropout>
Status launch(const AttentionBackward<T>& p, Stream stream) {
  return launch_backward<T, DqueryShared, DkeyShared, attention_backward_dquery_wgmma_kernel<T, Mask, kDropout>,
                         attention_backward_dkey_wgmma_kernel<T, Mask, kDropout>>(p, stream);
}

}  // namespace

template <typename T>
bool attention_backward_sm90_supports(const AttentionBackward<T>& p) {
  const AttentionSizes& s = p.sizes;
  const bool sized = s.head_size <= 64 || (s.head_size <= 128 && p.dropout.probability == 0);
  return sized && supports_mask<T>(p) &&
         sm90_supports<T, attention_backward_dkey_wgmma_kernel<T, CausalMask, false>>(p) &&
         tma_supports(p.dout, s, s.heads, s.queries) && tma_supports(p.dquery, s, s.heads, s.queries) &&
         tma_supports(p.dkey, s, s.key_heads, s.keys) && tma_supports(p.dvalue, s, s.key_heads, s.keys);
}

template <typename T>
int64_t attention_backward_sm90_workspace(const AttentionBackward<T>& p) {
  if (attention_backward_sm90_head_supports(p)) return attention_backward_sm90_head_workspace(p);
  return backward_workspace(p.sizes) + mask_workspace(p.mask, p.sizes, true);
}

template <typename T>
Status attention_backward_sm90(const AttentionBackward<T>& p, Stream stream) {
  if (attention_backward_sm90_head_supports(p)) return attention_backward_sm90_head(p, stream);
  if (p.sizes.head_size > 64) return attention_backward_sm90_128(p, stream);
  const auto with = [&]<bool kDropout>() {
    if (p.mask.allowed) return launch<T, BoolMask, kDropout>(p, stream);
    if (p.mask.bias) return launch<T, AdditiveMask, kDropout>(p, stream);
    return p.mask.causal ? launch<T, CausalMask, kDropout>(p, stream) : launch<T, NoMask, kDropout>(p, stream);
  };
  return p.dropout.probability > 0 ? with.template operator()<true>() : with.template operator()<false>();
}

#define INSTANTIATE(T)                                                                \
  template bool attention_backward_sm90_supports<T>(const AttentionBackward<T>&);     \
  template int64_t attention_backward_sm90_workspace<T>(const AttentionBackward<T>&); \
  template Status attention_backward_sm90<T>(const AttentionBackward<T>&, Stream);
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
