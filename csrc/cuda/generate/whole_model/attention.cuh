// The first half of a layer: residual + attention(layernorm(residual)). Each cluster computes one attention head of 64
// channels:
//
//   each block: 8 rows of query, key and value                      -> `newest` of all blocks, the last two also cached
//   each block: attention of the query over 1/8 of the cached keys  -> partial softmax, to `blocks` of all blocks
//   each block: merges the 8 partial softmaxes and multiplies the head's output with its rows of the projection
//
// The blocks exchange their results through distributed shared memory, by stores that mbarriers count.
#pragma once

#include "cuda/common/approximate.cuh"
#include "layer_common.cuh"

namespace gptkernels::cuda {

constexpr int kHalfKeys = 128;  // maximum number of keys per block

template <typename T, int C>
struct AttentionHalfShared {
  static constexpr int kHS = HalfShape<C>::kChannels;
  static constexpr int kDims = kHS / kHalfBlocks;  // rows each of query, key and value that a block computes
  alignas(128) T qkv[3][kDims][C];
  alignas(128) T proj[HalfShape<C>::kColumns][kHS];
  NormShared<T, C> norm;
  alignas(16) float x[C];
  alignas(16) float newest[3][kHS];  // query, key and value
  // Eight partial softmaxes: largest score, sum of exponentials relative to it, and weighted sum of values.
  struct Softmax {
    alignas(16) float maximum[8];
    alignas(16) float sum[8];
    alignas(16) float out[8][kHS];
  };
  Softmax warps, blocks;  // one partial softmax per warp of this block, and per block of the cluster
  alignas(16) float attended[kHalfWarps][kHS];
  uint64_t qkv_arrived, proj_arrived, keys_arrived, x_arrived, newest_arrived, blocks_arrived;
  // The block's cached keys and values follow the struct, ceil_div(capacity, kHalfBlocks) * kHS elements each.

  static constexpr int64_t bytes(int64_t capacity) {
    return sizeof(AttentionHalfShared) + 2 * ceil_div(capacity, kHalfBlocks) * kHS * static_cast<int64_t>(sizeof(T));
  }
};

#if GPTKERNELS_HOPPER

template <typename T, int C>
class AttentionHalf {
  using Shape = HalfShape<C>;
  using Shared = AttentionHalfShared<T, C>;
  static constexpr int kHS = Shared::kHS, kDims = Shared::kDims;
  static constexpr int kTeams = kHalfThreads / 8;  // teams of 8 lanes; a team shares a key or a row of the projection
  static constexpr int kRounds = kHalfKeys / kTeams;
  static_assert(kHS == 64 && kHalfBlocks == 8 && kHalfWarps == 8 && kDims == kHalfWarps);

 public:
  __device__ AttentionHalf(const DecodeLayers<T>& p, Shared& shared)
      : p_(p),
        step_(p.step),
        shared_(shared),
        lane_(threadIdx.x % kWarp),
        warp_(threadIdx.x / kWarp),
        rank_(static_cast<int>(cluster_rank())),
        head_(blockIdx.x / kHalfBlocks),
        dims_(lane_ % 8 * 8),
        layer_size_(C * p.step.capacity) {
    // decode_start_kernel reports an invalid length; here it is clamped, so that no access is out of bounds.
    const int64_t most = min(step_.capacity, step_.sequence_length);
    position_ = static_cast<int>(min(max(step_.lengths[0], int64_t{1}), most)) - 1;
    const int each = position_ / kHalfBlocks + 1;
    first_key_ = min(rank_ * each, position_ + 1);
    const int end = min(first_key_ + each, position_ + 1);
    cached_ = max(min(end, position_) - first_key_, 0);
    has_newest_ = first_key_ <= position_ && position_ < end;
    keys_ = reinterpret_cast<T*>(&shared + 1);
    values_ = keys_ + ceil_div(step_.capacity, kHalfBlocks) * kHS;
  }

  // Initialises the mbarriers. Called by one thread.
  __device__ void begin() {
    for (uint64_t* barrier : {&shared_.qkv_arrived, &shared_.proj_arrived, &shared_.keys_arrived, &shared_.x_arrived,
                              &shared_.newest_arrived, &shared_.blocks_arrived})
      mbarrier_init(barrier);
    mbarrier_init_fence();
    expect();
  }

