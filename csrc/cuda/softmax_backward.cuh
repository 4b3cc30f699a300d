// Softmax backward over the rows of a matrix: dx = scale * out * (dout - sum(dout * out)). Reads dout and out, writes
// dx.
#pragma once

#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "common/simple_row.cuh"
#include "common/teams.cuh"
#include "softmax_part.cuh"

namespace gptkernels::cuda {

template <typename T>
struct SoftmaxBackwardRows {
  T* dx;
  const T* dout;
  const T* out;
  int64_t rows;
  int64_t width;
  accumulate_t<T> scale;
};

// ---- any row: one block, which reads it from memory in both passes ----

template <typename T, int kVec, bool kCausal>
__global__ void __launch_bounds__(kSimpleThreads) softmax_backward_simple_kernel(const SoftmaxBackwardRows<T> p) {
  using A = accumulate_t<T>;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t columns = columns_of<kCausal>(row, p.width);
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

template <typename T, typename Team, int kItems, bool kHasHeadTail, bool kCausal, bool kOverflow>
__device__ void softmax_backward_row(const SoftmaxBackwardRows<T>& p, void* dout_slots, void* out_slots) {
  constexpr int kVec = kPack<T>;
  typename Team::template Meeting<sum_t<T>> meeting;
  const RowColumns<T, Team, kHasHeadTail, kCausal, kOverflow> at(p.dx, p.rows, p.width);
  RowPart<T, kItems, kOverflow> dout(p.dout, at, dout_slots);
  RowPart<T, kItems, kOverflow> out(p.out, at, out_slots);

  sum_t<T> products = 0;
  const auto add_products = [&](const float (&d)[kVec], const float (&o)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) products += sum_t<T>(d[k]) * sum_t<T>(o[k]);
  };
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.unmasked(i)) continue;
    dout.mask(at, i, 0);
    out.mask(at, i, 0);
    float d[kVec], o[kVec];
    dout.widened(d, i);
    out.widened(o, i);
    add_products(d, o);
  }
  out.wait_for_overflow();
  if constexpr (kOverflow)
    for (int i = kItems; at.unmasked(i); ++i) {
      dout.mask_overflow(at, i, 0);
      out.mask_overflow(at, i, 0);
      float d[kVec], o[kVec];
      widen(d, *dout.slot(i));
      widen(o, *out.slot(i));
      add_products(d, o);
    }
  if (at.edge_unmasked()) products += sum_t<T>(dout.edge()) * sum_t<T>(out.edge());
  products = warp_reduce<Sum, Team::kLanes>(products);
  meeting(products, [](sum_t<T>& of_lane) { of_lane = warp_reduce<Sum>(of_lane); });
  const float dot = static_cast<float>(products);

  const auto gradient = [&](float d, float o) { return kCausal ? p.scale * (o * (d - dot)) : o * (d - dot); };
  const auto gradients = [&](float (&y)[kVec], int i) {
    float d[kVec];
    dout.widened(d, i);
    out.widened(y, i);
#pragma unroll
    for (int k = 0; k < kVec; ++k) y[k] = gradient(d[k], y[k]);
  };
  const auto overflow = [&](float (&y)[kVec], int i) {
    float d[kVec];
    widen(d, *dout.slot(i));
    widen(y, *out.slot(i));
#pragma unroll
    for (int k = 0; k < kVec; ++k) y[k] = gradient(d[k], y[k]);
  };
  store_part<kItems, kOverflow>(p.dx, at, gradients, overflow, [&] { return gradient(dout.edge(), out.edge()); });
}

template <typename T, int kLanes, int kItems, bool kHasHeadTail, bool kCausal>
__global__ void __launch_bounds__(kLanesThreads<kItems>) softmax_backward_lanes_kernel(const SoftmaxBackwardRows<T> p) {
  softmax_backward_row<T, Lanes<kLanes, kLanesThreads<kItems>>, kItems, kHasHeadTail, kCausal, false>(p, nullptr,
                                                                                                      nullptr);
}

template <typename T, int kItems, bool kHasHeadTail, bool kCausal, bool kOverflow>
__global__ void __launch_bounds__(1024) softmax_backward_block_kernel(const SoftmaxBackwardRows<T> p, int overflow) {
  extern __shared__ uint4 slots[];
  softmax_backward_row<T, Block, kItems, kHasHeadTail, kCausal, kOverflow>(p, slots, slots + overflow * blockDim.x);
}

template <typename T, int kItems, bool kHasHeadTail, bool kCausal>
__global__ void __launch_bounds__(1024) softmax_backward_cluster_kernel(const SoftmaxBackwardRows<T> p, int overflow) {
#if GPTKERNELS_HOPPER
  extern __shared__ uint4 slots[];
  softmax_backward_row<T, Cluster, kItems, kHasHeadTail, kCausal, true>(p, slots, slots + overflow * blockDim.x);
#endif
}

}  // namespace gptkernels::cuda
