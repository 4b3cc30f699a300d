// Attention's forward for sm_90a, for more than 64 channels, dropout, padded sequences, and few long tiles;
// attention/sm90/forward_64.cu has the rest. A block has one warpgroup that loads and two that compute, each on 64
// queries.
//
// A warpgroup works on key blocks one after the other, without a break between tiles. While it does the softmax of
// block j, the tensor cores do p v of block j - 1 and q k^T of block j + 1:
//
//   tensor cores  | p v(0)   q k(2) | p v(1)   q k(3) | ...
//   softmax       |       of 1      |       of 2      | ...
//
// The exponentials are taken relative to a reference for each row that need not be the row's maximum: that of the first
// block, as long as the sums stay small enough. So later blocks need no maximum.
#include "common.cuh"
#include "cuda/attention/variants.h"
#include "cuda/common/launch.cuh"
#include "forward_64.h"
#include "masks.cuh"

namespace gptkernels::cuda {
namespace {

template <int HS, bool kDropout>
struct ForwardShape {
  static constexpr int kRows = 128;                               // queries of a tile: 64 for each warpgroup
  static constexpr int kKeys = HS == 64 && !kDropout ? 128 : 64;  // of a block; drawing a mask needs registers
  static constexpr int kPanels = HS / kPanelColumns;
  static constexpr int kStages = 4;
  static constexpr bool kTurnsAtExponentials = HS == 64;
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kQueryPanel = kRows * kPanelRowBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanel;
  static constexpr int kKeyPanel = kKeys * kPanelRowBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanel;
  static constexpr int kOutPanel = 64 * kPanelRowBytes;
  // Shared memory: queries (2), keys (kStages), values (kStages), out (2 warpgroups), barriers, tiles (2), masked
  // blocks.
  static constexpr int kKeysAt = 2 * kQueryBytes;
  static constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kOutAt = kValuesAt + kStages * kKeyBytes;
  static constexpr int kBarriersAt = kOutAt + 2 * kPanels * kOutPanel;
  static constexpr int kBarriers = 4 + 4 * kStages;
  static constexpr int kTilesAt = kBarriersAt + kBarriers * 8;
  static constexpr int kMaskedAt = kTilesAt + 2 * 16;  // of the ring's buffers, under a mask
  static constexpr int kShiftedAt = kMaskedAt + kStages * static_cast<int>(sizeof(MaskedBlock));  // of tiles (2)
  static constexpr int kSharedBytes = kShiftedAt + 2 * 2 * kShiftedBytes + 1024;  // aligned to 1024 by the kernel
};

constexpr int64_t kCounterBytes = 256;  // of the workspace, before what a mask wants

template <typename T>
struct Sm90Forward {
  CUtensorMap query, key, value, out;
  float* logsumexp;
  Sm90Problem<T> problem;
  TileOrder order;
  Sm90Mask mask;
};

// A tile of queries: its first, its head of all batches, and how many key blocks its queries see: at least one (where
// they see none, a masked one), 0 after the last tile.
struct alignas(16) QueryTile {
  int row;
  int head;
  int blocks;
};

#if GPTKERNELS_WGMMA

template <typename T, int HS, bool kCausal, bool kDropout, bool kBounds, Masks kMasks>
__global__ void __launch_bounds__(ForwardShape<HS, kDropout>::kThreads, 1)
    attention_forward_wgmma_kernel(const __grid_constant__ Sm90Forward<T> p) {
  using Shape = ForwardShape<HS, kDropout>;
  constexpr int kStages = Shape::kStages, kKeys = Shape::kKeys, kPanels = Shape::kPanels;
  constexpr int kScores = kKeys / 2, kOut = HS / 2;  // accumulators of a thread
  constexpr bool kMasked = kMasks != Masks::kNone;
  constexpr int kUnits = kKeys / kMaskBlock;

  extern __shared__ uint8_t shared_bytes[];
  const uint32_t shared = (static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes)) + 1023) / 1024 * 1024;
  QueryTile* tiles = reinterpret_cast<QueryTile*>(
      shared_bytes + (shared - static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes))) + Shape::kTilesAt);
  MaskedBlock* masked = reinterpret_cast<MaskedBlock*>(reinterpret_cast<uint8_t*>(tiles) + Shape::kMaskedAt -
                                                       Shape::kTilesAt);  // kMasked: beside the ring's buffers
  // Additive masks of bfloat16: rows that have a shift are uniform, and there is a loop for masks without added blocks.
  // (float16's lowest values make most blocks added ones, for which one loop alone was faster.)
  constexpr bool kUniform = has_uniform_rows<T>(kMasks);
  // kUniform: which rows of either half of a tile have a shift.
  const auto shifted_at = [&](int slot, int half) {
    return shared + Shape::kShiftedAt + (2 * slot + half) * kShiftedBytes;
  };
  const uint32_t barriers = shared + Shape::kBarriersAt;
  const auto query_full = [&](int i) { return barriers + 8 * i; };
  const auto query_empty = [&](int i) { return barriers + 8 * (2 + i); };
  const auto key_full = [&](int i) { return barriers + 8 * (4 + i); };
  const auto key_empty = [&](int i) { return barriers + 8 * (4 + kStages + i); };
  const auto value_full = [&](int i) { return barriers + 8 * (4 + 2 * kStages + i); };
  const auto value_empty = [&](int i) { return barriers + 8 * (4 + 3 * kStages + i); };

  constexpr int kConsumerWarps = 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(query_full(i), 1);
      barrier_init(query_empty(i), kConsumerWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(key_full(i), 1);
      barrier_init(key_empty(i), kConsumerWarps);
      barrier_init(value_full(i), 1);
      barrier_init(value_empty(i), kConsumerWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x != 0) return;
    RingPosition<2> query;
    RingPosition<kStages> key;
    const auto load = [&](const CUtensorMap& map, uint32_t to, uint32_t full, int block, int head, int batch) {
      mbarrier_expect(full, Shape::kKeyBytes);
      for (int i = 0; i < kPanels; ++i)
        tma_load(to + i * Shape::kKeyPanel, map, i * kPanelColumns, block * kKeys, head, batch, full);
    };
    for (int index = p.order.first();; index = p.order.take()) {
      barrier_wait(query_empty(query.slot), query.phase ^ 1);
      TileOrder::Tile found;
      if (!p.order.find(index, found)) {
        if constexpr (kBounds) tiles[query.slot].head = 0;  // whose range is looked up, for nobody
        tiles[query.slot].blocks = 0;
        barrier_arrive(query_full(query.slot));
        return;
      }
      const int row = found.tile * Shape::kRows;
      const int batch = found.head / p.problem.heads, head = found.head % p.problem.heads;
      int first_block = 0, end = p.problem.keys;
      if constexpr (kBounds) {
        const KeyRange range = KeyRange::of(p.problem, batch);
        first_block = range.begin / kKeys;
        end = range.end;
      }
      if constexpr (kCausal) end = min(end, row + Shape::kRows + p.problem.query_offset);
      int blocks = max((end + kKeys - 1) / kKeys - first_block, 1);
      SeenBlocks seen;
      int mask_head = 0;
      if constexpr (kMasked) {
        mask_head = p.mask.blocks.mask_head(batch, head);
        seen = p.mask.blocks.of_queries(mask_head, row / kMaskBlock);
        blocks = max(seen.count<kUnits>(), 1);
      }
      tiles[query.slot] = {row, found.head, blocks};
      const int key_head = head / p.problem.group;
      mbarrier_expect(query_full(query.slot), Shape::kQueryBytes + (kUniform ? 2 * kShiftedBytes : 0));
      if constexpr (kUniform)
        for (int half = 0; half < 2; ++half)
          bulk_load(shifted_at(query.slot, half), p.mask.blocks.shifted_rows(mask_head, row / kMaskBlock + half),
                    kShiftedBytes, query_full(query.slot));
      for (int i = 0; i < kPanels; ++i)
        tma_load(shared + query.slot * Shape::kQueryBytes + i * Shape::kQueryPanel, p.query, i * kPanelColumns, row,
                 head, batch, query_full(query.slot));
      query.advance();
      const auto load_block = [&](int block) {
        barrier_wait(key_empty(key.slot), key.phase ^ 1);
        if constexpr (kMasked) masked[key.slot] = {block * kKeys, seen.classes<kUnits>(block * kUnits), mask_head, 0};
        load(p.key, shared + Shape::kKeysAt + key.slot * Shape::kKeyBytes, key_full(key.slot), first_block + block,
             key_head, batch);
        barrier_wait(value_empty(key.slot), key.phase ^ 1);
        load(p.value, shared + Shape::kValuesAt + key.slot * Shape::kKeyBytes, value_full(key.slot),
             first_block + block, key_head, batch);
        key.advance();
      };
      if constexpr (kMasked) {
        seen.for_each_from_last<kUnits>([&](int unit) { load_block(unit / kUnits); });
        if (seen.count<kUnits>() == 0) load_block(0);
      } else {
        for (int block = blocks - 1; block >= 0; --block) load_block(block);
      }
    }
  }

  take_registers<240>();
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);  // the same in a warp, and known to be
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int own_row = warpgroup * 64 + warp * 16 + lane / 4;  // in a tile, and own_row + 8
  const float factor = p.problem.scale_log2;
  const DropoutDraw dropout(kDropout ? p.problem.dropout : DropoutArguments{});
  const uint32_t out_shared = shared + Shape::kOutAt + warpgroup * kPanels * Shape::kOutPanel;

  float scores_a[kScores], scores_b[kScores], out[kOut];
  uint32_t weights[kScores / 2];
  float reference[2] = {}, sum[2] = {};
  bool needs_reference = true;  // a row of the warp has none yet, or one that is far from 0

  RingPosition<kStages> key, value;  // of the q k^T and p v under way
  RingPosition<2> query;

  barrier_wait(query_full(0), 0);
  QueryTile tile = tiles[0], next_tile;
  if (tile.blocks == 0) return;
  int block = tile.blocks - 1;
  int previous_row = 0, previous_head = 0;  // of the tile before
  bool any_previous = false;                // block
  KeyRange range = {};                      // kBounds: of the tile's sequence
  const auto find_range = [&] {
    if constexpr (kBounds) range = KeyRange::of(p.problem, tile.head / p.problem.heads);
  };
  find_range();
  OwnBlock<kUnits> own = {}, next_own = {};  // kMasked: of the block at hand, and of the one ahead
  const auto find_own = [&](const QueryTile& of) {
    const MaskedBlock found = masked[key.slot];
    next_own = OwnBlock<kUnits>::of(found, warpgroup, [&](int unit, int r) {
      return p.mask.blocks.query_bits(found.mask_head, of.row / kMaskBlock + warpgroup, found.first / kMaskBlock + unit,
                                      warp * 16 + lane / 4 + 8 * r, lane % 4);
    });
  };
  // kUniform: whether a row of the warpgroup's has a shift, in the tile at hand, the one ahead and the one before.
  bool shifts = false, next_shifts = false, previous_shifts = false;
  // The queries of a tile that has come; then its scores may be computed.
  const auto clear_queries = [&] {
    if constexpr (kUniform) {
      const uint64_t uniform = load_shifted(shifted_at(query.slot, warpgroup));
      next_shifts = uniform != 0;
      clear_uniform<kPanels>(shared + query.slot * Shape::kQueryBytes + warpgroup * 64 * kPanelRowBytes,
                             Shape::kQueryPanel, uniform, 1 + warpgroup);
    }
  };
  const auto first_key_of = [&](int of) {
    return kMasked ? own.first : (kBounds ? range.begin / kKeys + of : of) * kKeys;
  };

  const auto issue_scores = [&](float (&scores)[kScores]) {
    const uint64_t q = panel_descriptor(shared + query.slot * Shape::kQueryBytes + warpgroup * 64 * kPanelRowBytes);
    const uint64_t k = panel_descriptor(shared + Shape::kKeysAt + key.slot * Shape::kKeyBytes);
    pin_registers(scores);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < HS / 16; ++i)
      wgmma<T, false>(scores, q + (i / 4 * Shape::kQueryPanel / 16 + i % 4 * kStepK),
                      k + (i / 4 * Shape::kKeyPanel / 16 + i % 4 * kStepK), i > 0);
    wgmma_commit();
  };

  // The scores of the block at hand once more, by mma.sync: a warp that needs them again is alone in that.
  const auto compute_scores_again = [&](float (&scores)[kScores]) {
    const uint32_t q = shared + query.slot * Shape::kQueryBytes;
    const uint32_t k = shared + Shape::kKeysAt + key.slot * Shape::kKeyBytes;
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = 0;
#pragma unroll
    for (int i = 0; i < HS / 16; ++i) {
      uint32_t a[4];
      load_matrices(a, q + i / 4 * Shape::kQueryPanel +
                           panel_offset(warpgroup * 64 + warp * 16 + lane % 16, i % 4 * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t b[4];
        load_matrices(b, k + i / 4 * Shape::kKeyPanel +
                             panel_offset(j * 16 + lane / 16 * 8 + lane % 8, i % 4 * 2 + lane / 8 % 2));
        mma<T>(reinterpret_cast<float (&)[4]>(scores[8 * j]), a, b[0], b[1]);
        mma<T>(reinterpret_cast<float (&)[4]>(scores[8 * j + 4]), a, b[2], b[3]);
      }
    }
  };

  // Scores of keys that a query does not see become -inf.
  const auto mask = [&](float (&scores)[kScores], bool adds) {
    if constexpr (kMasked) {
      if (own.seen()) return;
      if (kMasks == Masks::kAdditive && adds && own.adds())
        add_values(scores, p.problem, p.mask, tile.head / p.problem.heads, tile.head % p.problem.heads,
                   tile.row + own_row, own.first);
      hide(scores, own.bits);
      return;
    }
    const int first_key = first_key_of(block);
    int end = kBounds ? range.end : p.problem.keys;  // of the keys that all of the warpgroup's queries see
    if constexpr (kCausal) end = min(end, tile.row + warpgroup * 64 + p.problem.query_offset + 1);
    if (first_key + kKeys <= end && (!kBounds || first_key >= range.begin)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int limit = kBounds ? range.end : p.problem.keys;
      if constexpr (kCausal) limit = min(limit, tile.row + own_row + 8 * r + p.problem.query_offset + 1);
      limit -= first_key + 2 * (lane % 4);
      const int begin = kBounds ? range.begin - first_key - 2 * (lane % 4) : 0;
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
        if (8 * i >= limit || (kBounds && 8 * i < begin)) scores[4 * i + 2 * r] = -INFINITY;
        if (8 * i + 1 >= limit || (kBounds && 8 * i + 1 < begin)) scores[4 * i + 2 * r + 1] = -INFINITY;
      }
    }
  };

  // Raises references to the maxima of these scores, if higher; what `rescale` multiplies is relative to the old. Only
  // those of rows that have none yet, or are `too_low`: no row depends on another one of its warp.
  const auto raise_references = [&](const float (&scores)[kScores], const bool (&too_low)[2], float (&rescale)[2]) {
    bool needs = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = -INFINITY, odd = -INFINITY;
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
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
  const auto find_base = [&](float (&scores)[kScores], float (&base)[2]) {
    base[0] = reference[0];
    base[1] = reference[1];
    subtract_far(scores, base, factor);
  };

  // The logsumexp of a row of the tile before, whose scores may have been taken without its shift.
  const auto shifted = [&](float logsumexp, int row) {
    if constexpr (kMasks != Masks::kAdditive) return logsumexp;
    if (kUniform && !previous_shifts) return logsumexp;
    const int mask_head = p.mask.blocks.mask_head(previous_head / p.problem.heads, previous_head % p.problem.heads);
    return logsumexp + p.mask.blocks.row(mask_head, row).shift;
  };
  const auto store_out = [&](const float (&tile_reference)[2], const float (&tile_sum)[2]) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(tile_sum[r]);
      inverse[r] = total > 0 ? 1 / total : total == 0 ? 0 : NAN;
      if constexpr (kDropout) inverse[r] /= keep_probability(p.problem);
      const int row = previous_row + own_row + 8 * r;
      if (lane % 4 == 0 && row < p.problem.queries)
        p.logsumexp[static_cast<int64_t>(previous_head) * p.problem.queries + row] =
            total == 0 ? -INFINITY : shifted(tile_reference[r] * p.problem.scale + logf(total), row);
    }
    if (thread == 0) tma_store_wait_read();
    warpgroup_barrier(1 + warpgroup);
