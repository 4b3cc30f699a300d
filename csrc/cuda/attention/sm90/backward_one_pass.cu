// Attention's backward for sm_90a, in which a thread block processes a whole head. The kernel computes scores once, so
// it needs five matmuls instead of the seven of backward.cu, whose notation it uses. It supports up to 1024 queries and
// 64 channels, without attn_mask, dropout, shared key heads or a negative query_offset, and needs enough heads to keep
// the SMs busy. For each tile of 128 keys, a thread block processes the blocks of 64 queries that see the tile. Its
// warpgroups:
//
//   - one loads tiles, and two of its warps compute delta and the bias, up to one head ahead
//   - two have 64 keys each: they sum dk and dv in registers, and pass dS^T in shared memory to the last warpgroup
//   - the last one computes the tile's part of the block's dq, and adds it to the sums of earlier tiles
//
// The sums of dq are in the thread block's buffer in global memory, which stays in the L2 cache. Each element is
// accessed by one thread only, so terms are added in the order of the tiles without semaphores, and results are bitwise
// reproducible.
#include <utility>

#include "backward_softmax.cuh"
#include "cuda/ptx/cache_policy.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kRows = 128;  // keys of a tile
constexpr int kBlock = 64;
constexpr int kMostQueries = 1024;
constexpr int kMostBlocks = kMostQueries / kBlock;
constexpr int kThreads = 4 * kWarpgroup;
constexpr int kTiles = 2;    // of keys and values
constexpr int kStages = 4;   // of queries and dout
constexpr int kParts = 2;    // of a warpgroup's dS^T
constexpr int kHeads = 2;    // of a head's statistics
constexpr int kHelpers = 2;  // warps that compute statistics
constexpr int kHelperRows = kBlock / kHelpers;
constexpr int kSums = kBlock * 64;
constexpr int kKeyWarps = 8;
constexpr int kDqueryWarps = 4;

constexpr int kTileBytes = kRows * kPanelRowBytes;
constexpr int kBlockBytes = kBlock * kPanelRowBytes;
constexpr int kHelperBytes = kHelperRows * kPanelRowBytes;
constexpr int kStatisticsBytes = kMostQueries * 4;
constexpr int kBlocksAt = kTiles * 2 * kTileBytes;
constexpr int kPartsAt = kBlocksAt + kStages * 2 * kBlockBytes;
constexpr int kOutAt = kPartsAt + 2 * kParts * kBlockBytes;
constexpr int kHelpersAt = kOutAt + 3 * kBlockBytes;
constexpr int kStatisticsAt = kHelpersAt + kHelpers * 2 * kHelperBytes;
constexpr int kBarriersAt = kStatisticsAt + kHeads * 2 * kStatisticsBytes;
constexpr int kBarriers = 2 * (kTiles + kStages + 2 * kParts) + kHeads * (1 + kMostBlocks) + kHelpers;
constexpr int kSharedBytes = kBarriersAt + 8 * kBarriers + 1024;

template <typename T>
struct HeadBackward {
  CUtensorMap query, dout;              // boxes of kBlock rows
  CUtensorMap key, value;               // boxes of kRows rows
  CUtensorMap helper_out, helper_dout;  // boxes of kHelperRows rows
  CUtensorMap dquery;                   // boxes of kBlock rows
  CUtensorMap dkey, dvalue;             // boxes of 16 rows
  const float* logsumexp;
  const float* dlogsumexp;
  float* sums;  // of dq: kSums per thread block and block of queries, in the accumulators' order
  Sm90Problem<T> problem;
  int blocks;
  int tiles;
};

#if GPTKERNELS_WGMMA

struct Shared {
  uint32_t first;

  __device__ uint32_t key(int tile) const { return first + tile * 2 * kTileBytes; }
  __device__ uint32_t value(int tile) const { return key(tile) + kTileBytes; }
  __device__ uint32_t query(int stage) const { return first + kBlocksAt + stage * 2 * kBlockBytes; }
  __device__ uint32_t dout(int stage) const { return query(stage) + kBlockBytes; }
  __device__ uint32_t part(int warpgroup, int i) const {
    return first + kPartsAt + (warpgroup * kParts + i) * kBlockBytes;
  }
  __device__ uint32_t dkey(int warpgroup) const { return first + kOutAt + warpgroup * kBlockBytes; }
  __device__ uint32_t dquery() const { return first + kOutAt + 2 * kBlockBytes; }
  __device__ uint32_t helper_out(int helper) const { return first + kHelpersAt + helper * 2 * kHelperBytes; }
  __device__ uint32_t bias(int head) const { return first + kStatisticsAt + head * 2 * kStatisticsBytes; }
  __device__ uint32_t delta(int head) const { return bias(head) + kStatisticsBytes; }

