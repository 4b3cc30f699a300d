// Chooses the kernel of a layernorm and its launch shape.
//
//              rows of whole packs that fit into registers  any other row, and float64
//   forward    layernorm_forward_registers_kernel           layernorm_forward_simple_kernel
//   backward   layernorm_backward_ring_kernel               layernorm_backward_simple_kernel, *_columns_kernel
//              then, for dweight and dbias, partial_sums_kernel
//
// The launch shape does not depend on dropout, nor on x having 16 bits while the residual is float32. These variants
// are instances of the same templates, compiled by layernorm_dropout.cu and layernorm_mixed.cu; layernorm.cu compiles
// the others.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "../../layernorm.h"
#include "backward.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/partial_sums.cuh"
#include "cuda/common/simple_row.cuh"
#include "forward.cuh"
#include "shape.cuh"

namespace gptkernels::cuda {

// ---- forward ----

// Returns whether all rows are resident on the SMs at once, at one warp per row.
inline bool few_rows(int64_t rows) {
  return rows < 64 * int64_t(multiprocessors());
}

// Returns the number of rows of a block. Rows that take one warp each are grouped into blocks of about 3 KB, which mix
// reads and writes best. With few rows the time to launch the blocks matters more, so a block has 4 rows.
inline unsigned forward_block_rows(int64_t rows, int threads, int64_t row_bytes) {
  if (threads > kWarp) return 1;
  return few_rows(rows) ? 4 : static_cast<unsigned>(std::clamp<int64_t>(3072 / row_bytes, 1, 4));
}

// Launches the registers kernel. Returns false, without a launch, if the rows do not fit into registers. A residual
// does not change the shape, so layernorm(x + residual) has the same bits with and without fusion.
template <bool kResidual, typename T, typename X, typename Dropout>
bool launch_forward_registers(const LayernormForward<T, X>& p, const Dropout& dropout, Stream stream) {
  // Two warps finish a row of 768 float32 sooner than one does, which pays off if more rows follow.
  const int most_warp_items = sizeof(T) == 4 && !few_rows(p.rows) ? 5 : kMostWarpItems;
  const int64_t packs = std::max<int64_t>(p.width / kPack<T>, 1);
  const RowShape row = row_shape<T, Block>(packs, most_warp_items, forward_max_threads<T>);
  if (row.items == 0 || p.rows > std::numeric_limits<int>::max()) return false;  // more blocks than a grid has
  const dim3 block(row.threads, forward_block_rows(p.rows, row.threads, (kResidual ? 2 : 1) * packs * 16));
  const unsigned grid = grid_size(ceil_div(p.rows, block.y));
  with_row<T, Block, kMostWarpItems>(row, [&](auto type) {
    layernorm_forward_registers_kernel<typename decltype(type)::type, kResidual>
        <<<grid, block, 0, stream>>>(p, 1 / float(p.width), dropout);
  });
  return true;
}

template <int kVec, typename T, typename X, typename Dropout>
void launch_forward(const LayernormForward<T, X>& p, const Dropout& dropout, Stream stream) {
  if constexpr (kVec > 1 && sizeof(T) < 8) {
    if (p.residual && launch_forward_registers<true>(p, dropout, stream)) return;
    if constexpr (!Dropout::kOn && std::is_same_v<T, X>)  // dropout and mixed dtypes always have a residual
      if (!p.residual && launch_forward_registers<false>(p, dropout, stream)) return;
  }
  layernorm_forward_simple_kernel<T, kVec><<<grid_size(p.rows), simple_threads<kVec>(p.width), 0, stream>>>(p, dropout);
}

template <typename T, typename X, typename Dropout>
Status run_layernorm_forward(const LayernormForward<T, X>& p, const Dropout& dropout, Stream stream) {
  if (p.rows == 0) return cudaSuccess;
  if (can_vectorize<X>(p.width, p.out, p.sum, p.x, p.residual, p.weight, p.bias, p.x_bias))
    launch_forward<kPack<T>>(p, dropout, stream);
  else
    launch_forward<1>(p, dropout, stream);
  return cudaGetLastError();
}

// ---- backward ----

// Launches the ring kernel. Returns its number of blocks, each of which writes a row of partial sums; 0, without a
// launch, if the rows do not fit.
template <bool kResidual, int kArrays, typename T, typename X, typename Dropped>
int64_t launch_backward_ring(const LayernormBackward<T, X>& p, const Dropped& dropped, Stream stream) {
  // In 16 bits, at most 5 packs per thread: with a residual there is a third array to wait for, and more warps per SM
  // are worth their barriers; with dropout, 6 packs would exceed the registers.
  constexpr int kWarpItems = sizeof(T) == 2 && (kResidual || Dropped::kOn) ? 5 : kMostWarpItems;
  const auto max_threads = backward_max_threads < T, kResidual || Dropped::kOn, kArrays > ;
  const RowShape row = row_shape<T, BlockPart>(std::max<int64_t>(p.width / kPack<T>, 1), kWarpItems, max_threads);
  int64_t blocks = 0;
  if (row.items > 0)
    with_row<T, BlockPart, kWarpItems>(row, [&](auto type) {
      using R = typename decltype(type)::type;
      constexpr auto kKernel = layernorm_backward_ring_kernel<R, kResidual, kArrays, X, Dropped>;
      const int64_t row_bytes = p.width * int64_t((kResidual ? 2 : 1) * sizeof(T) + sizeof(X));
      const RingShape shape =
          ring_shape(p.rows, row_bytes, row.threads, max_threads(R::kItems), max_dynamic_shared_memory<kKernel>());
      if (shape.stages == 0) return;
      const int64_t sums_bytes = int64_t(shape.block.x) * shape.block.y * kArrays * R::kItems * R::kVec * sizeof(float);
      kKernel<<<shape.grid, shape.block, std::max(shape.shared_bytes, sums_bytes), stream>>>(p, shape.stages, dropped);
      blocks = shape.grid;
    });
  return blocks;
}

// Returns the number of rows of partial sums that layernorm_backward_columns_kernel writes.
inline int64_t simple_partials(int64_t rows) {
  return std::clamp<int64_t>(rows / 16, 1, 64);
}

// Launches the kernels for dx and the partial sums. Returns the number of rows of partial sums.
template <int kVec, typename T, typename X, typename Dropped>
int64_t launch_backward(const LayernormBackward<T, X>& p, const Dropped& dropped, Stream stream) {
  if constexpr (kVec > 1 && sizeof(T) < 8) {
    constexpr int kLeast = std::is_same_v<T, X> ? 2 : 3;  // column_sums() without dx_bias
    if (const int64_t blocks = p.rows == 0           ? 0
                               : p.dsum && p.dx_bias ? launch_backward_ring<true, 3>(p, dropped, stream)
                               : p.dx_bias           ? launch_backward_ring<false, 3>(p, dropped, stream)
                               : p.dsum              ? launch_backward_ring<true, kLeast>(p, dropped, stream)
                                                     : launch_backward_ring<false, kLeast>(p, dropped, stream))
      return blocks;
  }
  if (p.dx && p.rows)
    layernorm_backward_simple_kernel<T, kVec>
        <<<grid_size(p.rows), simple_threads<kVec>(p.width), 0, stream>>>(p, dropped);
  constexpr int kThreads = 128;
  const dim3 grid(grid_size(ceil_div(p.width, kThreads)), static_cast<unsigned>(simple_partials(p.rows)));
  if (p.workspace) layernorm_backward_columns_kernel<<<grid, kThreads, 0, stream>>>(p, dropped);
  return grid.y;
}

// `dresidual` is the array that `dropped` writes to; null for NoDropout.
template <typename T, typename X, typename Dropped>
Status run_layernorm_backward(const LayernormBackward<T, X>& p, const Dropped& dropped, const T* dresidual,
                              Stream stream) {
  if (p.width == 0) return cudaSuccess;
  const bool vectorize = can_vectorize<X>(p.width, p.dx, dresidual, p.dout, p.dsum, p.x, p.weight);
  const int64_t partials =
      vectorize ? launch_backward<kPack<T>>(p, dropped, stream) : launch_backward<1>(p, dropped, stream);
  if (p.workspace)
    launch_partial_sums<T>({.first = p.dweight,
                            .second = p.dbias,
                            .partials = static_cast<const accumulate_t<T>*>(p.workspace),
                            .count = partials,
                            .width = column_sums(p) * p.width,
                            .split = p.width,
                            .third = p.dx_bias},
                           stream);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
