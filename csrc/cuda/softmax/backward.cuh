// dx = scale * out * (dout - sum(dout * out)), with one team (teams.cuh) per row.
#pragma once

#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/row_part_launch.cuh"
#include "cuda/common/simple_row.cuh"
#include "cuda/common/teams.cuh"
#include "rows.cuh"

namespace gptkernels::cuda {

// ---- any row: one thread block per row reads the row from memory in both passes ----

template <typename T, int kVec, bool kCausal>
__global__ void __launch_bounds__(kSimpleThreads) softmax_backward_simple_kernel(const SoftmaxBackwardRows<T> p) {
  using A = accumulate_t<T>;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t columns = unmasked_columns<kCausal>(row, p.width);
    A d[kVec], o[kVec], dot = 0;
    const auto load_both = [&](int64_t column) {
      load_wide<kVec>(d, p.dout + row * p.width + column);
      load_wide<kVec>(o, p.out + row * p.width + column);
    };
    for_each_pack<kVec>(columns, [&](int64_t column) {
      load_both(column);
      for (int k = 0; k < kVec; ++k) dot += column + k < columns ? d[k] * o[k] : A(0);
    });
    dot = block_sum(dot);
    for_each_pack<kVec>(p.width, [&](int64_t column) {
      load_both(column);
      for (int k = 0; k < kVec; ++k) d[k] = column + k < columns ? p.scale * (o[k] * (d[k] - dot)) : A(0);
      store_narrow<kVec>(p.dx + row * p.width + column, d);
    });
  }
}

// ---- rows that fit into registers and shared memory ----

template <typename T_, bool kCausal>
struct SoftmaxBackwardRow {
  using T = T_;
  using Arguments = SoftmaxBackwardRows<T>;
  // There is little to compute, so one thread block per SM is enough.
  static constexpr RowShapes kShapes = {
      .arrays = 2, .resident = 1, .overflow_in_block = !kCausal, .wide_head_tail = kCausal};
  template <bool kHasHeadTail, bool kOverflow>
  static constexpr int kThreads = 1024;

  template <typename Team, int kItems, bool kHasHeadTail, bool kOverflow>
  static __device__ void run(const Arguments& p, uint4* slots, int overflow) {
    typename Team::template Combine<sum_t<T>> combine;
    const int columns = unmasked_columns<kCausal>(static_cast<unsigned>(Team::row()), static_cast<unsigned>(p.width));
    const RowColumns<T, Team, kItems, kHasHeadTail, kCausal, kOverflow> at(p.dx, p.rows, p.width, columns);
    RowPart dout(p.dout, at, slots);
    RowPart out(p.out, at, slots + overflow * blockDim.x);

    sum_t<T> products = 0;
    at.each([&](auto place) {
      at.mask(dout.raw(place).v, place, narrow<T>(0));
      at.mask(out.raw(place).v, place, narrow<T>(0));
      const auto d = dout[place], o = out[place];
#pragma unroll
      for (int k = 0; k < sizeof(d) / sizeof(float); ++k) products += sum_t<T>(d.v[k]) * sum_t<T>(o.v[k]);
    });
    products = warp_reduce<Sum, Team::kLanes>(products);
    combine(products, [](sum_t<T>& lane_value) { lane_value = warp_reduce<Sum>(lane_value); });
    const float dot = static_cast<float>(products);

    at.store(p.dx, [&](auto place) {
      auto d = dout[place];
      const auto o = out[place];
#pragma unroll
      for (int k = 0; k < sizeof(d) / sizeof(float); ++k) {
        d.v[k] = o.v[k] * (d.v[k] - dot);
        if (kCausal) d.v[k] *= p.scale;
      }
      return d;
    });
  }
};

}  // namespace gptkernels::cuda