#pragma unroll
    for (int i = 0; i < HS / 16; ++i) {
      const int row = warp * 16 + lane % 16;
      const uint32_t to = out_shared + i / 4 * Shape::kOutPanel + panel_offset(row, i % 4 * 2 + lane / 16);
      const float* o = &out[8 * i];
      store_matrices(
          to, pack_pair<T>(o[0] * inverse[0], o[1] * inverse[0]), pack_pair<T>(o[2] * inverse[1], o[3] * inverse[1]),
          pack_pair<T>(o[4] * inverse[0], o[5] * inverse[0]), pack_pair<T>(o[6] * inverse[1], o[7] * inverse[1]));
    }
    fence_async_shared();
    warpgroup_barrier(1 + warpgroup);
    if (thread == 0) {
      for (int i = 0; i < kPanels; ++i)
        tma_store(p.out, out_shared + i * Shape::kOutPanel, i * kPanelColumns, previous_row + warpgroup * 64,
                  previous_head % p.problem.heads, previous_head / p.problem.heads);
      tma_store_commit();
    }
  };

  // After their sums are taken: dropped weights become 0.
  const auto drop = [&](float (&scores)[kScores]) {
    if (kCausal && first_key_of(block) > tile.row + warpgroup * 64 + 63 + p.problem.query_offset)
      return;  // none is seen
    float last = 0;
    for_kept<kScores>(dropout, tile.head, tile.row + warpgroup * 64 + warp * 16, first_key_of(block),
                      [&](int i, bool keep, bool keep_next) {
                        if (!keep) scores[i] = 0;
                        if (!keep_next) scores[i + 1] = 0;
                        last = fmaxf(last, scores[i + 1]);
                      });
    complete(last);
  };

  // The warpgroups take turns, so that one's other work fills the time of the other's: at the exponentials, or where
  // these are half as many for as many products, at starting products (one with A in registers holds up its warps until
  // it runs).
  const auto wait_for_turn = [&] {
    random_delay();
    asm volatile("bar.sync %0, 256;" ::"r"(3 + warpgroup) : "memory");
  };
  const auto turn_to_other = [&] {
    random_delay();
    asm volatile("bar.arrive %0, 256;" ::"r"(4 - warpgroup) : "memory");
  };
  if (warpgroup == 1) turn_to_other();  // warpgroup 0 is first

  // The softmax of `current`, whose product is done; p v is under way when this returns. `adds`: blocks may have values
  // to add. (The compiler follows wgmmas across a loop only where nothing is read that was not waited for with all that
  // was started before it.)
  const auto step = [&](float (&current)[kScores], float (&next)[kScores], bool adds) __attribute__((always_inline)) {
    const bool first = block == tile.blocks - 1, last = block == 0;
    const RingPosition<kStages> key_now = key;
    const RingPosition<2> query_now = query;
    key.advance();
    bool more = true;
    if (last) {
      query.advance();
      barrier_wait(query_full(query.slot), query.phase);
      next_tile = tiles[query.slot];
      more = next_tile.blocks > 0;
      if (more) clear_queries();
    }
    if (more) barrier_wait(key_full(key.slot), key.phase);
    issue_scores(next);  // after the last block of all of what happens to be there: nobody reads it
    if constexpr (kMasked)
      if (more) find_own(last ? next_tile : tile);
    if (!Shape::kTurnsAtExponentials && any_previous) turn_to_other();

    mask(current, adds);
    const float old_reference[2] = {reference[0], reference[1]}, old_sum[2] = {sum[0], sum[1]};
    float rescale[2] = {1, 1}, sums[2];
    if (first) {
      reference[0] = reference[1] = -INFINITY;
      sum[0] = sum[1] = 0;
      needs_reference = true;
    }
    bool rescales = needs_reference;
    float base[2] = {reference[0], reference[1]};
    if (needs_reference) {
      raise_references(current, {false, false}, rescale);
      find_base(current, base);
    }
    if (Shape::kTurnsAtExponentials) wait_for_turn();
    exponentials(current, sums, base, factor);
    complete(sums[0]);
    complete(sums[1]);
    if (Shape::kTurnsAtExponentials && (more || warpgroup == 0)) turn_to_other();
    // Sums and products of numbers up to this are as exact as others, and p of 16 bits holds it.
    constexpr float kLargestSum = std::is_same_v<T, bfloat16> ? 1 << 20 : 1 << 12;
    if (__any_sync(~0u, !(sums[0] < kLargestSum) || !(sums[1] < kLargestSum))) {
      const RingPosition<kStages> key_ahead = key;
      const RingPosition<2> query_ahead = query;
      key = key_now;
      query = query_now;
      const bool too_low[2] = {quad_any(!(sums[0] < kLargestSum)), quad_any(!(sums[1] < kLargestSum))};
      compute_scores_again(current);
      mask(current, adds);
      float raised[2];
      raise_references(current, too_low, raised);
      find_base(current, base);
      exponentials(current, sums, base, factor);
      rescale[0] *= raised[0];
      rescale[1] *= raised[1];
      rescales = true;
      key = key_ahead;
      query = query_ahead;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = sum[r] * rescale[r] + sums[r];
    barrier_arrive_if(lane == 0, key_empty(key_now.slot));
    barrier_arrive_if(lane == 0 && last, query_empty(query_now.slot));

    if constexpr (kDropout) drop(current);

    RingPosition<kStages> next_value = value;
    if (any_previous) next_value.advance();
    barrier_wait(value_full(next_value.slot), next_value.phase);
    wgmma_wait<0>();  // p v of the block before, q k^T of the block ahead
    pin_registers(next);
    pin_registers(out);
    pin_registers(weights);
    barrier_arrive_if(any_previous && lane == 0, value_empty(value.slot));
    value = next_value;
    if (first) {
      if (any_previous) store_out(old_reference, old_sum);
    } else if (rescales) {
#pragma unroll
      for (int i = 0; i < kOut; ++i) out[i] *= rescale[i / 2 % 2];
    }
    accumulators_to_a<T>(weights, current);

    if constexpr (kBounds)
      if (!range.has_all(first_key_of(block), kKeys))
        clear_padding<kKeys, kPanels>(shared + Shape::kValuesAt + value.slot * Shape::kKeyBytes, range,
                                      first_key_of(block), 1 + warpgroup);
    if (!Shape::kTurnsAtExponentials) wait_for_turn();
    const uint64_t v = panel_descriptor(shared + Shape::kValuesAt + value.slot * Shape::kKeyBytes, Shape::kKeyPanel);
    pin_registers(weights);
    pin_registers(out);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) wgmma<T, true>(out, &weights[4 * i], v + i * kStepRows, i > 0 || !first);
    wgmma_commit();
    any_previous = true;
    if constexpr (kMasked) own = next_own;
    --block;
    if (last) {
      previous_row = tile.row;
      previous_head = tile.head;
      previous_shifts = shifts;
      shifts = next_shifts;
      tile = next_tile;
      find_range();
      block = tile.blocks - 1;
    }
    return more;
  };

  barrier_wait(key_full(0), 0);
  if constexpr (kMasked) {
    find_own(tile);
    own = next_own;
    clear_queries();
    shifts = next_shifts;
  }
  issue_scores(scores_a);
  wgmma_wait<0>();
  pin_registers(scores_a);
  // Reading values takes registers, for want of which the other blocks are slower too.
  if (!kUniform || *p.mask.blocks.has_added) {
    while (true) {
      if (!step(scores_a, scores_b, true)) break;
      if (!step(scores_b, scores_a, true)) break;
    }
  } else {
    while (true) {
      if (!step(scores_a, scores_b, false)) break;
      if (!step(scores_b, scores_a, false)) break;
    }
  }
  if (!Shape::kTurnsAtExponentials && warpgroup == 0) turn_to_other();
  wgmma_wait<0>();
  pin_registers(out);
  store_out(reference, sum);
  if (thread == 0) tma_store_wait();
}

