// Attention's forward for sm_90a. One thread loads tiles by TMA; two or four warpgroups each compute 64 queries of a
// query tile. (' is the transpose, factor is scale * log2(e), and softmax.cuh defines the reference.)
//
//   for each query tile (under the causal mask, the longest first):
//     loader:      load q
//     warpgroup:   O = 0, sum = 0
//     for each key tile j that the queries see, from the last to the first:
//       loader:    wait until stage j of the ring is empty; load k(j) and v(j) into it
//       warpgroup: wait until stage j is full
//                  S(j) = q k(j)'; masked scores are set to -inf
//                  P(j) = exp2(S(j) * factor - reference * factor)
//                  sum += P(j);  O += P(j) v(j); release stage j
//     warpgroup:   store O / sum and the logsumexp
//
// The MMAs are asynchronous and pipelined. Below, j and j+1 are consecutive iterations; if j is the last one of a query
// tile, j+1 is the first one of the next query tile.
//
//   four warpgroups, one buffer of scores      two warpgroups, two buffers of scores
//     start S(j+1)                               start S(j+1)
//     start O += P(j) v(j)                       compute P(j), while S(j+1) and O += P(j-1) v(j-1) run
//     wait for S(j+1) only                       wait for S(j+1) and O
//     compute P(j+1), while O += P(j) v(j) runs  start O += P(j) v(j)
//     wait for O
//
// Four warpgroups are faster if there are enough query tiles (enough_tiles()), but leave only 112 registers per thread,
// which are too few for 128 channels, dropout or an attn_mask. Two warpgroups have 240 registers per thread.
#include <cstddef>

#include "cuda/attention/variants.h"
#include "cuda/common/launch.cuh"
#include "forward_mask.cuh"
#include "loader.cuh"
#include "softmax.cuh"

namespace gptkernels::cuda {
namespace {

template <int HS, int kWarpgroups_, int kKeys_, int kStages_>
struct ForwardTile {
  static constexpr int kWarpgroups = kWarpgroups_, kKeys = kKeys_, kStages = kStages_;
  static constexpr bool kOneBuffer = kWarpgroups == 4;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kPanels = HS / kPanelColumns;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  static constexpr int kQueryPanel = kRows * kPanelRowBytes, kQueryBytes = kPanels * kQueryPanel;
  static constexpr int kKeyPanel = kKeys * kPanelRowBytes, kKeyBytes = kPanels * kKeyPanel;
  static constexpr int kStoredRows = kOneBuffer ? 16 : 64;  // rows of out per TMA store
};

using FourWarpgroups = ForwardTile<64, 4, 64, 8>;
// With dropout, 128 keys do not fit in registers together with the random numbers.
template <int HS, bool kDropout>
using TwoWarpgroups = ForwardTile<HS, 2, HS == 64 && !kDropout ? 128 : 64, 4>;

constexpr int64_t kCounterBytes = 256;  // for TileOrder's counter

template <typename T>
struct Sm90Forward {
  CUtensorMap query, key, value, out;
  float* logsumexp;
  Sm90Problem<T> problem;
  TileOrder order;
  Sm90Mask mask;
};

struct alignas(16) QueryTile {
  Queries queries;
  int key_tiles;  // 0: no more query tiles
};

template <typename Tile>
struct Shared {
  struct Stage {
    uint8_t key[Tile::kKeyBytes], value[Tile::kKeyBytes];
  };
  struct Layout {
    uint8_t query[2][Tile::kQueryBytes];
    uint8_t out[Tile::kQueryBytes];
    Stage stage[Tile::kStages];
    uint64_t query_full[2], query_empty[2];
    uint64_t key_full[Tile::kStages], key_empty[Tile::kStages];      // if kOneBuffer, also for values
    uint64_t value_full[Tile::kStages], value_empty[Tile::kStages];  // unused if kOneBuffer
    QueryTile tile[2];
    MaskedBlock block[Tile::kStages];  // only for BlockMask
  };

#if GPTKERNELS_WGMMA
  Layout* layout;
  uint32_t first;

