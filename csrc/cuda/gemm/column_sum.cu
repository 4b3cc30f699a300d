// Sums x (N, C) over its rows, for bias gradients. A thread block sums every gridDim.y-th run of kRows rows of a strip
// of columns, one pack per lane. partial_sums_kernel adds the partial sums in order, so equal inputs give equal bits.
#include "../../column_sum.h"
#include "cuda/common/partial_sums.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kRows = 16;  // threads that share a column
constexpr int kAhead = 4;  // loads in flight per thread

// If T is float, a thread sums kAhead of its rows in float32, and adds these sums in float64, because a float64
// addition per element would take longer than the memory accesses.
template <typename T, int kVec>
__global__ void __launch_bounds__(kWarp* kRows) column_sum_partial_kernel(const ColumnSum<T> p) {
  using A = sum_t<T>;
  __shared__ A sums[kRows][kVec][kWarp];
  const int64_t column = (int64_t(blockIdx.x) * kWarp + threadIdx.x) * kVec;
  A sum[kVec] = {};
  if (column < p.width) {
    const int64_t stride = int64_t(gridDim.y) * kRows;
    for (int64_t row = int64_t(blockIdx.y) * kRows + threadIdx.y; row < p.rows; row += kAhead * stride) {
      Packed<T, kVec> packs[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (row + i * stride < p.rows) packs[i] = load<kVec>(p.x + (row + i * stride) * p.width + column);
      accumulate_t<T> some[kVec] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (row + i * stride >= p.rows) continue;
        accumulate_t<T> x[kVec];
        widen(x, packs[i]);
#pragma unroll
        for (int k = 0; k < kVec; ++k) some[k] += x[k];
      }
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum[k] += some[k];
    }
  }
#pragma unroll
  for (int k = 0; k < kVec; ++k) sums[threadIdx.y][k][threadIdx.x] = sum[k];
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.width) return;
  A* partial = static_cast<A*>(p.workspace) + int64_t(blockIdx.y) * p.width;  // (gridDim.y, C)
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    for (int row = 1; row < kRows; ++row) sum[k] += sums[row][k][threadIdx.x];
    partial[column + k] = sum[k];
  }
}

// The strips share the thread blocks that can be resident at once. A strip has at least one thread block, at most
// kMaxRuns, and so few that each thread adds about kAhead rows or more.
template <typename T, int kVec>
dim3 partial_grid(int64_t rows, int64_t width) {
  constexpr int64_t kMaxRuns = 1024;
  const int64_t strips = ceil_div(width, kWarp * kVec);
  const int resident = blocks_per_multiprocessor<column_sum_partial_kernel<T, kVec>, kWarp * kRows>();
  const int64_t filling = max(int64_t{resident} * multiprocessors() / strips, int64_t{1});
  const int64_t runs = clamp(ceil_div(rows, kAhead * kRows), 1, min(filling, kMaxRuns));
  return {grid_size(strips), static_cast<unsigned>(runs)};
}

template <typename T, int kVec>
void launch(const ColumnSum<T>& p, Stream stream) {
  const dim3 grid = partial_grid<T, kVec>(p.rows, p.width);
  column_sum_partial_kernel<T, kVec><<<grid, dim3(kWarp, kRows), 0, stream>>>(p);
  launch_partial_sums<T, sum_t<T>>({.first = p.out,
                                    .second = nullptr,
                                    .partials = static_cast<const sum_t<T>*>(p.workspace),
                                    .count = grid.y,
                                    .width = p.width,
                                    .split = p.width},
                                   stream);
}

}  // namespace

// The size is sufficient for any alignment of x, because the caller does not pass x.
template <typename T>
int64_t column_sum_workspace(int64_t rows, int64_t width) {
  if (width == 0) return 0;
  const int64_t partials = max(partial_grid<T, kPack<T>>(rows, width).y, partial_grid<T, 1>(rows, width).y);
  return partials * width * int64_t(sizeof(sum_t<T>));
}

template <typename T>
Status column_sum(const ColumnSum<T>& p, Stream stream) {
  if (p.width == 0) return cudaSuccess;
  if (can_vectorize<T>(p.width, p.x))
    launch<T, kPack<T>>(p, stream);
  else
    launch<T, 1>(p, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                             \
  template int64_t column_sum_workspace<T>(int64_t, int64_t); \
  template Status column_sum<T>(const ColumnSum<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