  __device__ uint32_t barrier(int i) const { return first + kBarriersAt + 8 * i; }
  __device__ uint32_t tile_full(int i) const { return barrier(i); }
  __device__ uint32_t tile_empty(int i) const { return barrier(kTiles + i); }
  __device__ uint32_t block_full(int i) const { return barrier(2 * kTiles + i); }
  __device__ uint32_t block_empty(int i) const { return barrier(2 * kTiles + kStages + i); }
  __device__ uint32_t part_full(int warpgroup, int i) const {
    return barrier(2 * (kTiles + kStages) + warpgroup * kParts + i);
  }
  __device__ uint32_t part_empty(int warpgroup, int i) const { return part_full(2 + warpgroup, i); }
  __device__ uint32_t helper_full(int i) const { return barrier(2 * (kTiles + kStages + 2 * kParts) + i); }
  __device__ uint32_t statistics_empty(int head) const { return helper_full(kHelpers + head); }
  __device__ uint32_t statistics_full(int head, int block) const {
    return statistics_empty(kHeads + head * kMostBlocks + block);
  }

  __device__ void init_barriers() const {
    for (int i = 0; i < kTiles; ++i) {
      barrier_init(tile_full(i), 1);
      barrier_init(tile_empty(i), kKeyWarps + kDqueryWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(block_full(i), 1);
      barrier_init(block_empty(i), kKeyWarps);
    }
    for (int i = 0; i < 2 * kParts; ++i) {
      barrier_init(part_full(0, i), kKeyWarps / 2);
      barrier_init(part_empty(0, i), kDqueryWarps);
    }
    for (int i = 0; i < kHelpers; ++i) barrier_init(helper_full(i), 1);
    for (int i = 0; i < kHeads; ++i) {
      barrier_init(statistics_empty(i), kKeyWarps);
      for (int block = 0; block < kMostBlocks; ++block) barrier_init(statistics_full(i, block), kHelpers);
    }
    mbarrier_init_fence();
  }
};

// ---- the order of the blocks ----------------------------------------------------------------------------------------

// Odd tiles process the blocks of queries in reverse: they start with the blocks that the previous tile used last,
// which are still in the L2 cache.
struct BlockWalk {
  int block;
  int step;
  int left;  // including `block`

