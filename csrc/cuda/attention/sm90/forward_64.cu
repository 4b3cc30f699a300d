// Attention's forward for sm_90a and head sizes up to 64, without dropout and padding. A block has four warpgroups that
// compute, each on 64 of a tile's 256 queries, and one that loads.
//
// A warpgroup works on 64 keys at a time, without a break between tiles. It waits for q k^T of block j + 1 only, whose
// softmax then overlaps p v of block j:
//
//   tensor cores  | q k(1)  p v(0) | q k(2)  p v(1) | ...
//   softmax       |         of 1   |         of 2   | ...
//
// and while it waits, the other three warpgroups use the tensor cores and compute exponentials.
//
// The exponentials are taken relative to a reference for each row that need not be the row's maximum: one of the first
// block, as long as the sums stay small enough. So later blocks need no maximum.
#include "common.cuh"
#include "cuda/common/launch.cuh"
#include "forward_64.h"

namespace gptkernels::cuda {
namespace {

constexpr int kWarpgroups = 4;  // that compute
constexpr int kRows = 64 * kWarpgroups;
constexpr int kKeys = 64;  // of a block
constexpr int kStages = 8;
// A warpgroup skips the blocks of a new tile that its queries do not see while it still holds the stage of the tile
// before. It needs the stage after the skipped ones, and the loading warp refills a stage only when all warpgroups have
// released it: so at most kStages - 2 are skipped, and the other unseen blocks are computed, masked.
constexpr int kMostSkipped = kStages - 2;
constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
constexpr int kQueryBytes = kRows * kPanelRowBytes;
constexpr int kKeyBytes = kKeys * kPanelRowBytes;
// Shared memory: queries (2), out, keys and values (kStages), barriers, tiles (2).
constexpr int kOutAt = 2 * kQueryBytes;
constexpr int kStagesAt = kOutAt + kQueryBytes;
constexpr int kBarriersAt = kStagesAt + kStages * 2 * kKeyBytes;
constexpr int kTilesAt = kBarriersAt + (4 + 2 * kStages) * 8;
constexpr int kSharedBytes = kTilesAt + 2 * 16;

template <typename T>
struct Sm90Forward64 {
  CUtensorMap query, key, value, out;
  float* logsumexp;
  Sm90Problem<T> problem;
  TileOrder order;  // `next` is null where tiles are dealt out in turn
};

// A tile of queries: its first, its head and batch, and how many blocks of keys its queries see: at least one (where
// they see none, a masked one), 0 after the last tile.
struct alignas(16) QueryTile {
  int row;
  int head;
  int batch;
  int blocks;
};

#if GPTKERNELS_WGMMA

// Whether this is the one lane of the warp that is chosen for what one does.
__device__ inline bool elected() {
  uint32_t chosen;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(chosen));
  return chosen;
}

template <typename T, bool kCausal>
__global__ void __launch_bounds__(kThreads, 1) attention_forward_64_kernel(const __grid_constant__ Sm90Forward64<T> p) {
  constexpr int kScores = kKeys / 2, kOut = 32;  // accumulators of a thread
  constexpr int kSteps = 4;                      // of 16 channels, or keys

  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes));
  QueryTile* tiles = reinterpret_cast<QueryTile*>(shared_bytes + kTilesAt);
  const uint32_t barriers = shared + kBarriersAt;
  const auto query_full = [&](int i) { return barriers + 8 * i; };
  const auto query_empty = [&](int i) { return barriers + 8 * (2 + i); };
  const auto full = [&](int i) { return barriers + 8 * (4 + i); };
  const auto empty = [&](int i) { return barriers + 8 * (4 + kStages + i); };
  const auto key_at = [&](int i) { return shared + kStagesAt + i * 2 * kKeyBytes; };

  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(query_full(i), 1);
      barrier_init(query_empty(i), 4 * kWarpgroups);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), 4 * kWarpgroups);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  // How many blocks of keys `count` queries see, or one that is masked.
  const auto blocks_of = [&](int row, int count) {
    int end = p.problem.keys;
    if constexpr (kCausal) end = min(end, row + count + p.problem.query_offset);
    return max((end + kKeys - 1) / kKeys, 1);
  };

  if (threadIdx.x >= kWarpgroups * kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x != kWarpgroups * kWarpgroup) return;
    RingPosition<2> query;
    RingPosition<kStages> stage;
    int index = p.order.first();
    for (int round = 1;; ++round) {
      barrier_wait(query_empty(query.slot), query.phase ^ 1);
      TileOrder::Tile found;
      if (!p.order.find(index, found)) {
        tiles[query.slot].blocks = 0;
        barrier_arrive(query_full(query.slot));
        return;
      }
      const int row = found.tile * kRows;
      const int batch = found.head / p.problem.heads, head = found.head % p.problem.heads;
      const int blocks = blocks_of(row, kRows);
      tiles[query.slot] = {row, head, batch, blocks};
      mbarrier_expect(query_full(query.slot), kQueryBytes);
      tma_load(shared + query.slot * kQueryBytes, p.query, 0, row, head, batch, query_full(query.slot));
      query.advance();
      const int key_head = head / p.problem.group;
      for (int block = blocks - 1; block >= 0; --block) {
        barrier_wait(empty(stage.slot), stage.phase ^ 1);
        mbarrier_expect(full(stage.slot), 2 * kKeyBytes);
        const uint32_t to = key_at(stage.slot);
        tma_load(to, p.key, 0, block * kKeys, key_head, batch, full(stage.slot));
        tma_load(to + kKeyBytes, p.value, 0, block * kKeys, key_head, batch, full(stage.slot));
        stage.advance();
      }
      // Dealt out there and back, so that who has a long tile first has a short one next.
      const int width = static_cast<int>(gridDim.x), own = static_cast<int>(blockIdx.x);
      index = p.order.next ? p.order.take() : round * width + (round % 2 ? width - 1 - own : own);
    }
  }

  take_registers<112>();
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);  // the same in a warp, and known to be
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int own_row = warp * 16 + lane / 4;  // of the warpgroup's 64, and own_row + 8
  const float factor = p.problem.scale_log2;

  float scores[kScores], out[kOut];
  uint32_t weights[kScores / 2];
  float reference[2] = {}, sum[2] = {};
  bool needs_reference = true;  // a row of the warp has none yet, or one that is far from 0

  RingPosition<kStages> stage;  // of the scores
  RingPosition<2> query;
  int group = warpgroup;  // which 64 of the tile's queries are the warpgroup's
  int row, block;         // the first of them; the block of keys at hand
  int seen;               // so many blocks of keys are seen whole by all of them

  // Starts on a tile. The blocks that any of the tile's queries sees are loaded; the warpgroup's queries may see fewer,
  // or none where they are beyond the end.
  const auto open = [&](const QueryTile& tile) {
    row = tile.row + group * 64;
    block = max(row < p.problem.queries ? blocks_of(row, 64) - 1 : 0, tile.blocks - 1 - kMostSkipped);
    int end = p.problem.keys;
    if constexpr (kCausal) end = min(end, row + p.problem.query_offset + 1);
    seen = end / kKeys;
    for (int skipped = tile.blocks - 1 - block; skipped > 0; --skipped) {
      barrier_wait(full(stage.slot), stage.phase);
      barrier_arrive_if(elected(), empty(stage.slot));
      stage.advance();
    }
  };

  // Of descriptors only the lower words differ: the arithmetic is theirs alone.
  const auto descriptor = [](uint32_t lower) {
    return static_cast<uint64_t>(panel_descriptor(0, 0) >> 32) << 32 | lower;
  };
  const uint32_t queries_lower = static_cast<uint32_t>(panel_descriptor(shared));
  const uint32_t keys_lower = static_cast<uint32_t>(panel_descriptor(key_at(0)));

  const auto issue_scores = [&] {
    const uint32_t q = queries_lower + query.slot * (kQueryBytes >> 4) + group * (64 * kPanelRowBytes >> 4);
    const uint32_t k = keys_lower + stage.slot * (2 * kKeyBytes >> 4);
    pin_registers(scores);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      wgmma<T, false>(scores, descriptor(q + i * kStepK), descriptor(k + i * kStepK), i > 0);
    wgmma_commit();
  };

  const auto issue_out = [&](int slot, bool first) {
    const uint32_t v = keys_lower + slot * (2 * kKeyBytes >> 4) + (kKeyBytes >> 4);
    pin_registers(weights);
    pin_registers(out);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      wgmma<T, true>(out, &weights[4 * i], descriptor(v + i * kStepRows), i > 0 || !first);
    wgmma_commit();
  };

  // The scores of the block at hand once more, by mma.sync: a warp that needs them again is alone in that.
  const auto compute_scores_again = [&] {
    const uint32_t q = shared + query.slot * kQueryBytes;
    const uint32_t k = key_at(stage.slot);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t a[4];
      load_matrices(a, q + panel_offset(group * 64 + warp * 16 + lane % 16, i * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t b[4];
        load_matrices(b, k + panel_offset(j * 16 + lane / 16 * 8 + lane % 8, i * 2 + lane / 8 % 2));
        mma<T>(reinterpret_cast<float (&)[4]>(scores[8 * j]), a, b[0], b[1]);
        mma<T>(reinterpret_cast<float (&)[4]>(scores[8 * j + 4]), a, b[2], b[3]);
      }
    }
  };

  // Scores of keys that a query does not see become -inf.
  const auto mask = [&] {
    if (block < seen) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int limit = p.problem.keys;
      if constexpr (kCausal) limit = min(limit, row + own_row + 8 * r + p.problem.query_offset + 1);
      limit -= block * kKeys + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
        if (8 * i >= limit) scores[4 * i + 2 * r] = -INFINITY;
        if (8 * i + 1 >= limit) scores[4 * i + 2 * r + 1] = -INFINITY;
      }
    }
  };

  // Raises references to the maxima of these scores, if higher; what `rescale` multiplies is relative to the old. Only
  // those of rows that have none yet, or are `too_low`: no row depends on another one of its warp. Of the 8 times 8
  // columns it takes every kEvery-th 8; a query that sees any of the block's keys sees the first.
  const auto raise_references = [&]<int kEvery>(const bool (&too_low)[2], float (&rescale)[2]) {
    bool needs = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = -INFINITY, odd = -INFINITY;
#pragma unroll
      for (int i = 0; i < kScores / 4; i += kEvery) {
        even = fmaxf(even, scores[4 * i + 2 * r]);
        odd = fmaxf(odd, scores[4 * i + 2 * r + 1]);
      }
      const float largest = fmaxf(reference[r], quad_max(fmaxf(even, odd)));
      rescale[r] = 1;
      if (reference[r] == -INFINITY || too_low[r]) {
        rescale[r] = reference[r] == -INFINITY ? 0 : exp2_approximately((reference[r] - largest) * factor);
        reference[r] = largest;
      }
      needs |= reference[r] == -INFINITY || is_far(reference[r], factor);
    }
    needs_reference = __any_sync(~0u, needs);
  };

  // What exponentials are relative to.
  const auto find_base = [&](float (&base)[2]) {
    base[0] = reference[0];
    base[1] = reference[1];
    subtract_far(scores, base, factor);
  };

  // The softmax of the scores at hand. Returns whether what was summed for these rows before is to be multiplied by
  // `rescale`.
  const auto softmax = [&](bool first, float (&rescale)[2]) {
    mask();
    rescale[0] = rescale[1] = 1;
    if (first) {
      reference[0] = reference[1] = -INFINITY;
      sum[0] = sum[1] = 0;
      needs_reference = true;
    }
    bool rescales = needs_reference;
    float base[2] = {reference[0], reference[1]}, sums[2];
    if (needs_reference) {
      raise_references.template operator()<4>({false, false}, rescale);
      find_base(base);
    }
    exponentials(scores, sums, base, factor);
    // Sums and products of numbers up to this are as exact as others, and p of 16 bits holds it.
    constexpr float kLargestSum = std::is_same_v<T, bfloat16> ? 1 << 20 : 1 << 12;
    if (__any_sync(~0u, !(sums[0] < kLargestSum) || !(sums[1] < kLargestSum))) [[unlikely]] {
      const bool too_low[2] = {quad_any(!(sums[0] < kLargestSum)), quad_any(!(sums[1] < kLargestSum))};
      compute_scores_again();
      mask();
      float raised[2];
      raise_references.template operator()<1>(too_low, raised);
      find_base(base);
      exponentials(scores, sums, base, factor);
      rescale[0] *= raised[0];
      rescale[1] *= raised[1];
      rescales = true;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = sum[r] * rescale[r] + sums[r];
    return rescales;
  };

  // The logsumexp of a tile's rows, and what their sums are to be multiplied by.
  float inverse[2];
  const auto finish_rows = [&](int slot, int of_group) {
    const QueryTile of = tiles[slot];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(sum[r]);  // 0, or at least 1, or NaN
      inverse[r] = total == 0 ? 0 : reciprocal_approximately(total);
      const int at = of.row + of_group * 64 + own_row + 8 * r;
      if (lane % 4 == 0 && at < p.problem.queries)
        p.logsumexp[(static_cast<int64_t>(of.batch) * p.problem.heads + of.head) * p.problem.queries + at] =
            total == 0 ? -INFINITY : reference[r] * p.problem.scale + logf(total);
    }
  };

  // Each warp stores its 16 rows.
  const uint32_t out_shared = shared + kOutAt + (warpgroup * 64 + warp * 16) * kPanelRowBytes;
  const auto store_out = [&](int slot, int of_group) {
    const QueryTile of = tiles[slot];
    if (lane == 0) tma_store_wait_read();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t to = out_shared + panel_offset(lane % 16, i * 2 + lane / 16);
      const float* o = &out[8 * i];
      store_matrices(
          to, pack_pair<T>(o[0] * inverse[0], o[1] * inverse[0]), pack_pair<T>(o[2] * inverse[1], o[3] * inverse[1]),
          pack_pair<T>(o[4] * inverse[0], o[5] * inverse[0]), pack_pair<T>(o[6] * inverse[1], o[7] * inverse[1]));
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      tma_store(p.out, out_shared, 0, of.row + of_group * 64 + warp * 16, of.head, of.batch);
      tma_store_commit();
    }
    barrier_arrive_if(lane == 0, query_empty(slot));
  };

  barrier_wait(query_full(0), 0);
  open(tiles[0]);
  barrier_wait(full(stage.slot), stage.phase);
  issue_scores();
  wgmma_wait<0>();
  pin_registers(scores);
  float rescale[2];
  softmax(true, rescale);
  accumulators_to_a<T>(weights, scores);
  bool first = true;  // the weights are of the tile's first block
  int of_slot, of_group;

  while (true) {
    const bool last = block == 0;
    const int slot = stage.slot;
    stage.advance();
    bool more = true;
    of_slot = query.slot;
    of_group = group;
    if (last) {
      query.advance();
      barrier_wait(query_full(query.slot), query.phase);
      const QueryTile tile = tiles[query.slot];
      more = tile.blocks > 0;
      group = kWarpgroups - 1 - group;  // under the causal mask later queries see more keys: they take turns at them
      if (more) open(tile);
    } else {
      --block;
    }
    if (more) barrier_wait(full(stage.slot), stage.phase);
    issue_scores();  // after the last block of all of what happens to be there: nobody reads it
    issue_out(slot, first);
    if (last) finish_rows(of_slot, of_group);
    wgmma_wait<1>();
    pin_registers(scores);
    if (!more) break;
    const bool rescales = softmax(last, rescale);
    wgmma_wait<0>();
    pin_registers(out);
    pin_registers(weights);
    barrier_arrive_if(elected(), empty(slot));
    if (last) {
      store_out(of_slot, of_group);
    } else if (rescales) {
#pragma unroll
      for (int i = 0; i < kOut; ++i) out[i] *= rescale[i / 2 % 2];
    }
    accumulators_to_a<T>(weights, scores);
    first = last;
  }
  wgmma_wait<0>();
  pin_registers(out);
  store_out(of_slot, of_group);
  if (lane == 0) tma_store_wait();
}

