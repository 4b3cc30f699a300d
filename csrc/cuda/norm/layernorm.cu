// Chooses the kernel of a layernorm call and its launch shape.
//
//              rows of whole packs that fit into registers  any other row, and float64
//   forward    layernorm_forward_registers_kernel           layernorm_forward_simple_kernel
//   backward   layernorm_backward_ring_kernel               layernorm_backward_simple_kernel, *_columns_kernel
//              then, for dweight, dbias and dx_bias, partial_sums_kernel
//
// If X is T, the fast kernels have instances without and with dropout (NoDropout, DenseDropout). If X is narrower, one
// instance (OptionalDropout) is for both cases.
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
namespace {

// ---- forward ----

// True if there are fewer than 64 rows per SM. An SM of an H200 can hold 64 warps.
bool few_rows(int64_t rows) {
  return rows < 64 * int64_t(multiprocessors());
}

// A thread block with one warp per row has as many rows as fit into 3 KB, at least one and at most four, because small
// thread blocks mix reads and writes best. If the rows are few, it has four, because more thread blocks would cost more
// than the mixing saves.
unsigned forward_block_rows(int64_t rows, int threads, int64_t row_bytes) {
  if (threads > kWarp) return 1;
  return few_rows(rows) ? 4 : static_cast<unsigned>(clamp(3072 / row_bytes, 1, 4));
}

// Returns false if the rows do not fit into registers or are too many. A residual does not change how a row is divided
// among threads, so layernorm(x + residual) has the same bits with and without fusion.
template <bool kResidual, typename T, typename X, typename Dropout>
bool launch_forward_registers(const LayernormForward<T, X>& p, const Dropout& dropout, Stream stream) {
  // For many rows of 768 float32, two warps per row finish sooner than one.
  const int max_warp_items = sizeof(T) == 4 && !few_rows(p.rows) ? 5 : kMaxWarpItems;
  const int64_t packs = max(p.width / kPack<T>, int64_t{1});
  const RowShape row = row_shape<T, Block>(packs, max_warp_items, forward_max_threads<T>);
  if (row.items == 0 || p.rows > std::numeric_limits<int>::max()) return false;
  const dim3 block(row.threads, forward_block_rows(p.rows, row.threads, (kResidual ? 2 : 1) * packs * 16));
  const unsigned grid = grid_size(ceil_div(p.rows, block.y));
  with_row<T, Block, kMaxWarpItems>(row, [&](auto type) {
    layernorm_forward_registers_kernel<typename decltype(type)::type, kResidual>
        <<<grid, block, 0, stream>>>(p, 1 / float(p.width), dropout);
  });
  return true;
}

template <typename T, typename X>
bool launch_forward_fast(const LayernormForward<T, X>& p, const DropoutArguments& dropout, Stream stream) {
  if constexpr (!std::is_same_v<T, X>)
    return launch_forward_registers<true>(p, OptionalDropout<float>(dropout), stream);
  else if (dropout.probability > 0)
    return launch_forward_registers<true>(p, DenseDropout<float>(dropout), stream);
  else if (p.residual)
    return launch_forward_registers<true>(p, NoDropout(), stream);
  else
    return launch_forward_registers<false>(p, NoDropout(), stream);
}

template <int kVec, typename T, typename X>
void launch_forward(const LayernormForward<T, X>& p, const DropoutArguments& dropout, Stream stream) {
  if constexpr (kVec > 1 && sizeof(T) < 8)
    if (launch_forward_fast(p, dropout, stream)) return;
  layernorm_forward_simple_kernel<T, kVec>
      <<<grid_size(p.rows), simple_threads<kVec>(p.width), 0, stream>>>(p, OptionalDropout<accumulate_t<T>>(dropout));
}

// ---- backward ----

// Returns the number of rows of partial sums, which is the number of thread blocks. Returns 0, without a launch, if the
// rows do not fit into registers and shared memory.
template <int kArrays, typename T, typename X, typename Dropout>
int64_t launch_backward_ring(const LayernormBackward<T, X>& p, const Dropout& dropout, Stream stream) {
  // In 16 bits, one warp per row has at most 5 packs per thread in two cases. With dsum, a third array is loaded.
  // Several warps per row then let an SM hold more warps, and thus more loads in flight, which outweighs the cost of
  // the barriers between a row's warps. With three sums over the rows, 6 packs per thread would exceed the registers.
  constexpr int kFewWarpItems = sizeof(T) == 2 ? 5 : kMaxWarpItems;
  constexpr int kWarpItems = kArrays == 3 ? kFewWarpItems : kMaxWarpItems;
  const auto max_threads = backward_max_threads<T, kArrays>;
  const int64_t packs = max(p.width / kPack<T>, int64_t{1});
  const RowShape row = row_shape<T, BlockPart>(packs, p.dsum ? kFewWarpItems : kWarpItems, max_threads);
  int64_t blocks = 0;
  if (row.items > 0)
    with_row<T, BlockPart, kWarpItems>(row, [&](auto type) {
      using R = typename decltype(type)::type;
      constexpr auto kKernel = layernorm_backward_ring_kernel<R, kArrays, X, Dropout>;
      const int64_t row_bytes = p.width * int64_t((p.dsum ? 2 : 1) * sizeof(T) + sizeof(X));
      const int64_t sums_bytes = int64_t(row.threads) * kArrays * R::kItems * R::kVec * sizeof(float);
      const RingShape shape = ring_shape(p.rows, row_bytes, sums_bytes, row.threads, max_threads(R::kItems),
                                         max_dynamic_shared_memory<kKernel>());
      if (shape.stages == 0) return;
      kKernel<<<shape.grid, shape.block, shape.shared_bytes, stream>>>(p, shape.stages, dropout);
      blocks = shape.grid;
    });
  return blocks;
}

template <typename T, typename X>
int64_t launch_backward_fast(const LayernormBackward<T, X>& p, const DropoutArguments& dropout, Stream stream) {
  if constexpr (!std::is_same_v<T, X>)
    return launch_backward_ring<3>(p, OptionalDropout<float>(dropout), stream);
  else if (p.dresidual)
    return launch_backward_ring<3>(p, DenseDropout<float>(dropout), stream);
  else if (p.dx_bias)
    return launch_backward_ring<3>(p, NoDropout(), stream);
  else
    return launch_backward_ring<2>(p, NoDropout(), stream);
}

int64_t simple_partials(int64_t rows) {
  return clamp(rows / 16, 1, 64);
}

template <int kVec, typename T, typename X>
int64_t launch_backward(const LayernormBackward<T, X>& p, const DropoutArguments& dropout, Stream stream) {
  if constexpr (kVec > 1 && sizeof(T) < 8)
    if (p.rows > 0)
      if (const int64_t blocks = launch_backward_fast(p, dropout, stream)) return blocks;
  const OptionalDropout<accumulate_t<T>> optional(dropout);
  if (p.dx && p.rows)
    layernorm_backward_simple_kernel<T, kVec>
        <<<grid_size(p.rows), simple_threads<kVec>(p.width), 0, stream>>>(p, optional);
  constexpr int kThreads = 128;
  const dim3 grid(grid_size(ceil_div(p.width, kThreads)), static_cast<unsigned>(simple_partials(p.rows)));
  if (p.workspace) layernorm_backward_columns_kernel<<<grid, kThreads, 0, stream>>>(p, optional);
  return grid.y;
}

}  // namespace

