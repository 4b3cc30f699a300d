#pragma once

#include <cstdint>

#include "cuda/common/reduce.cuh"

namespace gptkernels::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ inline int inclusive_scan(int value) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, value, offset);
    if (threadIdx.x % kWarp >= offset) value += below;
  }
  return value;
}

// `values` is in shared memory, and all threads of the thread block call this function. Each thread scans a range of
// odd length, so that the lanes of a warp use different banks.
__device__ inline void exclusive_scan(int* values, int count) {
  __shared__ int warps[kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int stretch = (count + blockDim.x - 1) / blockDim.x | 1;
  const int begin = min(count, static_cast<int>(threadIdx.x) * stretch);
  const int end = min(count, begin + stretch);
  __syncthreads();
  int total = 0;
  for (int i = begin; i < end; ++i) total += values[i];
  const int up_to = inclusive_scan(total);
  if (lane == kWarp - 1) warps[warp] = up_to;
  __syncthreads();
  int sum = warp_reduce<Sum>(lane < warp ? warps[lane] : 0) + up_to - total;
  for (int i = begin; i < end; ++i) {
    const int value = values[i];
    values[i] = sum;
    sum += value;
  }
  __syncthreads();
}

// A stable sort by one thread block, in which each warp sorts a contiguous range of the entries:
//
//   count(): each warp counts the digits of its entries
//   scan(): an exclusive scan, digit by digit and within a digit warp by warp, turns the counts into the indices at
//     which each warp's entries of each digit begin
//   place(): each warp gets the index of each of its entries, in order
struct CountingSort {
  int* counts;  // (digits, warps + 1) in shared memory; the last column holds the digits' ends

  // Returns `most`, halved until the counts fit into shared memory without an opt-in.
  static int threads(int most, int64_t digits) {
    constexpr int64_t kSharedBytes = 46 * 1024;
    int warps = most / kWarp;
    while (warps > 1 && shared_bytes(warps * kWarp, digits) > kSharedBytes) warps /= 2;
    return warps * kWarp;
  }
  static int64_t shared_bytes(int threads, int64_t digits) {
    return digits * (threads / kWarp + 1) * int64_t(sizeof(int));
  }

  __device__ CountingSort(int* shared, int digits) : counts(shared) {
    for (int i = threadIdx.x; i < digits * columns(); i += blockDim.x) counts[i] = 0;
    __syncthreads();
  }
  __device__ static int columns() { return blockDim.x / kWarp + 1; }
  __device__ int* mine(int digit) const { return counts + digit * columns() + threadIdx.x / kWarp; }
  // Valid after scan().
  __device__ int end(int digit) const { return counts[(digit + 1) * columns() - 1]; }
  __device__ int start(int digit) const { return digit > 0 ? end(digit - 1) : 0; }
  __device__ int length(int digit) const { return end(digit) - start(digit); }
  __device__ void count(int digit) const { atomicAdd(mine(digit), 1); }
  __device__ void scan(int digits) const { exclusive_scan(counts, digits * columns()); }

  // The index of this lane's entry in the sorted order. All lanes of the warp call place(); lanes without an entry are
  // not `active`.
  __device__ int place(bool active, int digit) const {
    const unsigned same = __match_any_sync(kAllLanes, active ? digit : -1);
    const int rank = __popc(same & ((1u << threadIdx.x % kWarp) - 1));
    int place = 0;
    if (active) place = *mine(digit) + rank;
    __syncwarp();
    if (active && rank == 0) *mine(digit) += __popc(same);
    __syncwarp();
    return place;
  }
};

}  // namespace gptkernels::cuda