#else

template <typename T, bool kCausal>
__global__ void __launch_bounds__(kStubThreads)
    attention_forward_64_kernel(const __grid_constant__ Sm90Forward64<T> p) {}

#endif

template <typename T, bool kCausal>
Status launch(const AttentionForward<T>& p, Stream stream) {
  constexpr auto kKernel = attention_forward_64_kernel<T, kCausal>;
  const AttentionSizes& s = p.sizes;
  const int64_t heads = s.batches * s.heads;
  const int64_t tiles = ceil_div(s.queries, kRows);
  Sm90Forward64<T> arguments = {
      .query = panel_map(p.query, s, s.heads, s.queries, kRows),
      .key = panel_map(p.key, s, s.key_heads, s.keys, kKeys),
      .value = panel_map(p.value, s, s.key_heads, s.keys, kKeys),
      .out = panel_map(p.out, s, s.heads, s.queries, 16),
      .logsumexp = p.logsumexp,
      .problem = sm90_problem(s, p.scale, p.mask, p.dropout),
      .order = TileOrder::of(tiles, heads, s.keys * 64 * 2 * static_cast<int64_t>(sizeof(T)), kCausal, p.workspace),
  };
  if (max_dynamic_shared_memory<kKernel>() < kSharedBytes) return cudaErrorInvalidConfiguration;
  if (tiles * heads <= 2 * multiprocessors()) {
    arguments.order.next = nullptr;  // nothing to gain from a counter, whose clearing takes 2 us
  } else {
    const Status cleared = cudaMemsetAsync(p.workspace, 0, sizeof(int), stream);
    if (cleared != cudaSuccess) return cleared;
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles * heads, multiprocessors()));
  kKernel<<<blocks, kThreads, kSharedBytes, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace

template <typename T>
Status attention_forward_sm90_64(const AttentionForward<T>& p, Stream stream) {
  return p.mask.causal ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
}

#define INSTANTIATE(T) template Status attention_forward_sm90_64<T>(const AttentionForward<T>&, Stream);
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