  __device__ BlockWalk(int begin, int end, int tile)
      : block(tile % 2 ? end - 1 : begin), step(tile % 2 ? -1 : 1), left(end - begin) {}
  __device__ void advance() {
    block += step;
    --left;
  }
};

template <bool kCausal, typename T>
__device__ int first_block(const HeadBackward<T>& p, int key) {
  return kCausal ? min(max(key - p.problem.query_offset, 0) / kBlock, p.blocks) : 0;
}

template <bool kCausal, typename T>
__device__ BlockWalk walk_of_tile(const HeadBackward<T>& p, int tile) {
  return {first_block<kCausal>(p, tile * kRows), p.blocks, tile};
}

// The warpgroups exchange halves at each tile, because under the causal mask one half of the keys is seen by one block
// of queries more than the other half.
__device__ inline int half_of(int tile, int warpgroup) {
  return (tile + warpgroup) % 2;
}

// Returns the first block of queries that sees any of the 64 keys from `key` on. It is p.blocks (none) if all of these
// keys are beyond the last one.
template <bool kCausal, typename T>
__device__ int own_first_block(const HeadBackward<T>& p, int key) {
  return key < p.problem.keys ? first_block<kCausal>(p, key) : p.blocks;
}

// ---- the loading warpgroup ------------------------------------------------------------------------------------------

template <typename T, bool kCausal>
__device__ void load_tiles(const HeadBackward<T>& p, const Shared& shared) {
  const int heads = p.problem.batches * p.problem.heads;
  RingPosition<kTiles> at;
  RingPosition<kStages> ring;
  for (int index = blockIdx.x; index < heads; index += gridDim.x) {
    const int batch = index / p.problem.heads, head = index % p.problem.heads;
    for (int tile = 0; tile < p.tiles; ++tile) {
      const uint32_t tile_full = shared.tile_full(at.slot);
      barrier_wait(shared.tile_empty(at.slot), at.phase ^ 1);
      mbarrier_expect(tile_full, 2 * kTileBytes);
      tma_load_once(shared.key(at.slot), p.key, 0, tile * kRows, head, batch, tile_full);
      tma_load_once(shared.value(at.slot), p.value, 0, tile * kRows, head, batch, tile_full);
      at.advance();
#pragma unroll 1  // saves registers
      for (BlockWalk walk = walk_of_tile<kCausal>(p, tile); walk.left > 0; walk.advance()) {
        const uint32_t full = shared.block_full(ring.slot);
        barrier_wait(shared.block_empty(ring.slot), ring.phase ^ 1);
        mbarrier_expect(full, 2 * kBlockBytes);
        tma_load(shared.query(ring.slot), p.query, 0, walk.block * kBlock, head, batch, full);
        tma_load(shared.dout(ring.slot), p.dout, 0, walk.block * kBlock, head, batch, full);
        ring.advance();
      }
    }
  }
}

template <typename T>
__device__ float row_product(uint32_t out, uint32_t dout, int row) {
  float even = 0, odd = 0;
#pragma unroll 2
  for (int chunk = 0; chunk < 8; ++chunk) {
    uint32_t o[4], g[4];
    load_words(o, out + panel_offset(row, chunk));
    load_words(g, dout + panel_offset(row, chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = unpack_pair<T>(o[i]), b = unpack_pair<T>(g[i]);
      even += a.x * b.x;
      odd += a.y * b.y;
    }
  }
  return even + odd;
}

// Makes the statistics of a thread's 16 columns adjacent.
__device__ inline int statistics_place(int query) {
  return query % 8 / 2 * 16 + query / 8 * 2 + query % 2;
}

__device__ inline void store_shared(uint32_t shared, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory");
}

// Computes -logsumexp * log2(e) and delta, at most one head ahead of the warpgroups that use them.
template <typename T>
__device__ void compute_statistics(const HeadBackward<T>& p, const Shared& shared, int helper) {
  const int lane = threadIdx.x % 32;
  const int heads = p.problem.batches * p.problem.heads, queries = p.problem.queries;
  const uint32_t out = shared.helper_out(helper), dout = out + kHelperBytes, full = shared.helper_full(helper);
  const auto load = [&](int index, int block) {
    if (lane != 0 || index >= heads) return;
    const int batch = index / p.problem.heads, head = index % p.problem.heads;
    const int row = block * kBlock + helper * kHelperRows;
    mbarrier_expect(full, 2 * kHelperBytes);
    tma_load_once(out, p.helper_out, 0, row, head, batch, full);
    tma_load_once(dout, p.helper_dout, 0, row, head, batch, full);
  };
  RingPosition<kHeads> at;
  unsigned phase = 0;
  load(blockIdx.x, 0);
  for (int index = blockIdx.x; index < heads; index += gridDim.x, at.advance()) {
    barrier_wait(shared.statistics_empty(at.slot), at.phase ^ 1);
    const int64_t first = static_cast<int64_t>(index) * queries;
    for (int block = 0; block < p.blocks; ++block, phase ^= 1) {
      const int own = helper * kHelperRows + lane, query = block * kBlock + own;
      const float logsumexp = query < queries ? p.logsumexp[first + query] : -INFINITY;
      const float dlogsumexp = query < queries && p.dlogsumexp ? p.dlogsumexp[first + query] : 0;
      barrier_wait(full, phase);
      const float sum = row_product<T>(out, dout, lane);
      __syncwarp();
      const bool last = block + 1 == p.blocks;
      load(last ? index + gridDim.x : index, last ? 0 : block + 1);
      const uint32_t place = (block * kBlock + statistics_place(own)) * 4;
      // A bias of -inf makes P 0, for queries that see no key and for rows beyond the last query.
      store_shared(shared.bias(at.slot) + place, logsumexp == -INFINITY ? -INFINITY : -logsumexp * kLog2E);
      store_shared(shared.delta(at.slot) + place, sum - dlogsumexp);
      __syncwarp();
      barrier_arrive_if(lane == 0, shared.statistics_full(at.slot, block));
    }
  }
}

// ---- dq -------------------------------------------------------------------------------------------------------------

// Loads 16 channels of 64 keys, transposed, as A operands.
__device__ inline void load_transposed(uint32_t (&a)[16], uint32_t panel, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    load_matrices_transposed(reinterpret_cast<uint32_t (&)[4]>(a[4 * i]),
                             panel + panel_offset(16 * i + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
}

// Stores dq^T (64 channels, 64 queries) * factor as a tile of dq.
template <typename T>
__device__ void stage_transposed(const float (&tile)[32], float factor, uint32_t panel, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* t = &tile[8 * i];
    store_matrices_transposed(panel + panel_offset(16 * i + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2),
                              pack_pair<T>(t[0] * factor, t[1] * factor), pack_pair<T>(t[2] * factor, t[3] * factor),
                              pack_pair<T>(t[4] * factor, t[5] * factor), pack_pair<T>(t[6] * factor, t[7] * factor));
  }
}

// dq^T = k^T dS^T, with a tile's keys in registers.
template <typename T, bool kCausal>
__device__ void sum_dquery(const HeadBackward<T>& p, const Shared& shared) {
  constexpr int kBarrier = 1;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int heads = p.problem.batches * p.problem.heads;
  float* const own_sums = p.sums + static_cast<int64_t>(blockIdx.x) * p.blocks * kSums + thread * 4;
  float dquery[32];
  uint32_t keys[2][16];  // both halves of a tile
  RingPosition<kTiles> at;
  RingPosition<kParts> part[2];
  const auto multiply_part = [&](int warpgroup, bool accumulate) {
    const uint64_t ds = panel_descriptor(shared.part(warpgroup, part[warpgroup].slot));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      wgmma<T, true>(dquery, &keys[warpgroup][4 * i], ds + i * kStepRows, i > 0 || accumulate);
  };
  const auto wait_for_part = [&](int warpgroup) {
    barrier_wait(shared.part_full(warpgroup, part[warpgroup].slot), part[warpgroup].phase);
  };
  const auto free_part = [&](int warpgroup) {
    barrier_arrive_if(lane == 0, shared.part_empty(warpgroup, part[warpgroup].slot));
    part[warpgroup].advance();
  };
  const auto multiply_parts = [&]<int... kWarpgroups>(bool accumulate) {
    (wait_for_part(kWarpgroups), ...);
    wgmma_fence();
    (multiply_part(kWarpgroups, std::exchange(accumulate, true)), ...);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(dquery);
    (free_part(kWarpgroups), ...);
  };
  for (int index = blockIdx.x; index < heads; index += gridDim.x) {
    for (int tile = 0; tile < p.tiles; ++tile) {
      barrier_wait(shared.tile_full(at.slot), at.phase);
      int own_first[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const int row = half_of(tile, w) * 64;
        own_first[w] = own_first_block<kCausal>(p, tile * kRows + row);
        load_transposed(keys[w], shared.key(at.slot) + row * kPanelRowBytes, warp);
      }
      __syncwarp();
      barrier_arrive_if(lane == 0, shared.tile_empty(at.slot));
      at.advance();
#pragma unroll 1
      for (BlockWalk walk = walk_of_tile<kCausal>(p, tile); walk.left > 0; walk.advance()) {
        const int block = walk.block;
        float* const sums = own_sums + block * kSums;
        int last = p.tiles - 1;
        if (kCausal) last = min(last, (block * kBlock + kBlock - 1 + p.problem.query_offset) / kRows);
        // In the last tile that the block of queries sees, the accumulators start from the sums of the earlier tiles.
        const bool finish = tile == last && tile > 0;
        if (finish) {
#pragma unroll
          for (int i = 0; i < 8; ++i) kept_load(&dquery[4 * i], sums + i * kWarpgroup * 4);
        }
        pin_registers(dquery);
        if (block >= max(own_first[0], own_first[1]))
          multiply_parts.template operator()<0, 1>(finish);
        else if (block >= own_first[0])
          multiply_parts.template operator()<0>(finish);
        else
          multiply_parts.template operator()<1>(finish);
        if (tile < last) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (tile == 0)
              kept_store(sums + i * kWarpgroup * 4, &dquery[4 * i]);
            else
              kept_add(sums + i * kWarpgroup * 4, &dquery[4 * i]);
          }
          continue;
        }
        if (thread == 0) tma_store_wait_read();
        warpgroup_barrier(kBarrier);
        stage_transposed<T>(dquery, p.problem.scale, shared.dquery(), warp);
        fence_async_shared();
        warpgroup_barrier(kBarrier);
        if (thread == 0) {
          tma_store_once(p.dquery, shared.dquery(), 0, block * kBlock, index % p.problem.heads,
                         index / p.problem.heads);
          tma_store_commit();
        }
      }
    }
  }
  if (thread == 0) tma_store_wait();
}

// ---- dk and dv ------------------------------------------------------------------------------------------------------

__device__ inline void load_statistics(float (&x)[16], uint32_t shared) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[4 * i]), "=f"(x[4 * i + 1]), "=f"(x[4 * i + 2]), "=f"(x[4 * i + 3])
                 : "r"(shared + 16 * i)
                 : "memory");
}