#else

template <typename T, int HS, bool kCausal, bool kDropout, bool kBounds, Masks kMasks>
__global__ void __launch_bounds__(kStubThreads)
    attention_forward_wgmma_kernel(const __grid_constant__ Sm90Forward<T> p) {}

#endif

template <typename T, int HS, bool kCausal, bool kDropout, bool kBounds, Masks kMasks = Masks::kNone>
Status launch(const AttentionForward<T>& p, Stream stream) {
  using Shape = ForwardShape<HS, kDropout>;
  constexpr auto kKernel = attention_forward_wgmma_kernel<T, HS, kCausal, kDropout, kBounds, kMasks>;
  constexpr bool kMasked = kMasks != Masks::kNone;
  const AttentionSizes& s = p.sizes;
  const int64_t heads = s.batches * s.heads;
  const int64_t tiles = ceil_div(s.queries, Shape::kRows);
  const Sm90Forward<T> arguments = {
      .query = panel_map(p.query, s, s.heads, s.queries, Shape::kRows),
      .key = panel_map(p.key, s, s.key_heads, s.keys, Shape::kKeys),
      .value = panel_map(p.value, s, s.key_heads, s.keys, Shape::kKeys),
      .out = panel_map(p.out, s, s.heads, s.queries, 64),
      .logsumexp = p.logsumexp,
      .problem = sm90_problem(s, p.scale, p.mask, p.dropout),
      .order = TileOrder::of(tiles, heads, s.keys * HS * 2 * static_cast<int64_t>(sizeof(T)), kCausal || kMasked,
                             p.workspace),
      .mask = kMasked ? Sm90Mask::of(p.mask, s, p.scale, false, static_cast<char*>(p.workspace) + kCounterBytes)
                      : Sm90Mask{},
  };
  if (max_dynamic_shared_memory<kKernel>() < Shape::kSharedBytes) return cudaErrorInvalidConfiguration;
  const Status cleared = cudaMemsetAsync(p.workspace, 0, sizeof(int), stream);
  if (cleared != cudaSuccess) return cleared;
  if constexpr (kMasked) {
    const Status found = find_mask_blocks(arguments.mask.blocks, p.mask, s, stream);
    if (found != cudaSuccess) return found;
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles * heads, multiprocessors()));
  kKernel<<<blocks, Shape::kThreads, Shape::kSharedBytes, stream>>>(arguments);
  return cudaGetLastError();
}