  // Issues the loads of a layer's weights, keys and values. Called by all compute warps, like run().
  __device__ void order(int layer) {
    prefetch_qkv(layer);
    prefetch_keys(layer);
    prefetch_proj(layer);
    next_bias_ = bias_of(layer);
  }

  // Waits for the residual and sends it to the cluster. Called by the polling warp.
  __device__ void receive(int layer) {
    HalfResidual<T, C>(p_, position_, 2 * layer).sum_and_send(shared_.x, &shared_.x_arrived);
  }

  __device__ void run(int layer) {
    parity_ = layer % 2;
    const DecodeLayer<T>& weights = p_.layers[layer];
    const int kind = lane_ / 8, dim = rank_ * kDims + warp_;  // kind 0: query, 1: key, 2: value
    const float bias = next_bias_;
    await(&shared_.qkv_arrived, parity_);
    NormalisedRows<T, C, 3> qkv;
    qkv.load(shared_.qkv[0][warp_], kDims * C, shared_.norm, weights.norm1_bias, bias);
    next_bias_ = bias_of(layer + 1);
    workers_barrier();
    prefetch_qkv(layer + 1);
    await(&shared_.x_arrived, parity_);
    const float sum = qkv.multiply(shared_.x, static_cast<float>(step_.eps));
    // Eight lanes hold the sum; each stores it in one block of the cluster.
    if (kind < 3) store_in_block(&shared_.newest[kind][dim], sum, &shared_.newest_arrived, lane_ % kHalfBlocks);
    if (lane_ == 8 || lane_ == 16)
      keys_of(layer)[(lane_ == 8 ? 0 : layer_size_) + (head_ * step_.capacity + position_) * kHS + dim] =
          narrow<T>(sum);
    attend();
    prefetch_keys(layer + 1);
    broadcast_softmax();
    project(p_.words + 2 * layer * Shape::kWords);
    signal_sums_sent();
    workers_barrier();
    prefetch_proj(layer + 1);
    // This is early enough to announce the next layer's bytes: no block sends them before it has received this layer's
    // results from all other blocks.
    if (threadIdx.x == 0 && layer + 1 < step_.layer_count) expect();
  }

 private:
  // The qkv bias of the lane's row.
  __device__ float bias_of(int layer) const {
    const int kind = lane_ / 8, dim = rank_ * kDims + warp_;
    if (layer >= step_.layer_count || kind >= 3 || !p_.layers[layer].qkv_bias) return 0;
    return widen(p_.layers[layer].qkv_bias[kind * C + head_ * kHS + dim]);
  }

  // The layer's keys (NH, capacity, HS) in the cache; its values follow layer_size_ elements later.
  __device__ T* keys_of(int layer) const { return step_.keys_values + 2 * layer * layer_size_; }

  // Announces the bytes that the cluster's blocks will store in this block during the next layer.
  __device__ void expect() {
    mbarrier_expect(&shared_.x_arrived, sizeof(shared_.x));
    mbarrier_expect(&shared_.newest_arrived, sizeof(shared_.newest));
    mbarrier_expect(&shared_.blocks_arrived, sizeof(shared_.blocks));
  }

  // The following three functions issue the loads of a layer, and are no-ops after the last layer. A later warp issues
  // them, because the first warp has more to do.
  __device__ void prefetch_qkv(int layer) {
    const int thread = static_cast<int>(threadIdx.x) - (kHalfThreads - kWarp);
    if (layer >= step_.layer_count || thread < 0 || thread >= 3) return;
    if (thread == 0) {
      const DecodeLayer<T>& weights = p_.layers[layer];
      mbarrier_expect(&shared_.qkv_arrived, sizeof(shared_.qkv) + shared_.norm.bytes(weights.norm1_bias));
      shared_.norm.order(weights.norm1_weight, weights.norm1_bias, &shared_.qkv_arrived);
    }
    bulk_load(shared_.qkv[thread],
              p_.layers[layer].qkv_weight + (thread * int64_t{C} + head_ * kHS + rank_ * kDims) * C,
              sizeof(shared_.qkv[0]), &shared_.qkv_arrived);
  }

