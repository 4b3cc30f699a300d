// The second half of a layer: residual + MLP(norm(residual)).
#pragma once

#include "decode_half.cuh"
#include "gelu.cuh"

namespace gptkernels::cuda {

template <typename T, int C>
struct MlpHalfShared {
  static constexpr int kHidden = 4 * HalfShape<C>::kChannels;  // hidden units of a cluster
  static constexpr int kUnits = kHidden / kHalfBlocks;         // of a block
  alignas(128) T fc[kUnits][C];
  alignas(128) T fcproj[HalfShape<C>::kColumns][kHidden];
  alignas(16) float x[C];
  alignas(16) float hidden[kHidden];
  uint64_t fc_arrived, fcproj_arrived, x_arrived, hidden_arrived;
};

#if GPTKERNELS_HOPPER

template <typename T, int C>
class MlpHalf {
  using Shape = HalfShape<C>;
  using Shared = MlpHalfShared<T, C>;
  static constexpr int kUnits = Shared::kUnits / kHalfWarps;  // of a warp
  static constexpr int kRows = Shape::kColumns / kHalfWarps;  // of the output, of a warp

 public:
  __device__ MlpHalf(const DecodeHalf<T>& p, const Decode<T>& step, Shared& shared)
      : p_(p),
        step_(step),
        shared_(shared),
        lane_(threadIdx.x % kWarp),
        warp_(threadIdx.x / kWarp),
        rank_(static_cast<int>(cluster_rank())),
        part_(blockIdx.x / kHalfBlocks) {}

  __device__ void run() {
    order();
    const HalfResidual<T, C> residual(p_, step_, 0);
    const int unit = warp_ * kUnits + lane_ / 8, of_all = part_ * Shared::kHidden + rank_ * Shared::kUnits + unit;
    const float bias = p_.first_bias ? widen(p_.first_bias[of_all]) : 0.0f;
    await(&shared_.fc_arrived);
    NormalisedRows<T, C, kUnits> fc;
    fc.load(shared_.fc[warp_ * kUnits], C, p_.norm_weight, p_.norm_bias, bias);
    cluster_wait();  // all blocks have initialised their barriers

    residual.sum_and_send(shared_.x, &shared_.x_arrived);
    await(&shared_.x_arrived);
    const float sum = fc.multiply(shared_.x, static_cast<float>(step_.eps));
    const float value = step_.gelu == GeluForm::kTanh ? GeluTanh<T>::value(sum) : GeluErf<T>::value(sum);
    // Eight lanes have it, for a block each.
    store_in_block(&shared_.hidden[rank_ * Shared::kUnits + unit], value, &shared_.hidden_arrived, lane_ % kHalfBlocks);
    output();
  }

 private:
  __device__ void order() {
    if (threadIdx.x == 0) {
      for (uint64_t* barrier :
           {&shared_.fc_arrived, &shared_.fcproj_arrived, &shared_.x_arrived, &shared_.hidden_arrived})
        mbarrier_init(barrier);
      mbarrier_init_fence();
      mbarrier_expect(&shared_.fc_arrived, sizeof(shared_.fc));
      mbarrier_expect(&shared_.fcproj_arrived, sizeof(shared_.fcproj));
      mbarrier_expect(&shared_.x_arrived, sizeof(shared_.x));
      mbarrier_expect(&shared_.hidden_arrived, sizeof(shared_.hidden));
    }
    __syncthreads();
    cluster_arrive();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < Shared::kUnits) {
      const int unit = part_ * Shared::kHidden + rank_ * Shared::kUnits + thread;
      bulk_load(shared_.fc[thread], p_.first_weight + int64_t{unit} * C, sizeof(shared_.fc[0]), &shared_.fc_arrived);
    }
    if (thread < Shape::kColumns) {
      const int row = rank_ * Shape::kColumns + thread;
      bulk_load(shared_.fcproj[thread], p_.second_weight + int64_t{row} * (4 * C) + part_ * Shared::kHidden,
                sizeof(shared_.fcproj[0]), &shared_.fcproj_arrived);
    }
  }

  // Each lane has 8 of the cluster's hidden units.
  __device__ void output() {
    static_assert(Shared::kHidden == 8 * kWarp);
    await(&shared_.fcproj_arrived);
    Packed<T, 8> rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] = load<8>(shared_.fcproj[warp_ * kRows + i] + lane_ * 8);
    await(&shared_.hidden_arrived);
    float hidden[8], sums[kRows], sum;
    load_floats(hidden, shared_.hidden + lane_ * 8);
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[i] = dot(hidden, rows[i]);
    const int i = scatter_sums<kWarp>(sums, sum);
    constexpr int kHolders = kWarp / std::bit_ceil(unsigned{kRows});  // lanes that have the same sum
    if (i < kRows && lane_ % kHolders == 0)
      send(p_.output + part_ * C + rank_ * Shape::kColumns + warp_ * kRows + i, sum);
  }

  const DecodeHalf<T>& p_;
  const Decode<T>& step_;
  Shared& shared_;
  const int lane_, warp_, rank_, part_;
};

#endif

template <typename T, int C>
DECODE_HALF_KERNEL decode_mlp_half_kernel(const __grid_constant__ DecodeHalf<T> p,
                                          const __grid_constant__ Decode<T> step) {
#if GPTKERNELS_HOPPER
  extern __shared__ __align__(128) uint8_t half_shared_bytes[];
  let_next_kernel_start();
  MlpHalf<T, C>(p, step, *reinterpret_cast<MlpHalfShared<T, C>*>(half_shared_bytes)).run();
  // So that no kernel ends before the previous one.
  if (threadIdx.x == 0) wait_for_previous_kernel();
#endif
}

}  // namespace gptkernels::cuda