  __device__ explicit Shared(uint8_t* bytes)
      : layout(reinterpret_cast<Layout*>(bytes)), first(static_cast<uint32_t>(__cvta_generic_to_shared(bytes))) {}

  __device__ uint32_t at(size_t offset, int i, int bytes) const {
    return first + static_cast<uint32_t>(offset) + i * bytes;
  }
  __device__ uint32_t query(int i) const { return at(offsetof(Layout, query), i, Tile::kQueryBytes); }
  __device__ uint32_t out() const { return at(offsetof(Layout, out), 0, 0); }
  __device__ uint32_t key(int i) const { return at(offsetof(Layout, stage), i, 2 * Tile::kKeyBytes); }
  __device__ uint32_t value(int i) const { return key(i) + Tile::kKeyBytes; }
  __device__ uint32_t query_full(int i) const { return at(offsetof(Layout, query_full), i, 8); }
  __device__ uint32_t query_empty(int i) const { return at(offsetof(Layout, query_empty), i, 8); }
  __device__ uint32_t key_full(int i) const { return at(offsetof(Layout, key_full), i, 8); }
  __device__ uint32_t key_empty(int i) const { return at(offsetof(Layout, key_empty), i, 8); }
  __device__ uint32_t value_full(int i) const { return at(offsetof(Layout, value_full), i, 8); }
  __device__ uint32_t value_empty(int i) const { return at(offsetof(Layout, value_empty), i, 8); }
  __device__ QueryTile& tile(int i) const { return layout->tile[i]; }
  __device__ MaskedBlock& block(int i) const { return layout->block[i]; }

  __device__ void init_barriers() const {
    constexpr int kComputingWarps = 4 * Tile::kWarpgroups;
    for (int i = 0; i < 2; ++i) {
      barrier_init(query_full(i), 1);
      barrier_init(query_empty(i), kComputingWarps);
    }
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(key_full(i), 1);
      barrier_init(key_empty(i), kComputingWarps);
      if (Tile::kOneBuffer) continue;
      barrier_init(value_full(i), 1);
      barrier_init(value_empty(i), kComputingWarps);
    }
    mbarrier_init_fence();
  }
#endif
};

#if GPTKERNELS_WGMMA

// ---- the loader -----------------------------------------------------------------------------------------------------

template <typename T, typename Tile, typename Mask>
__device__ void load_tiles(const Sm90Forward<T>& p, const Shared<Tile>& shared) {
  RingPosition<2> query;
  RingPosition<Tile::kStages> stage;
  int index = p.order.first();
  for (int round = 1;; ++round) {
    const uint32_t query_full = shared.query_full(query.slot);
    barrier_wait(shared.query_empty(query.slot), query.phase ^ 1);
    TileOrder::Tile found;
    if (!p.order.find(index, found)) {
      shared.tile(query.slot).key_tiles = 0;
      barrier_arrive(query_full);
      return;
    }
    const Queries queries = {found.tile * Tile::kRows, found.head % p.problem.heads, found.head / p.problem.heads};
    const typename Mask::template KeyTiles<Tile::kKeys> key_tiles(p.problem, p.mask, queries, Tile::kRows);
    shared.tile(query.slot) = {queries, key_tiles.count};
    mbarrier_expect(query_full, Tile::kQueryBytes);
    load_panels<Tile::kPanels>(shared.query(query.slot), Tile::kQueryPanel, p.query, queries.first, queries.head,
                               queries.batch, query_full);
    query.advance();
    const int key_head = queries.head / p.problem.group;
    key_tiles.for_each_from_last([&](int tile) {
      const auto load = [&](const CUtensorMap& map, uint32_t to, uint32_t full) {
        load_panels<Tile::kPanels>(to, Tile::kKeyPanel, map, tile * Tile::kKeys, key_head, queries.batch, full);
      };
      const uint32_t full = shared.key_full(stage.slot);
      barrier_wait(shared.key_empty(stage.slot), stage.phase ^ 1);
      if constexpr (Mask::kBlocks) shared.block(stage.slot) = key_tiles.block(tile);
      if constexpr (Tile::kOneBuffer) {
        mbarrier_expect(full, 2 * Tile::kKeyBytes);
        load(p.key, shared.key(stage.slot), full);
        load(p.value, shared.value(stage.slot), full);
      } else {
        const uint32_t value_full = shared.value_full(stage.slot);
        mbarrier_expect(full, Tile::kKeyBytes);
        load(p.key, shared.key(stage.slot), full);
        barrier_wait(shared.value_empty(stage.slot), stage.phase ^ 1);
        mbarrier_expect(value_full, Tile::kKeyBytes);
        load(p.value, shared.value(stage.slot), value_full);
      }
      stage.advance();
    });
    index = p.order.after(round);
  }
}

// ---- a computing warpgroup ------------------------------------------------------------------------------------------

__device__ inline bool elected() {
  uint32_t chosen;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(chosen));
  return chosen;
}

