// The second stage of a sum over rows adds the partial sums of the first stage's thread blocks in a fixed order.
//
// A thread block of kWarp x kSumRows threads processes kWarp columns. Each warp adds every kSumRows-th row, one column
// per lane. The warps' sums are transposed through shared memory, and each warp adds the kSumRows sums of one column.
#pragma once

#include <cstdint>

#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {

// The sums of the first `split` columns are stored in `first`, those of the next `split` columns in `second`, and the
// rest in `third`. Null outputs are skipped.
template <typename T, typename A = accumulate_t<T>>
struct PartialSums {
  T* first;
  T* second;
  const A* partials;
  int64_t count;
  int64_t width;
  int64_t split;
  T* third = nullptr;
};

constexpr int kSumRows = 32;

template <typename T, typename A>
__global__ void __launch_bounds__(kWarp* kSumRows) partial_sums_kernel(const PartialSums<T, A> p) {
  __shared__ A sums[kSumRows][kWarp + 1];
  const int64_t column = int64_t(blockIdx.x) * kWarp + threadIdx.x;
  A sum = 0;
  wait_for_previous_kernel();
  if (column < p.width) {
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < p.count; row += kSumRows) sum += p.partials[row * p.width + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  const A total = warp_reduce<Sum>(sums[threadIdx.x][threadIdx.y]);
  const int64_t mine = int64_t(blockIdx.x) * kWarp + threadIdx.y;
  if (threadIdx.x != 0 || mine >= p.width) return;
  const int part = mine < p.split ? 0 : mine < 2 * p.split ? 1 : 2;
  T* out = part == 0 ? p.first : part == 1 ? p.second : p.third;
  if (out) out[mine - part * p.split] = narrow<T>(accumulate_t<T>(total));
}

template <typename T, typename A = accumulate_t<T>>
void launch_partial_sums(const PartialSums<T, A>& p, Stream stream) {
  static_assert(kSumRows == kWarp);
  launch_early<partial_sums_kernel<T, A>>(grid_size(ceil_div(p.width, kWarp)), dim3(kWarp, kSumRows), 0, stream, p);
}

}  // namespace gptkernels::cuda