  __device__ void prefetch_keys(int layer) {
    if (layer >= step_.layer_count || threadIdx.x != kHalfThreads - kWarp) return;
    const unsigned bytes = cached_ * kHS * sizeof(T);
    mbarrier_expect(&shared_.keys_arrived, 2 * bytes);
    if (cached_ == 0) return;
    const T* const from = keys_of(layer) + (head_ * step_.capacity + first_key_) * kHS;
    bulk_load(keys_, from, bytes, &shared_.keys_arrived);
    bulk_load(values_, from + layer_size_, bytes, &shared_.keys_arrived);
  }

  __device__ void prefetch_proj(int layer) {
    const int row = static_cast<int>(threadIdx.x) - kHalfThreads / 2;
    static_assert(Shape::kColumns <= kHalfThreads / 2);
    if (layer >= step_.layer_count || row < 0 || row >= Shape::kColumns) return;
    if (row == 0) mbarrier_expect(&shared_.proj_arrived, sizeof(shared_.proj));
    bulk_load(shared_.proj[row],
              p_.layers[layer].proj_weight + (rank_ * Shape::kColumns + int64_t{row}) * C + head_ * kHS,
              sizeof(shared_.proj[0]), &shared_.proj_arrived);
  }

  // The lane's 8 elements of the newest key (1) or value (2), rounded to T as in the cache.
  __device__ Packed<T, 8> newest(int kind) const {
    float wide[8];
    load_floats(wide, shared_.newest[kind] + dims_);
    return narrow<T>(wide);
  }

  // Attention over the block's keys, dealt to the teams round robin. Each warp leaves its softmax in shared_.warps.
  // Scores are multiplied by log2(e), so that exp2 applies.
  __device__ void attend() {
    await(&shared_.keys_arrived, parity_);
    await(&shared_.newest_arrived, parity_);
    const int team = warp_ * 4 + lane_ / 8;
    float query[8], scores[kRounds + 1], largest = -INFINITY;
    load_floats(query, shared_.newest[0] + dims_);
#pragma unroll
    for (int e = 0; e < 8; ++e) query[e] *= 0.125f * kLog2E;  // 1 / sqrt(kHS)
#pragma unroll
    for (int d = 0; d <= kRounds; ++d) scores[d] = -INFINITY;
    // Offset of the team's key in round d, clamped to the last cached key; scores beyond it stay -inf.
    const auto index = [&](int d) { return min(d * kTeams + team, cached_ - 1) * kHS + dims_; };
#pragma unroll
    for (int d = 0; d < kRounds; ++d) {
      if (d * kTeams >= cached_) break;
      const float score = warp_reduce<Sum, 8>(dot(query, load<8>(keys_ + index(d))));
      if (d * kTeams + team < cached_) scores[d] = score;
    }
    if (has_newest_) {
      const float score = warp_reduce<Sum, 8>(dot(query, newest(1)));
      if (team == 0) scores[kRounds] = score;
    }
#pragma unroll
    for (int d = 0; d <= kRounds; ++d) largest = fmaxf(largest, scores[d]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));

    const float origin = largest == -INFINITY ? 0.0f : largest;
    float sum = 0, out[8] = {};
    const auto add_value = [&](float score, const Packed<T, 8>& value) {
      const float weight = exp2_approximately(score - origin);
      float wide[8];
      widen(wide, value);
      sum += weight;
#pragma unroll
      for (int e = 0; e < 8; ++e) out[e] += weight * wide[e];
    };
#pragma unroll
    for (int d = 0; d < kRounds; ++d) {
      if (d * kTeams >= cached_) break;
      add_value(scores[d], load<8>(values_ + index(d)));
    }
    if (has_newest_) add_value(scores[kRounds], newest(2));
    store_warp_softmax(largest, sum, out);
    workers_barrier();
  }