// The arrays that wgmma accesses are arguments: if they were members, the compiler would keep the whole struct in
// memory until one of its last passes, which costs registers.
template <typename T, typename Tile, typename Mask, bool kDropout>
struct Warpgroup {
  static constexpr int kScores = Tile::kKeys / 2, kOut = 32 * Tile::kPanels;
  static constexpr int kSteps = 4 * Tile::kPanels;             // of 16 channels
  static constexpr int kStageStep = 2 * Tile::kKeyBytes >> 4;  // in units of 16 bytes
  // The first reference of a row is the maximum over every kReferenceStep-th group of 8 columns. Groups may be skipped
  // only without an attn_mask: then a query that sees any key of a key tile sees the tile's first key.
  static constexpr int kReferenceStep = Tile::kOneBuffer ? 4 : 1;

  const Sm90Forward<T>& p;
  const Shared<Tile>& shared;
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int index = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);  // the shuffle tells ptxas that the index is uniform
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int own_row = warp * 16 + lane / 4;  // the thread has rows own_row and own_row + 8
  const uint32_t queries_lower = static_cast<uint32_t>(panel_descriptor(shared.query(0)));
  const uint32_t keys_lower = static_cast<uint32_t>(panel_descriptor(shared.key(0)));

  typename Mask::template Scores<Tile::kKeys> mask;
  RingPosition<2> query;
  RingPosition<Tile::kStages> stage;  // of the next scores
  int key_tile;
  int group = index;  // the warpgroup's 64 queries
  Queries queries;

  __device__ Warpgroup(const Sm90Forward<T>& arguments, const Shared<Tile>& memory) : p(arguments), shared(memory) {}

  // All descriptors have the same upper word, so descriptor arithmetic is done on lower words.
  __device__ static uint64_t descriptor(uint32_t lower) {
    return static_cast<uint64_t>(panel_descriptor(0, 0) >> 32) << 32 | lower;
  }

  __device__ Queries queries_of(const QueryTile& tile, int of_group) const {
    return {tile.queries.first + of_group * 64, tile.queries.head, tile.queries.batch};
  }

  __device__ void start_scores(float (&scores)[kScores]) const {
    const uint32_t q = queries_lower + query.slot * (Tile::kQueryBytes >> 4) + group * (64 * kPanelRowBytes >> 4);
    const uint32_t k = keys_lower + stage.slot * kStageStep;
    pin_registers(scores);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      wgmma<T, false>(scores, descriptor(q + (i / 4 * Tile::kQueryPanel / 16 + i % 4 * kStepK)),
                      descriptor(k + (i / 4 * Tile::kKeyPanel / 16 + i % 4 * kStepK)), i > 0);
    wgmma_commit();
  }

  __device__ void start_out(float (&out)[kOut], uint32_t (&weights)[kScores / 2], int slot, bool accumulate) const {
    // Bits 16 to 29 of a descriptor are the distance between panels in units of 16 bytes. In keys_lower it is 1, the
    // default of panel_descriptor().
    constexpr uint32_t kPanel = Tile::kPanels > 1 ? (Tile::kKeyPanel >> 4) - 1 : 0;
    const uint32_t v = keys_lower + slot * kStageStep + (Tile::kKeyBytes >> 4) + (kPanel << 16);
    pin_registers(weights);
    pin_registers(out);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 16; ++i)
      wgmma<T, true>(out, &weights[4 * i], descriptor(v + i * kStepRows), i > 0 || accumulate);
    wgmma_commit();
  }

  // Uses mma.sync, because a single warp may need its scores again, but wgmma needs a whole warpgroup.
  __device__ void compute_scores_again(float (&scores)[kScores], int query_slot, int slot) const {
    const uint32_t q = shared.query(query_slot), k = shared.key(slot);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t a[4];
      load_matrices(
          a, q + i / 4 * Tile::kQueryPanel + panel_offset(group * 64 + warp * 16 + lane % 16, i % 4 * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < Tile::kKeys / 16; ++j) {
        uint32_t b[4];
        load_matrices(
            b, k + i / 4 * Tile::kKeyPanel + panel_offset(j * 16 + lane / 16 * 8 + lane % 8, i % 4 * 2 + lane / 8 % 2));
        mma<T>(reinterpret_cast<float (&)[4]>(scores[8 * j]), a, b[0], b[1]);
        mma<T>(reinterpret_cast<float (&)[4]>(scores[8 * j + 4]), a, b[2], b[3]);
      }
    }
  }

  __device__ void hide_scores(float (&scores)[kScores]) const {
    mask.hide(scores, p.problem, p.mask, queries, own_row, lane, key_tile);
  }

  __device__ void finish_rows(const Softmax<T>& softmax, float (&inverse)[2], const Queries& of) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = quad_sum(softmax.sum[r]);  // 0, about 1 or more, or NaN
      inverse[r] = total == 0 ? 0 : reciprocal_approximately(total);
      if constexpr (kDropout) inverse[r] /= keep_probability(p.problem);
      const int row = of.first + own_row + 8 * r;
      if (lane % 4 != 0 || row >= p.problem.queries) continue;
      float logsumexp = total == 0 ? -INFINITY : softmax.reference[r] * p.problem.scale + logf(total);
      if constexpr (Mask::kAdds) logsumexp += p.mask.blocks.row(p.mask.blocks.mask_head(of.batch, of.head), row).shift;
      p.logsumexp[(static_cast<int64_t>(of.batch) * p.problem.heads + of.head) * p.problem.queries + row] = logsumexp;
    }
  }

  __device__ void store_out(const float (&out)[kOut], const float (&inverse)[2], const Queries& of) const {
    constexpr bool kByWarp = Tile::kStoredRows == 16;
    constexpr int kPanelBytes = Tile::kStoredRows * kPanelRowBytes;
    const bool stores = kByWarp ? lane == 0 : thread == 0;
    const auto synchronize = [&] {
      if constexpr (kByWarp)
        __syncwarp();
      else
        warpgroup_barrier(1 + index);
    };
    const int first_row = kByWarp ? warp * 16 : 0;
    const uint32_t to = shared.out() + (index * 64 + first_row) * kPanelRowBytes * Tile::kPanels;
    if (stores) tma_store_wait_read();
    synchronize();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const float* o = &out[8 * i];
      store_matrices(
          to + i / 4 * kPanelBytes + panel_offset(warp * 16 - first_row + lane % 16, i % 4 * 2 + lane / 16),
          pack_pair<T>(o[0] * inverse[0], o[1] * inverse[0]), pack_pair<T>(o[2] * inverse[1], o[3] * inverse[1]),
          pack_pair<T>(o[4] * inverse[0], o[5] * inverse[0]), pack_pair<T>(o[6] * inverse[1], o[7] * inverse[1]));
    }
    fence_async_shared();
    synchronize();
    if (stores) store_panels<Tile::kPanels>(p.out, to, kPanelBytes, of.first + first_row, of.head, of.batch);
  }

  __device__ static void rescale_out(float (&out)[kOut], const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] *= rescale[i / 2 % 2];
  }

  // ---- four warpgroups, one buffer of scores

  // Starts a query tile, and skips key tiles that only other warpgroups' queries see.
  //
  // At most kStages - 2 key tiles are skipped, because otherwise the ring would deadlock: when the warpgroup waits for
  // the stage after the skipped ones, it still holds the last stage of the previous query tile, so the loader can fill
  // only the kStages - 1 stages after that one. Further unseen key tiles are computed with all scores masked.
  __device__ void open(const QueryTile& tile) {
    constexpr int kStages = Tile::kStages;
    constexpr int kMostSkipped = kStages - 2;
    queries = queries_of(tile, group);
    const int seen =
        queries.first < p.problem.queries ? Mask::template key_tiles<Tile::kKeys>(p.problem, queries.first, 64) : 1;
    key_tile = max(seen - 1, tile.key_tiles - 1 - kMostSkipped);
    mask.start(p.problem, queries);
    for (int skipped = tile.key_tiles - 1 - key_tile; skipped > 0; --skipped) {
      barrier_wait(shared.key_full(stage.slot), stage.phase);
      barrier_arrive_if(elected(), shared.key_empty(stage.slot));
      stage.advance();
    }
  }

  __device__ bool softmax_of(Softmax<T>& softmax, float (&scores)[kScores], bool first, float (&rescale)[2]) const {
    hide_scores(scores);
    if (first) softmax.start_rows();
    return softmax.template add<kReferenceStep>(
        scores, rescale, [] {}, [](const float (&)[2]) {},
        [&] {
          compute_scores_again(scores, query.slot, stage.slot);
          hide_scores(scores);
        });
  }

  __device__ void compute_with_one_buffer() {
    float scores[kScores], out[kOut], rescale[2], inverse[2];
    uint32_t weights[kScores / 2];
    Softmax<T> softmax{p.problem.scale_log2};
    barrier_wait(shared.query_full(0), 0);
    open(shared.tile(0));
    barrier_wait(shared.key_full(stage.slot), stage.phase);
    start_scores(scores);
    wgmma_wait<0>();
    pin_registers(scores);
    softmax_of(softmax, scores, true, rescale);
    accumulators_to_a<T>(weights, scores);
    bool first = true;
    int of_query, of_group;  // the queries of P and O
    while (true) {
      const bool last = key_tile == 0;
      const int slot = stage.slot;
      stage.advance();
      bool more = true;
      of_query = query.slot;
      of_group = group;
      if (last) {
        query.advance();
        barrier_wait(shared.query_full(query.slot), query.phase);
        const QueryTile tile = shared.tile(query.slot);
        more = tile.key_tiles > 0;
        // Warpgroups exchange their queries at each query tile, because under the causal mask later queries see more
        // keys.
        group = Tile::kWarpgroups - 1 - group;
        if (more) open(tile);
      } else {
        --key_tile;
      }
      if (more) barrier_wait(shared.key_full(stage.slot), stage.phase);
      start_scores(scores);
      start_out(out, weights, slot, !first);
      if (last) finish_rows(softmax, inverse, queries_of(shared.tile(of_query), of_group));
      wgmma_wait<1>();
      pin_registers(scores);
      if (!more) break;
      const bool rescales = softmax_of(softmax, scores, last, rescale);
      wgmma_wait<0>();
      pin_registers(out);
      pin_registers(weights);
      barrier_arrive_if(elected(), shared.key_empty(slot));
      if (last) {
        store_out(out, inverse, queries_of(shared.tile(of_query), of_group));
        barrier_arrive_if(lane == 0, shared.query_empty(of_query));
      } else if (rescales) {
        rescale_out(out, rescale);
      }
      accumulators_to_a<T>(weights, scores);
      first = last;
    }
    wgmma_wait<0>();
    pin_registers(out);
    store_out(out, inverse, queries_of(shared.tile(of_query), of_group));
    if (lane == 0) tma_store_wait();
  }

  // ---- two warpgroups, two buffers of scores

  // The warpgroups take turns, so that the MMAs of one overlap with the exponentials of the other.
  __device__ void wait_for_turn() const {
    random_delay();
    asm volatile("bar.sync %0, 256;" ::"r"(3 + index) : "memory");
  }
  __device__ void turn_to_other() const {
    random_delay();
    asm volatile("bar.arrive %0, 256;" ::"r"(4 - index) : "memory");
  }

  // The softmax's sum includes the dropped weights.
  __device__ void drop(float (&scores)[kScores], const DropoutDraw& dropout) const {
    if (mask.sees_none(p.problem, queries, key_tile)) return;
    float last = 0;
    const uint32_t head = dropout.head_number(queries.batch * p.problem.heads + queries.head, queries.batch);
    for_kept<kScores>(dropout, head, queries.first + warp * 16, mask.first_key(key_tile),
                      [&](int i, bool keep, bool keep_next) {
                        if (!keep) scores[i] = 0;
                        if (!keep_next) scores[i + 1] = 0;
                        last = fmaxf(last, scores[i + 1]);
                      });
    complete(last);
  }

  __device__ void start(const QueryTile& tile) {
    queries = queries_of(tile, index);
    key_tile = tile.key_tiles - 1;
    mask.start(p.problem, queries);
  }

  __device__ void look_ahead(const Queries& of) {
    mask.look_ahead(p.mask, shared.block(stage.slot), of.first, index, own_row);
  }

  // Neither the ring nor the turns deadlock, because both warpgroups compute every key tile of a query tile: each
  // warpgroup passes the turn on as often as it waits for its turn, and releases stage j before it waits for stage j+2.
  __device__ void compute_with_two_buffers() {
    // With 64 channels, exponentials take as long as MMAs, and the warpgroups take turns at exponentials. With 128
    // channels, they take turns at starting MMAs, because an MMA with A in registers blocks its warps until it runs.
    constexpr bool kTurnsAtExponentials = Tile::kPanels == 1;
    float scores_a[kScores], scores_b[kScores], out[kOut], inverse[2];
    uint32_t weights[kScores / 2];
    Softmax<T> softmax{p.problem.scale_log2};
    const DropoutDraw dropout(kDropout ? p.problem.dropout : DropoutArguments{});
    RingPosition<Tile::kStages> value;  // of the last O += P v
    bool any_previous = false;
    bool first = true;
    Queries previous;
    QueryTile next_tile;

    // Computes P from `current`, starts O += P v, and leaves the scores of the next key tile, which may be the next
    // query tile's first, in `next`. Returns false after the last key tile of the last query tile. (ptxas serializes
    // the wgmmas of a loop unless every register that they write is read only after a wait for all wgmmas.)
    const auto step = [&](float (&current)[kScores], float (&next)[kScores]) __attribute__((always_inline)) {
      const bool last = key_tile == 0;
      const int slot = stage.slot, query_slot = query.slot;
      stage.advance();
      bool more = true;
      if (last) {
        query.advance();
        barrier_wait(shared.query_full(query.slot), query.phase);
        next_tile = shared.tile(query.slot);
        more = next_tile.key_tiles > 0;
      }
      if (more) barrier_wait(shared.key_full(stage.slot), stage.phase);
      start_scores(next);  // not used if !more
      if constexpr (Mask::kBlocks)
        if (more) look_ahead(last ? queries_of(next_tile, index) : queries);
      if (!kTurnsAtExponentials && any_previous) turn_to_other();

      hide_scores(current);
      if (first) {
        if (any_previous) finish_rows(softmax, inverse, previous);
        softmax.start_rows();
      }
      float rescale[2];
      const bool rescales = softmax.template add<kReferenceStep>(
          current, rescale,
          [&] {
            if (kTurnsAtExponentials) wait_for_turn();
          },
          [&](const float (&sums)[2]) {
            complete(sums[0]);
            complete(sums[1]);
            if (kTurnsAtExponentials && (more || index == 0)) turn_to_other();
          },
          [&] {
            compute_scores_again(current, query_slot, slot);
            hide_scores(current);
          });
      barrier_arrive_if(lane == 0, shared.key_empty(slot));
      barrier_arrive_if(lane == 0 && last, shared.query_empty(query_slot));
      if constexpr (kDropout) drop(current, dropout);

      RingPosition<Tile::kStages> next_value = value;
      if (any_previous) next_value.advance();
      barrier_wait(shared.value_full(next_value.slot), next_value.phase);
      wgmma_wait<0>();  // for `next` and the previous O
      pin_registers(next);
      pin_registers(out);
      pin_registers(weights);
      barrier_arrive_if(any_previous && lane == 0, shared.value_empty(value.slot));
      value = next_value;
      if (first) {
        if (any_previous) store_out(out, inverse, previous);
      } else if (rescales) {
        rescale_out(out, rescale);
      }
      accumulators_to_a<T>(weights, current);
      if (!kTurnsAtExponentials) wait_for_turn();
      start_out(out, weights, value.slot, !first);
      any_previous = true;
      first = last;
      if constexpr (Mask::kBlocks) mask.advance();
      --key_tile;
      if (last) {
        previous = queries;
        start(next_tile);
      }
      return more;
    };

    barrier_wait(shared.query_full(0), 0);
    next_tile = shared.tile(0);
    if (next_tile.key_tiles == 0) return;
    start(next_tile);
    if (index == 1) turn_to_other();
    barrier_wait(shared.key_full(0), 0);
    if constexpr (Mask::kBlocks) {
      look_ahead(queries);
      mask.advance();
    }
    start_scores(scores_a);
    wgmma_wait<0>();
    pin_registers(scores_a);
    while (step(scores_a, scores_b) && step(scores_b, scores_a)) {
    }
    if (!kTurnsAtExponentials && index == 0) turn_to_other();
    wgmma_wait<0>();
    pin_registers(out);
    finish_rows(softmax, inverse, previous);
    store_out(out, inverse, previous);
    if (thread == 0) tma_store_wait();
  }
};