// Hides causally masked scores, and the scores of keys beyond the last key, because these keys must not contribute to
// dq.
template <bool kCausal, typename T>
__device__ void hide_scores(float (&scores)[32], const HeadBackward<T>& p, int own_key, int first_query) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = own_key + 8 * r;
    // The first query that sees the key, as an index in the block.
    int limit = kCausal ? key - p.problem.query_offset - first_query : 0;
    if (key >= p.problem.keys) limit = kBlock;
    limit -= 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (8 * i < limit) scores[4 * i + 2 * r] = -INFINITY;
      if (8 * i + 1 < limit) scores[4 * i + 2 * r + 1] = -INFINITY;
    }
  }
}

// S^T = k q^T, dP^T = v g^T, dv += P^T g, dk += dS^T q. Rows are keys; the columns of S^T and dP^T are queries.
template <typename T, bool kCausal>
__device__ void sum_dkey_and_dvalue(const HeadBackward<T>& p, const Shared& shared, int warpgroup) {
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(~0u, threadIdx.x % kWarpgroup / 32, 0);
  const int heads = p.problem.batches * p.problem.heads;
  const float factor = p.problem.scale_log2;
  float scores[32], dp[32], dkey[32], dvalue[32], of_query[16];
  uint32_t weights[16], ds[16];
  RingPosition<kHeads> of_head;
  RingPosition<kTiles> at;
  RingPosition<kStages> ring;
  RingPosition<kParts> part;
  int held = -1;  // tile buffer through which dv is being stored
  const auto release = [&] {
    if (held >= 0 && lane == 0) {
      tma_store_wait_read<1>();
      barrier_arrive(shared.tile_empty(held));
    }
    held = -1;
  };
  for (int index = blockIdx.x; index < heads; index += gridDim.x) {
    const uint32_t bias = shared.bias(of_head.slot) + lane % 4 * 64, delta = bias + kStatisticsBytes;
    for (int tile = 0; tile < p.tiles; ++tile) {
      barrier_wait(shared.tile_full(at.slot), at.phase);
      const int half = half_of(tile, warpgroup), first_key = tile * kRows + half * 64;
      const uint32_t values = shared.value(at.slot) + half * kBlockBytes;
      const uint64_t k = panel_descriptor(shared.key(at.slot) + half * kBlockBytes), v = panel_descriptor(values);
#pragma unroll
      for (int i = 0; i < 32; ++i) dkey[i] = dvalue[i] = 0;
      const int own_first = own_first_block<kCausal>(p, first_key);
      BlockWalk walk(own_first, p.blocks, tile);
      // Only the other warpgroup computes the `others` lowest blocks, but this one must release their stages, too. Even
      // tiles load these blocks first, odd tiles last, so pass_over() is called before or after the loop over the other
      // blocks. Then this warpgroup holds no other block. If it did, the loader could wait for one of these stages
      // while this warpgroup waits for a later block.
      const int others = own_first - first_block<kCausal>(p, tile * kRows);
      const auto pass_over = [&] {
        for (int i = 0; i < others; ++i) {
          barrier_wait(shared.block_full(ring.slot), ring.phase);
          barrier_arrive_if(lane == 0, shared.block_empty(ring.slot));
          ring.advance();
        }
      };
      if (tile % 2 == 0) pass_over();
      // After a tile's last block, the results are not used.
      const auto start_block = [&](bool any) {
        if (any) barrier_wait(shared.block_full(ring.slot), ring.phase);
        pin_registers(scores);
        pin_registers(dp);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          wgmma<T, false>(scores, k + i * kStepK, panel_descriptor(shared.query(ring.slot)) + i * kStepK, i > 0);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          wgmma<T, false>(dp, v + i * kStepK, panel_descriptor(shared.dout(ring.slot)) + i * kStepK, i > 0);
        wgmma_commit();
      };
      if (walk.left > 0) {
        start_block(true);
        release();
        wgmma_wait<0>();
        int freed = -1;
#pragma unroll 1
        while (walk.left > 0) {
          const int slot = ring.slot, block = walk.block;
          pin_registers(scores);
          if ((kCausal && block * kBlock + p.problem.query_offset < first_key + 63) || first_key + 64 > p.problem.keys)
            hide_scores<kCausal>(scores, p, first_key + warp * 16 + lane / 4, block * kBlock);
          if (tile == 0) barrier_wait(shared.statistics_full(of_head.slot, block), of_head.phase);
          load_statistics(of_query, bias + block * kBlock * 4);
          float last = 0;
#pragma unroll
          for (int i = 0; i < 32; ++i) {
            scores[i] = exp2_approximately(fmaf(scores[i], factor, of_query[i / 4 * 2 + i % 2]));
            if (i % 4 == 3) last = fmaxf(last, scores[i]);
          }
          complete(last);
          load_statistics(of_query, delta + block * kBlock * 4);
          wgmma_wait<0>();  // for dp and the previous dk
          barrier_arrive_if(lane == 0 && freed >= 0, shared.block_empty(max(freed, 0)));
          freed = slot;
          pin_registers(dp);
          pin_registers(weights);
          pin_registers(ds);
          accumulators_to_a<T>(weights, scores);
          multiply_add<T>(dvalue, weights, shared.dout(slot), true);
#pragma unroll
          for (int i = 0; i < 32; ++i) dp[i] = scores[i] * (dp[i] - of_query[i / 4 * 2 + i % 2]);
          accumulators_to_a<T>(ds, dp);
          barrier_wait(shared.part_empty(warpgroup, part.slot), part.phase ^ 1);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            store_matrices(shared.part(warpgroup, part.slot) + panel_offset(warp * 16 + lane % 16, 2 * i + lane / 16),
                           ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
          fence_async_shared();
          __syncwarp();
          barrier_arrive_if(lane == 0, shared.part_full(warpgroup, part.slot));
          part.advance();
          ring.advance();
          walk.advance();
          start_block(walk.left > 0);
          multiply_add<T>(dkey, ds, shared.query(slot), true);
          wgmma_wait<2>();  // for the next scores
        }
        wgmma_wait<0>();
        pin_registers(dkey);
        pin_registers(dvalue);
        barrier_arrive_if(lane == 0, shared.block_empty(freed));
      }
      if (tile % 2 == 1) pass_over();

      // dv is staged in the warp's 16 rows of the values, which no other warp reads.
      release();
      if (lane == 0) tma_store_wait_read();
      __syncwarp();
      stage_tile<T>(dvalue, 1, values, 0);
      stage_tile<T>(dkey, p.problem.scale, shared.dkey(warpgroup), 0);
      fence_async_shared();
      __syncwarp();
      if (lane == 0) {
        const int row = first_key + warp * 16, head = index % p.problem.heads, batch = index / p.problem.heads;
        const uint32_t own_rows = warp * 16 * kPanelRowBytes;
        tma_store_once(p.dvalue, values + own_rows, 0, row, head, batch);
        tma_store_commit();
        tma_store_once(p.dkey, shared.dkey(warpgroup) + own_rows, 0, row, head, batch);
        tma_store_commit();
      }
      held = at.slot;
      at.advance();
    }
    barrier_arrive_if(lane == 0, shared.statistics_empty(of_head.slot));
    of_head.advance();
  }
  if (lane == 0) tma_store_wait();
}

// ---------------------------------------------------------------------------------------------------------------------

template <typename T, bool kCausal>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_head_wgmma_kernel(const __grid_constant__ HeadBackward<T> p) {
  extern __shared__ uint8_t shared_bytes[];
  const uint32_t start = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes));
  const Shared shared{(start + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();

  // The warpgroups' registers per thread, 32, 192, 192 and 96, add up to 512 = 65536 / 128.
  const int role = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (role == 0) {
    dealloc_registers<32>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp > 0 && warp <= kHelpers) compute_statistics(p, shared, warp - 1);
    if (threadIdx.x == 0) load_tiles<T, kCausal>(p, shared);
  } else if (role == 3) {
    dealloc_registers<96>();
    sum_dquery<T, kCausal>(p, shared);
  } else {
    alloc_registers<192>();
    sum_dkey_and_dvalue<T, kCausal>(p, shared, role - 1);
  }
}