// Whether attention/sm90/forward_64.cu, whose tiles have 256 queries, is faster. Where tiles are long and fewer than
// multiprocessors, twice as many of half the size are done sooner (docs/notes/attention.md has the figures).
bool enough_tiles(const AttentionSizes& s, bool causal) {
  constexpr int64_t kLong = 1024;
  const int64_t tiles = ceil_div(s.queries, 256) * s.batches * s.heads;
  return s.keys < kLong || (causal ? 1 : 2) * tiles > multiprocessors();
}

}  // namespace

template <typename T>
bool attention_forward_sm90_serves(const AttentionForward<T>& p) {
  // An additive mask is the backward's too, which has no dropout for more than 64 channels.
  const bool narrow = has_bounds(p.mask) || (p.mask.bias && p.dropout.probability > 0);
  return p.sizes.head_size <= (narrow ? 64 : 128) && serves_mask<T>(p) &&
         sm90_serves<T, attention_forward_wgmma_kernel<T, 128, true, false, false, Masks::kNone>>(p);
}

template <typename T>
int64_t attention_forward_sm90_workspace(const AttentionForward<T>& p) {
  return kCounterBytes + mask_workspace(p.mask, p.sizes, false);
}

template <typename T>
Status attention_forward_sm90(const AttentionForward<T>& p, Stream stream) {
  const bool dropout = p.dropout.probability > 0;
  const auto masked = [&]<int HS, Masks kMasks>() {
    if (!dropout) return launch<T, HS, false, false, false, kMasks>(p, stream);
    if constexpr (HS == 64 || kMasks == Masks::kBool) return launch<T, HS, false, true, false, kMasks>(p, stream);
    return cudaErrorNotSupported;  // attention_forward_sm90_serves() excludes it
  };
  const auto with = [&]<int HS, bool kCausal>() {
    if constexpr (!kCausal)
      if (has_mask(p.mask))
        return p.mask.allowed ? masked.template operator()<HS, Masks::kBool>()
                              : masked.template operator()<HS, Masks::kAdditive>();
    if constexpr (HS == 64) {
      if (has_bounds(p.mask))
        return dropout ? launch<T, HS, kCausal, true, true>(p, stream) : launch<T, HS, kCausal, false, true>(p, stream);
      if (!dropout && enough_tiles(p.sizes, kCausal)) return attention_forward_sm90_64(p, stream);
      return dropout ? launch<T, HS, kCausal, true, false>(p, stream) : launch<T, HS, kCausal, false, false>(p, stream);
    } else {
      return dropout ? launch<T, HS, kCausal, true, false>(p, stream) : launch<T, HS, kCausal, false, false>(p, stream);
    }
  };
  const bool causal = p.mask.causal && !has_mask(p.mask);  // what a mask's blocks have in them
  if (p.sizes.head_size <= 64)
    return causal ? with.template operator()<64, true>() : with.template operator()<64, false>();
  return causal ? with.template operator()<128, true>() : with.template operator()<128, false>();
}

#define INSTANTIATE(T)                                                              \
  template bool attention_forward_sm90_serves<T>(const AttentionForward<T>&);       \
  template int64_t attention_forward_sm90_workspace<T>(const AttentionForward<T>&); \
  template Status attention_forward_sm90<T>(const AttentionForward<T>&, Stream);
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