template <typename T, typename Tile, typename Mask, bool kDropout>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_forward_wgmma_kernel(const __grid_constant__ Sm90Forward<T> p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const Shared<Tile> shared(shared_bytes);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();

  if (threadIdx.x >= Tile::kWarpgroups * kWarpgroup) {
    dealloc_registers<24>();
    if (threadIdx.x == Tile::kWarpgroups * kWarpgroup) load_tiles<T, Tile, Mask>(p, shared);
    return;
  }
  alloc_registers<Tile::kOneBuffer ? 112 : 240>();
  Warpgroup<T, Tile, Mask, kDropout> warpgroup(p, shared);
  if constexpr (Tile::kOneBuffer)
    warpgroup.compute_with_one_buffer();
  else
    warpgroup.compute_with_two_buffers();
}

#else

template <typename T, typename Tile, typename Mask, bool kDropout>
__global__ void __launch_bounds__(kStubThreads)
    attention_forward_wgmma_kernel(const __grid_constant__ Sm90Forward<T> p) {}

#endif

template <typename T, typename Tile, typename Mask, bool kDropout>
Status launch(const AttentionForward<T>& p, Stream stream) {
  constexpr auto kKernel = attention_forward_wgmma_kernel<T, Tile, Mask, kDropout>;
  constexpr int kSharedBytes = sizeof(typename Shared<Tile>::Layout);
  const AttentionSizes& s = p.sizes;
  const int64_t heads = s.batches * s.heads, tiles = ceil_div(s.queries, Tile::kRows);
  const int64_t head_bytes = s.keys * Tile::kPanels * 2 * kPanelRowBytes;
  Sm90Forward<T> arguments = {
      .query = panel_map(p.query, s, s.heads, s.queries, Tile::kRows),
      .key = panel_map(p.key, s, s.key_heads, s.keys, Tile::kKeys),
      .value = panel_map(p.value, s, s.key_heads, s.keys, Tile::kKeys),
      .out = panel_map(p.out, s, s.heads, s.queries, Tile::kStoredRows),
      .logsumexp = p.logsumexp,
      .problem = sm90_problem(s, p.scale, p.mask, p.dropout),
      .order = TileOrder::of(tiles, heads, head_bytes, Mask::kLongestLast, p.workspace),
      .mask = Mask::kBlocks ? Sm90Mask::of(p.mask, s, p.scale, false, static_cast<char*>(p.workspace) + kCounterBytes)
                            : Sm90Mask{},
  };
  if (max_dynamic_shared_memory<kKernel>() < kSharedBytes) return cudaErrorInvalidConfiguration;
  if (!Mask::kBlocks && tiles * heads <= 2 * multiprocessors()) {
    arguments.order.next = nullptr;  // for so few tiles a counter saves no time, and clearing it takes 2 us
  } else {
    const Status cleared = cudaMemsetAsync(p.workspace, 0, sizeof(int), stream);
    if (cleared != cudaSuccess) return cleared;
  }
  if constexpr (Mask::kBlocks) {
    const Status found = find_mask_blocks(arguments.mask.blocks, p.mask, s, stream);
    if (found != cudaSuccess) return found;
  }
  const auto blocks = static_cast<unsigned>(min(tiles * heads, int64_t{multiprocessors()}));
  kKernel<<<blocks, Tile::kThreads, kSharedBytes, stream>>>(arguments);
  return cudaGetLastError();
}