  // Reduce-scatter over the four teams of a warp: each lane ends with 2 of its 8 dimensions and stores them.
  __device__ void store_warp_softmax(float largest, float sum, const float (&out)[8]) {
    sum += __shfl_xor_sync(~0u, sum, 8);
    sum += __shfl_xor_sync(~0u, sum, 16);
    const bool upper = lane_ & 16, odd = lane_ & 8;
    float four[4], two[2];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      four[e] = (upper ? out[e + 4] : out[e]) + __shfl_xor_sync(~0u, upper ? out[e] : out[e + 4], 16);
#pragma unroll
    for (int e = 0; e < 2; ++e)
      two[e] = (odd ? four[e + 2] : four[e]) + __shfl_xor_sync(~0u, odd ? four[e] : four[e + 2], 8);
    float* const to = shared_.warps.out[warp_] + dims_ + (upper ? 4 : 0) + (odd ? 2 : 0);
    to[0] = two[0];
    to[1] = two[1];
    if (lane_ == 0) {
      shared_.warps.maximum[warp_] = largest;
      shared_.warps.sum[warp_] = sum;
    }
  }

  // Merges eight partial softmaxes, relative to the largest of their maxima.
  struct MergedSoftmax {
    float maximum, weights[8], sum = 0;
    __device__ explicit MergedSoftmax(const typename Shared::Softmax& from) {
      float maxima[8], sums[8];
      load_floats(maxima, from.maximum);
      load_floats(sums, from.sum);
      maximum = maxima[0];
#pragma unroll
      for (int k = 1; k < 8; ++k) maximum = fmaxf(maximum, maxima[k]);
      const float origin = maximum == -INFINITY ? 0.0f : maximum;
#pragma unroll
      for (int k = 0; k < 8; ++k) weights[k] = exp2_approximately(maxima[k] - origin);
#pragma unroll
      for (int k = 0; k < 8; ++k) sum += weights[k] * sums[k];
    }
    __device__ float out(const typename Shared::Softmax& from, int dim) const {
      float total = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) total += weights[k] * from.out[k][dim];
      return total;
    }
  };

  // Sends the block's softmax to all blocks of the cluster. Four threads hold the same dimension; each of them sends it
  // to two blocks.
  __device__ void broadcast_softmax() {
    const int dim = threadIdx.x % kHS;
    const MergedSoftmax merged(shared_.warps);
    const float out = merged.out(shared_.warps, dim);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const unsigned to = threadIdx.x / kHS * 2 + k;
      store_in_block(&shared_.blocks.out[rank_][dim], out, &shared_.blocks_arrived, to);
      if (dim == 0) store_in_block(&shared_.blocks.maximum[rank_], merged.maximum, &shared_.blocks_arrived, to);
      if (dim == 1) store_in_block(&shared_.blocks.sum[rank_], merged.sum, &shared_.blocks_arrived, to);
    }
  }

  // Multiplies the head's output with kRows rows of the projection per team, and sends the partial sums to output
  // (kParts, C).
  __device__ void project(float* output) {
    constexpr int kRows = Shape::kColumns / kTeams;  // rows per team
    await(&shared_.proj_arrived, parity_);
    Packed<T, 8> rows[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) rows[k] = load<8>(shared_.proj[(warp_ * kRows + k) * 4 + lane_ / 8] + dims_);
    await(&shared_.blocks_arrived, parity_);
    const MergedSoftmax merged(shared_.blocks);
    float (&attended)[kHS] = shared_.attended[warp_];
#pragma unroll
    for (int dim = lane_; dim < kHS; dim += kWarp) attended[dim] = merged.out(shared_.blocks, dim) / merged.sum;
    __syncwarp();
    float own[8], sums[kRows], sum;
    load_floats(own, attended + dims_);
#pragma unroll
    for (int k = 0; k < kRows; ++k) sums[k] = dot(own, rows[k]);
    const int k = reduce_scatter<8>(sums, sum);
    constexpr int kLanesPerSum = 8 / std::bit_ceil(unsigned{kRows});  // lanes that hold the same sum
    if (k < kRows && lane_ % kLanesPerSum == 0)
      send(output + head_ * C + rank_ * Shape::kColumns + (warp_ * kRows + k) * 4 + lane_ / 8, sum);
  }

  const DecodeLayers<T>& p_;
  const Decode<T>& step_;
  Shared& shared_;
  const int lane_, warp_, rank_, head_, dims_;
  const int64_t layer_size_;           // elements of a layer's keys
  int position_, first_key_, cached_;  // cached_: number of the block's keys, without the newest
  bool has_newest_;
  unsigned parity_;
  float next_bias_;
  T* keys_;
  T* values_;
};

#endif

}  // namespace gptkernels::cuda
