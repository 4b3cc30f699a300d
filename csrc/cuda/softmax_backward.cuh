// Softmax backward over the rows of a matrix: dx = scale * out * (dout - sum(dout * out)). Reads dout and out, writes
// dx.
#pragma once

#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "common/teams.cuh"
#include "common/wide_row.cuh"
#include "row_part.cuh"

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

template <typename T, typename Team, int kItems, bool kSingles, bool kCausal, bool kMore>
__device__ void softmax_backward_row(const SoftmaxBackwardRows<T>& p, void* dout_places, void* out_places) {
  constexpr int kVec = kPack<T>;
  typename Team::template Meeting<sum_t<T>> meeting;
  const RowColumns<T, Team, kSingles, kCausal, kMore> at(p.dx, p.rows, p.width);
  RowPart<T, kItems, kMore> dout(p.dout, at, dout_places);
  RowPart<T, kItems, kMore> out(p.out, at, out_places);

  sum_t<T> products = 0;
  const auto add_products = [&](const float (&d)[kVec], const float (&o)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) products += sum_t<T>(d[k]) * sum_t<T>(o[k]);
  };
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.counts(i)) continue;
    dout.mask(at, i, 0);
    out.mask(at, i, 0);
    float d[kVec], o[kVec];
    dout.widened(d, i);
    out.widened(o, i);
    add_products(d, o);
  }
  out.wait_for_more();
  if constexpr (kMore)
    for (int i = kItems; at.counts(i); ++i) {
      dout.mask_more(at, i, 0);
      out.mask_more(at, i, 0);
      float d[kVec], o[kVec];
      widen(d, *dout.place(i));
      widen(o, *out.place(i));
      add_products(d, o);
    }
  if (at.single_counts()) products += sum_t<T>(dout.single()) * sum_t<T>(out.single());
  products = warp_reduce<Sum, Team::kOfWarp>(products);
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
  const auto more = [&](float (&y)[kVec], int i) {
    float d[kVec];
    widen(d, *dout.place(i));
    widen(y, *out.place(i));
#pragma unroll
    for (int k = 0; k < kVec; ++k) y[k] = gradient(d[k], y[k]);
  };
  store_part<kItems, kMore>(p.dx, at, gradients, more, [&] { return gradient(dout.single(), out.single()); });
}

template <typename T, int kLanes, int kItems, bool kSingles, bool kCausal>
__global__ void __launch_bounds__(kLanesThreads<kItems>) softmax_backward_lanes_kernel(const SoftmaxBackwardRows<T> p) {
  softmax_backward_row<T, Lanes<kLanes, kLanesThreads<kItems>>, kItems, kSingles, kCausal, false>(p, nullptr, nullptr);
}

template <typename T, int kItems, bool kSingles, bool kCausal, bool kMore>
__global__ void __launch_bounds__(1024) softmax_backward_block_kernel(const SoftmaxBackwardRows<T> p, int more) {
  extern __shared__ uint4 places[];
  softmax_backward_row<T, Block, kItems, kSingles, kCausal, kMore>(p, places, places + more * blockDim.x);
}

template <typename T, int kItems, bool kSingles, bool kCausal>
__global__ void __launch_bounds__(1024) softmax_backward_cluster_kernel(const SoftmaxBackwardRows<T> p, int more) {
#if GPTKERNELS_HOPPER
  extern __shared__ uint4 places[];
  softmax_backward_row<T, Cluster, kItems, kSingles, kCausal, true>(p, places, places + more * blockDim.x);
#endif
}

template <typename T, int kVec, bool kCausal>
__global__ void __launch_bounds__(kWideThreads<T, false>, 1)
    softmax_backward_simple_kernel(const SoftmaxBackwardRows<T> p, const WideShape shape) {
  using A = accumulate_t<T>;
  using Rows = WideRows<T, 2, kVec, false>;
  using Column = typename Rows::Column;
  Rows rows(shape, p.rows, p.width, {p.dout, p.out});
  for (; rows.more(); rows.next()) {
    const auto columns = static_cast<Column>(columns_of<kCausal>(rows.row(), p.width));
    rows.wait();
    WideSum<A> dot;
    rows.each(0, {columns, -1}, [&](Column column, A(&x)[2][kVec], auto exceptional) {
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        if (!exceptional.value || column + k < columns) dot.total += x[0][k] * x[1][k];
    });
    rows.reduce(dot);
    rows.write(p.dx, {columns, -1}, [&](Column column, A(&x)[2][kVec], auto exceptional) {
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        x[0][k] = exceptional.value && column + k >= columns ? A(0) : p.scale * (x[1][k] * (x[0][k] - dot.total));
    });
  }
}

}  // namespace gptkernels::cuda