// Four warpgroups compute tiles of 256 queries, two warpgroups tiles of 128. Two are faster if there are at least kLong
// keys and at most one tile of 256 queries per SM (without the causal mask, per two SMs): docs/notes/attention.md.
bool enough_tiles(const AttentionSizes& s, bool causal) {
  constexpr int64_t kLong = 1024;
  const int64_t tiles = ceil_div(s.queries, FourWarpgroups::kRows) * s.batches * s.heads;
  return s.keys < kLong || (causal ? 1 : 2) * tiles > multiprocessors();
}

}  // namespace

template <typename T>
bool attention_forward_sm90_supports(const AttentionForward<T>& p) {
  // Dropout with an additive mask and more than 64 channels is not compiled, because the backward for sm_90a does not
  // support it.
  const bool narrow = p.mask.bias && p.dropout.probability > 0;
  return p.sizes.head_size <= (narrow ? 64 : 128) && supports_mask<T>(p) &&
         sm90_supports<T, attention_forward_wgmma_kernel<T, TwoWarpgroups<128, false>, PlainMask<true>, false>>(p);
}

template <typename T>
int64_t attention_forward_sm90_workspace(const AttentionForward<T>& p) {
  return kCounterBytes + mask_workspace(p.mask, p.sizes, false);
}