#else

template <typename T, bool kCausal>
__global__ void __launch_bounds__(kStubThreads)
    attention_backward_head_wgmma_kernel(const __grid_constant__ HeadBackward<T> p) {}

#endif

int64_t blocks_of_queries(const AttentionSizes& s) {
  return ceil_div(s.queries, kBlock);
}

unsigned grid(const AttentionSizes& s) {
  return static_cast<unsigned>(min(s.batches * s.heads, int64_t{multiprocessors()}));
}

template <typename T, bool kCausal>
Status launch(const AttentionBackward<T>& p, Stream stream) {
  constexpr auto kKernel = attention_backward_head_wgmma_kernel<T, kCausal>;
  const AttentionSizes& s = p.sizes;
  const HeadBackward<T> arguments = {
      .query = panel_map(p.query, s, s.heads, s.queries, kBlock),
      .dout = panel_map(p.dout, s, s.heads, s.queries, kBlock),
      .key = panel_map(p.key, s, s.heads, s.keys, kRows),
      .value = panel_map(p.value, s, s.heads, s.keys, kRows),
      .helper_out = panel_map(p.out, s, s.heads, s.queries, kHelperRows),
      .helper_dout = panel_map(p.dout, s, s.heads, s.queries, kHelperRows),
      .dquery = panel_map(p.dquery, s, s.heads, s.queries, kBlock),
      .dkey = panel_map(p.dkey, s, s.heads, s.keys, 16),
      .dvalue = panel_map(p.dvalue, s, s.heads, s.keys, 16),
      .logsumexp = p.logsumexp,
      .dlogsumexp = p.dlogsumexp,
      .sums = static_cast<float*>(p.workspace),
      .problem = backward_problem(p),
      .blocks = static_cast<int>(blocks_of_queries(s)),
      .tiles = static_cast<int>(ceil_div(s.keys, kRows)),
  };
  if (max_dynamic_shared_memory<kKernel>() < kSharedBytes) return cudaErrorInvalidConfiguration;
  kKernel<<<grid(s), kThreads, kSharedBytes, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace

template <typename T>
bool attention_backward_sm90_head_supports(const AttentionBackward<T>& p) {
  // A head occupies an SM, so some SMs are idle in the last round. If SMs are busy for less than the fraction kBusy of
  // the time (kBusyWithShort for at most kShort queries), backward.cu's smaller units of work are faster
  // (docs/notes/attention.md).
  constexpr int64_t kShort = 512;
  constexpr double kBusy = 0.8, kBusyWithShort = 0.7;
  const AttentionSizes& s = p.sizes;
  const int64_t heads = s.batches * s.heads, places = ceil_div(heads, multiprocessors()) * multiprocessors();
  return s.head_size <= 64 && s.queries > 0 && s.queries <= kMostQueries && s.keys > 0 && s.heads == s.key_heads &&
         !has_mask(p.mask) && p.dropout.probability == 0 && p.mask.query_offset >= 0 &&
         heads >= (s.queries <= kShort ? kBusyWithShort : kBusy) * places;
}

template <typename T>
int64_t attention_backward_sm90_head_workspace(const AttentionBackward<T>& p) {
  return grid(p.sizes) * blocks_of_queries(p.sizes) * kSums * static_cast<int64_t>(sizeof(float));
}

template <typename T>
Status attention_backward_sm90_head(const AttentionBackward<T>& p, Stream stream) {
  return p.mask.causal ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
}

#define INSTANTIATE(T)                                                                     \
  template bool attention_backward_sm90_head_supports<T>(const AttentionBackward<T>&);     \
  template int64_t attention_backward_sm90_head_workspace<T>(const AttentionBackward<T>&); \
  template Status attention_backward_sm90_head<T>(const AttentionBackward<T>&, Stream);
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