// ---- launchers ----

template <typename T, typename X>
Status layernorm_forward(const LayernormForward<T, X>& p, const DropoutArguments& dropout, Stream stream) {
  if (p.rows == 0) return cudaSuccess;
  if (can_vectorize<X>(p.width, p.out, p.sum, p.x, p.residual, p.weight, p.bias, p.x_bias))
    launch_forward<kPack<T>>(p, dropout, stream);
  else
    launch_forward<1>(p, dropout, stream);
  return cudaGetLastError();
}

// The workspace has rows of up to 3 * C partial sums. The ring kernel writes one row per thread block, thus at most one
// per SM. layernorm_backward_columns_kernel writes simple_partials(rows) rows.
template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width) {
  const int64_t partials = max(clamp(rows, 1, multiprocessors()), simple_partials(rows));
  return partials * 3 * width * int64_t(sizeof(accumulate_t<T>));
}

template <typename T, typename X>
Status layernorm_backward(const LayernormBackward<T, X>& p, const DropoutArguments& dropout, Stream stream) {
  if (p.width == 0) return cudaSuccess;
  const bool vectorize = can_vectorize<X>(p.width, p.dx, p.dresidual, p.dout, p.dsum, p.x, p.weight);
  const int64_t partials =
      vectorize ? launch_backward<kPack<T>>(p, dropout, stream) : launch_backward<1>(p, dropout, stream);
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

#define GPTKERNELS_INSTANTIATE(T, X)                                                                       \
  template Status layernorm_forward<T, X>(const LayernormForward<T, X>&, const DropoutArguments&, Stream); \
  template Status layernorm_backward<T, X>(const LayernormBackward<T, X>&, const DropoutArguments&, Stream);
#define GPTKERNELS_INSTANTIATE_SAME(T) \
  GPTKERNELS_INSTANTIATE(T, T)         \
  template int64_t layernorm_backward_workspace<T>(int64_t, int64_t);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE_SAME)
GPTKERNELS_INSTANTIATE(float, bfloat16)
GPTKERNELS_INSTANTIATE(float, float16)

}  // namespace gptkernels::cuda