template <typename T>
Status attention_forward_sm90(const AttentionForward<T>& p, Stream stream) {
  const auto with = [&]<int HS, typename Mask>() {
    if (p.dropout.probability == 0) {
      if constexpr (HS == 64 && !Mask::kBlocks)
        if (enough_tiles(p.sizes, p.mask.causal)) return launch<T, FourWarpgroups, Mask, false>(p, stream);
      return launch<T, TwoWarpgroups<HS, false>, Mask, false>(p, stream);
    }
    if constexpr (HS == 64 || !Mask::kAdds) return launch<T, TwoWarpgroups<HS, true>, Mask, true>(p, stream);
    return cudaErrorNotSupported;  // see *_supports()
  };
  const auto of_size = [&]<typename Mask>() {
    return p.sizes.head_size <= 64 ? with.template operator()<64, Mask>() : with.template operator()<128, Mask>();
  };
  if (p.mask.allowed) return of_size.template operator()<BlockMask<false>>();
  if (p.mask.bias) return of_size.template operator()<BlockMask<true>>();
  return p.mask.causal ? of_size.template operator()<PlainMask<true>>()
                       : of_size.template operator()<PlainMask<false>>();
}

#define INSTANTIATE(T)                                                              \
  template bool attention_forward_sm90_supports<T>(const AttentionForward<T>&);     \
  template int64_t attention_forward_sm90_workspace<T>(const AttentionForward<T>&); \
  template Status attention_forward_sm90<T>(const AttentionForward<T>&, Stream);
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
