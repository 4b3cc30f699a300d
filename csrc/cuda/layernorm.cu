// Which kernel takes which rows of a layernorm, and in what shape.
//
//   forward    registers of a warp or a block hold a row      layernorm_forward_registers_kernel
//              none do                                        layernorm_forward_wide_kernel
//   backward   registers hold what a row's columns sum up     layernorm_backward_ring_kernel
//              none do                                        layernorm_backward_wide_kernel, *_columns_kernel
//              the partial sums of either                     partial_sums_kernel
#include <algorithm>
#include <limits>

#include "../layernorm.h"
#include "common/launch.cuh"
#include "common/partial_sums.cuh"
#include "layernorm_backward.cuh"
#include "layernorm_forward.cuh"

namespace gptkernels::cuda {
namespace {

// Whole packs of float32 and 16 bits are worth a kernel for every number of packs a thread; float64 and odd layouts
// need only be right.
template <typename T, int kVec>
constexpr bool kIsFast = kVec > 1 && sizeof(T) < 8;

// Packs a thread, of a row of several warps.
constexpr int kMaxItems = 4;
template <typename T, int kVec>
constexpr int kMinItems = kIsFast<T, kVec> ? 1 : kMaxItems;

// ---- forward ----

// Of a row of one warp.
template <typename T, int kVec>
constexpr int kForwardMaxWarpItems = kIsFast<T, kVec> ? 7 : kMaxItems;

// Whether all rows are at once on the multiprocessors.
inline bool few_rows(int64_t rows) {
  return rows < 64 * int64_t(multiprocessors());
}

// A residual changes nothing here: the norm of a sum has the same bits either way.
template <typename T, int kVec>
RowThreads forward_row_threads(int64_t rows, int64_t width) {
  constexpr int kMin = kMinItems<T, kVec>;
  constexpr int kMaxWarp = kForwardMaxWarpItems<T, kVec>;
  const auto max_threads = [](auto items) { return kForwardMaxThreads<T, kVec, items.value>; };
  // Two warps a row of 768 float32 have enough to do and are gone sooner, if there are enough rows to follow.
  if (kVec == 4 && !few_rows(rows))
    return row_threads<kBlock, kVec, kMin, kMaxItems, std::min(kMaxWarp, 5)>(width, max_threads);
  return row_threads<kBlock, kVec, kMin, kMaxItems, kMaxWarp>(width, max_threads);
}

// Rows of one warp a block. Blocks of some 3 KB keep reads and writes best mixed; where all rows are at once on the
// multiprocessors, the launch of blocks is what takes the time, and there are fewer.
inline unsigned forward_block_rows(int64_t rows, int threads, int64_t row_bytes) {
  if (threads > kWarp) return 1;
  return few_rows(rows) ? 4 : static_cast<unsigned>(std::clamp<int64_t>(3072 / row_bytes, 1, 4));
}

template <int kVec, bool kResidual, typename T>
void launch_forward(const LayernormForward<T>& p, Stream stream) {
  const RowThreads row = forward_row_threads<T, kVec>(p.rows, p.width);
  if (row.items == 0 || p.rows > std::numeric_limits<int>::max()) {  // a grid has no more blocks
    layernorm_forward_wide_kernel<T, kVec><<<grid_size(p.rows), 1024, 0, stream>>>(p);
    return;
  }
  const int64_t row_bytes = (kResidual ? 2 : 1) * std::max<int64_t>(p.width, 1) * int64_t(sizeof(T));
  const dim3 block(row.threads, forward_block_rows(p.rows, row.threads, row_bytes));
  const unsigned grid = grid_size(ceil_div(p.rows, block.y));
  with_row_threads<kBlock, kMinItems<T, kVec>, kMaxItems, kForwardMaxWarpItems<T, kVec>>(
      row, [&](auto threads, auto sure, auto items) {
        layernorm_forward_registers_kernel<T, kVec, threads.value, sure.value, items.value, kResidual>
            <<<grid, block, 0, stream>>>(p, 1 / accumulate_t<T>(p.width));
      });
}

template <int kVec, typename T>
void launch_forward(const LayernormForward<T>& p, Stream stream) {
  return p.residual ? launch_forward<kVec, true>(p, stream) : launch_forward<kVec, false>(p, stream);
}

// ---- backward ----

// Of a row of one warp. With a third array to wait for, more warps are worth their barriers.
template <typename T, int kVec, bool kResidual>
constexpr int kBackwardMaxWarpItems = !kIsFast<T, kVec>        ? kMaxItems
                                      : kVec == 8 && kResidual ? 5
                                                               : 7;

// Launches the ring kernel if its rows fit; the blocks, and so the rows of partial sums, that it has launched.
template <int kVec, bool kResidual, typename T>
unsigned launch_backward_ring(const LayernormBackward<T>& p, Stream stream) {
  constexpr int kMin = kMinItems<T, kVec>;
  constexpr int kMaxWarp = kBackwardMaxWarpItems<T, kVec, kResidual>;
  const RowThreads row = row_threads<kPart, kVec, kMin, kMaxItems, kMaxWarp>(
      p.width, [](auto items) { return kBackwardMaxThreads<T, kVec, items.value, kResidual>; });
  if (row.items == 0) return 0;
  unsigned blocks = 0;
  with_row_threads<kPart, kMin, kMaxItems, kMaxWarp>(row, [&](auto threads, auto sure, auto items) {
    constexpr auto kKernel = layernorm_backward_ring_kernel<T, kVec, threads.value, sure.value, items.value, kResidual>;
    const RingShape shape =
        ring_shape(p.rows, ring_row_bytes<T, kResidual ? 3 : 2>(p.width), row.threads,
                   kBackwardMaxThreads<T, kVec, items.value, kResidual>, max_dynamic_shared_memory<kKernel>());
    if (shape.stages == 0) return;
    const int64_t sums_bytes =
        int64_t(shape.block.x) * shape.block.y * 2 * items.value * kVec * sizeof(accumulate_t<T>);
    kKernel<<<shape.grid, shape.block, std::max(shape.shared_bytes, sums_bytes), stream>>>(p, shape.stages);
    blocks = shape.grid;
  });
  return blocks;
}

// Rows of partial sums when the rows are too wide for the ring.
inline int64_t wide_partials(int64_t rows) {
  return std::clamp<int64_t>(rows / 16, 1, 64);
}

template <int kVec, bool kResidual, typename T>
void launch_backward(const LayernormBackward<T>& p, Stream stream) {
  int64_t partials = p.rows ? launch_backward_ring<kVec, kResidual>(p, stream) : 0;
  if (partials == 0) {
    partials = wide_partials(p.rows);
    if (p.dx && p.rows) layernorm_backward_wide_kernel<T, kVec><<<grid_size(p.rows), 1024, 0, stream>>>(p);
    constexpr int kThreads = 128;
    const dim3 grid(grid_size(ceil_div(p.width, kThreads)), static_cast<unsigned>(partials));
    if (p.workspace) layernorm_backward_columns_kernel<T><<<grid, kThreads, 0, stream>>>(p);
  }
  if (p.workspace)
    launch_partial_sums<T>({.first = p.dweight,
                            .second = p.dbias,
                            .partials = static_cast<const accumulate_t<T>*>(p.workspace),
                            .count = partials,
                            .width = 2 * p.width,
                            .split = p.width},
                           stream);
}

template <int kVec, typename T>
void launch_backward(const LayernormBackward<T>& p, Stream stream) {
  return p.dresidual ? launch_backward<kVec, true>(p, stream) : launch_backward<kVec, false>(p, stream);
}

}  // namespace

template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, Stream stream) {
  if (p.rows == 0) return cudaSuccess;
  if (packs<T>(p.width, p.out, p.sum, p.x, p.residual, p.weight, p.bias))
    launch_forward<kPack<T>>(p, stream);
  else
    launch_forward<1>(p, stream);
  return cudaGetLastError();
}

// One row of partial sums a block, of which there is at most one a multiprocessor or, for wide rows, 64.
template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width) {
  const int64_t partials = std::max(std::clamp<int64_t>(rows, 1, multiprocessors()), wide_partials(rows));
  return partials * 2 * width * int64_t(sizeof(accumulate_t<T>));
}

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, Stream stream) {
  if (p.width == 0) return cudaSuccess;
  if (packs<T>(p.width, p.dx, p.dout, p.dresidual, p.x, p.weight))
    launch_backward<kPack<T>>(p, stream);
  else
    launch_backward<1>(p, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                           \
  template Status layernorm_forward<T>(const LayernormForward<T>&, Stream); \
  template int64_t layernorm_backward_workspace<T>(int64_t, int64_t);       \
  template Status layernorm_backward<T>(const LayernormBackward<T>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cuda
