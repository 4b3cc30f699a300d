// The second half of a layer: residual + MLP(layernorm(residual)). Cluster i computes the hidden units 256 i to
// 256 i + 255, and multiplies them with the matching columns of the projection.
#pragma once

#include "cuda/elementwise/gelu.cuh"
#include "layer_common.cuh"

namespace gptkernels::cuda {

template <typename T, int C>
struct MlpHalfShared {
  static constexpr int kHidden = 4 * HalfShape<C>::kChannels;  // hidden units per cluster
  static constexpr int kUnits = kHidden / kHalfBlocks;         // hidden units per block
  alignas(128) T fc[kUnits][C];
  alignas(128) T fcproj[HalfShape<C>::kColumns][kHidden];
  NormShared<T, C> norm;
  alignas(16) float x[C];
  alignas(16) float hidden[kHidden];
  uint64_t fc_arrived, fcproj_arrived, x_arrived, hidden_arrived;
};

#if GPTKERNELS_HOPPER

template <typename T, int C>
class MlpHalf {
  using Shape = HalfShape<C>;
  using Shared = MlpHalfShared<T, C>;
  static constexpr int kUnits = Shared::kUnits / kHalfWarps;  // hidden units per warp
  static constexpr int kRows = Shape::kColumns / kHalfWarps;  // output rows per warp

 public:
  __device__ MlpHalf(const DecodeLayers<T>& p, Shared& shared)
      : p_(p),
        step_(p.step),
        shared_(shared),
        lane_(threadIdx.x % kWarp),
        warp_(threadIdx.x / kWarp),
        rank_(static_cast<int>(cluster_rank())),
        part_(blockIdx.x / kHalfBlocks) {}

  // Initialises the mbarriers. Called by one thread.
  __device__ void begin() {
    for (uint64_t* barrier :
         {&shared_.fc_arrived, &shared_.fcproj_arrived, &shared_.x_arrived, &shared_.hidden_arrived})
      mbarrier_init(barrier);
    mbarrier_init_fence();
    expect();
  }

  // Issues the loads of a layer's weights. Called by all compute warps, like run().
  __device__ void order(int layer) {
    prefetch_fc(layer);
    prefetch_fcproj(layer);
    next_bias_ = bias_of(layer);
  }

  // Waits for the residual and sends it to the cluster. Called by the polling warp.
  __device__ void receive(int layer) {
    HalfResidual<T, C>(p_, 0, 2 * layer + 1).sum_and_send(shared_.x, &shared_.x_arrived);
  }

  __device__ void run(int layer) {
    parity_ = layer % 2;
    const DecodeLayer<T>& weights = p_.layers[layer];
    const int unit = warp_ * kUnits + lane_ / 8;
    const float bias = next_bias_;
    await(&shared_.fc_arrived, parity_);
    NormalisedRows<T, C, kUnits> fc;
    fc.load(shared_.fc[warp_ * kUnits], C, shared_.norm, weights.norm2_bias, bias);
    next_bias_ = bias_of(layer + 1);
    workers_barrier();
    prefetch_fc(layer + 1);
    await(&shared_.x_arrived, parity_);
    const float sum = fc.multiply(shared_.x, static_cast<float>(step_.eps));
    const float value = step_.gelu == GeluForm::kTanh ? GeluTanh<T>::value(sum) : GeluErf<T>::value(sum);
    // Eight lanes hold the value; each stores it in one block of the cluster.
    store_in_block(&shared_.hidden[rank_ * Shared::kUnits + unit], value, &shared_.hidden_arrived, lane_ % kHalfBlocks);
    project(p_.words + (2 * layer + 1) * Shape::kWords);
    signal_sums_sent();
    workers_barrier();
    prefetch_fcproj(layer + 1);
    if (threadIdx.x == 0 && layer + 1 < step_.layer_count) expect();
  }

 private:
  // The fc bias of the lane's hidden unit.
  __device__ float bias_of(int layer) const {
    if (layer >= step_.layer_count || !p_.layers[layer].fc_bias) return 0;
    const int unit = warp_ * kUnits + lane_ / 8;
    return widen(p_.layers[layer].fc_bias[part_ * Shared::kHidden + rank_ * Shared::kUnits + unit]);
  }

  // Announces the bytes that the cluster's blocks will store in this block during the next layer.
  __device__ void expect() {
    mbarrier_expect(&shared_.x_arrived, sizeof(shared_.x));
    mbarrier_expect(&shared_.hidden_arrived, sizeof(shared_.hidden));
  }

  __device__ void prefetch_fc(int layer) {
    const int row = static_cast<int>(threadIdx.x) - (kHalfThreads - kWarp);
    static_assert(Shared::kUnits <= kWarp);
    if (layer >= step_.layer_count || row < 0 || row >= Shared::kUnits) return;
    if (row == 0) {
      const DecodeLayer<T>& weights = p_.layers[layer];
      mbarrier_expect(&shared_.fc_arrived, sizeof(shared_.fc) + shared_.norm.bytes(weights.norm2_bias));
      shared_.norm.order(weights.norm2_weight, weights.norm2_bias, &shared_.fc_arrived);
    }
    const int64_t unit = part_ * Shared::kHidden + rank_ * Shared::kUnits + row;
    bulk_load(shared_.fc[row], p_.layers[layer].fc_weight + unit * C, sizeof(shared_.fc[0]), &shared_.fc_arrived);
  }

  __device__ void prefetch_fcproj(int layer) {
    const int row = static_cast<int>(threadIdx.x) - kHalfThreads / 2;
    static_assert(Shape::kColumns <= kHalfThreads / 2);
    if (layer >= step_.layer_count || row < 0 || row >= Shape::kColumns) return;
    if (row == 0) mbarrier_expect(&shared_.fcproj_arrived, sizeof(shared_.fcproj));
    const int64_t channel = rank_ * Shape::kColumns + row;
    bulk_load(shared_.fcproj[row], p_.layers[layer].fcproj_weight + channel * (4 * C) + part_ * Shared::kHidden,
              sizeof(shared_.fcproj[0]), &shared_.fcproj_arrived);
  }

  // Multiplies the cluster's hidden units, 8 per lane, with kRows rows of the projection per warp, and sends the
  // partial sums to output (kParts, C).
  __device__ void project(float* output) {
    static_assert(Shared::kHidden == 8 * kWarp);
    await(&shared_.fcproj_arrived, parity_);
    Packed<T, 8> rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] = load<8>(shared_.fcproj[warp_ * kRows + i] + lane_ * 8);
    await(&shared_.hidden_arrived, parity_);
    float hidden[8], sums[kRows], sum;
    load_floats(hidden, shared_.hidden + lane_ * 8);
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[i] = dot(hidden, rows[i]);
    const int i = reduce_scatter<kWarp>(sums, sum);
    constexpr int kLanesPerSum = kWarp / std::bit_ceil(unsigned{kRows});  // lanes that hold the same sum
    if (i < kRows && lane_ % kLanesPerSum == 0)
      send(output + part_ * C + rank_ * Shape::kColumns + warp_ * kRows + i, sum);
  }

  const DecodeLayers<T>& p_;
  const Decode<T>& step_;
  Shared& shared_;
  const int lane_, warp_, rank_, part_;
  unsigned parity_;
  float next_bias_;
};

#endif

}  // namespace gptkernels::cuda
