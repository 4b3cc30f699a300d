// Teams: the threads that share a row of a matrix. (In the tables, a block is a thread block.) A kernel over rows is a
// template on its team, a type with
//
//   row()                the row of this thread's team
//   thread(), threads()  this thread's index in its team, and the number of threads of the team
//   kLanes, kOneWarp     the number of lanes of a warp that share a row, and whether they are the whole team
//
//   team           threads of a row       rows of a block     combines values through  used by
//   -------------  ---------------------  ------------------  -----------------------  -----------------------------
//   Lanes<k, n>    k: 8, 16 or 32 lanes   n / k               shuffles                 softmax, fused_classifier
//   Warp           32                     blockDim.y          shuffles                 layernorm, fp8_layernorm
//   Block          blockDim.x             1                   shared memory            layernorm forward, softmax,
//                                                                                      fused_classifier
//   BlockPart      blockDim.x             blockDim.y          shared memory            layernorm backward
//   Cluster        2 to 16 blocks         1 per cluster       distributed shared mem.  softmax, fused_classifier
//
// Threads 0, 1, 2, ... of a team hold packs 0, 1, 2, ... of 16 bytes, so that a warp accesses 512 contiguous bytes. A
// row of 768 bfloat16 is 96 packs, which a Warp holds as 3 packs per thread:
//
//   column   0     8     16         248   256              504   512              760
//          +-----+-----+-----+---+-----+-----+-----+---+-----+-----+-----+---+-----+
//   lane   |  0  |  1  |  2  |...| 31  |  0  |  1  |...| 31  |  0  |  1  |...| 31  |
//          +-----+-----+-----+---+-----+-----+-----+---+-----+-----+-----+---+-----+
//           packs[0] of each lane       packs[1]              packs[2]
//
// Types that hold a team's row:
//
//   type       where the row is                       used by
//   ---------  -------------------------------------  ------------------------------------------------------------
//   RowPart    registers, the rest in shared memory   softmax, fused_classifier: any width and alignment, up to 4 MB
//   Row        registers                              layernorm, fp8_layernorm: whole packs, up to 16384 bfloat16
//   RowRing    a ring in shared memory, then a Row    layernorm backward: one block per SM loops over the rows
//   (none)     read from memory again in each pass    the *_simple_kernels: any width, alignment, dtype
//
// RowPart (row_part.cuh) is for kernels limited by memory bandwidth: it holds up to 4 packs per thread in registers.
// Row (row.cuh) is for layernorm's kernels, which are limited by instructions: it holds up to 7 packs per thread, and
// knows at compile time which packs need no bounds check. This saves 3 to 7 % of the time (docs/layernorm.md). RowRing
// is in ../norm/ring.cuh.
#pragma once

#include <cstdint>

#include "cuda/ptx/sm90.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {

// ---- combining one value per thread, once in a kernel ---------------------------------------------------------------

// A team's Combine is called as combine(value, merge). On entry `value` is combined over the team's lanes of each warp;
// afterwards every thread of the team has the combination of all values. merge(value) combines the values of a warp's
// 32 lanes, and V() is the neutral element. Before a second call of a BlockCombine, the thread block must pass a
// barrier, because threads may still be reading the first call's values from shared memory.

struct NoCombine {
  template <typename V, typename Merge>
  __device__ void operator()(V&, const Merge&) {}
};

template <typename V>
struct BlockCombine {
  template <typename Merge>
  __device__ void operator()(V& value, const Merge& merge) {
    __shared__ V values[kWarp];
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) values[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = lane < static_cast<int>(blockDim.x) / kWarp ? values[lane] : V();
    merge(value);
  }
};

constexpr int kMaxClusterBlocks = 16;

#if GPTKERNELS_HOPPER
// Each thread block writes its value to the shared memory of all thread blocks of the cluster, so all of them must have
// started. The constructor announces that this thread block has started, and the call waits for the others. Construct
// the object before the row's loads, which then hide this wait.
template <typename V>
class ClusterCombine {
 public:
  __device__ ClusterCombine() {
    if (threadIdx.x == 0) {
      mbarrier_init(&shared().arrivals);
      mbarrier_init_fence();
      mbarrier_expect(&shared().arrivals, cluster_blocks() * sizeof(V));
    }
    cluster_arrive();
  }

  template <typename Merge>
  __device__ void operator()(V& value, const Merge& merge) {
    BlockCombine<V>()(value, merge);
    cluster_wait();
    if (threadIdx.x < cluster_blocks())
      store_in_block(&shared().values[cluster_rank()], value, &shared().arrivals, threadIdx.x);
    mbarrier_wait(&shared().arrivals, 0);
    const unsigned lane = threadIdx.x % kWarp;
    value = lane < cluster_blocks() ? shared().values[lane] : V();
    merge(value);
  }

 private:
  struct Shared {
    V values[kMaxClusterBlocks];
    uint64_t arrivals;
  };
  static __device__ Shared& shared() {
    __shared__ Shared shared;
    return shared;
  }
};
#endif

// ---- the teams ------------------------------------------------------------------------------------------------------

template <int kLanes_, int kThreads>
struct Lanes {
  static constexpr int kLanes = kLanes_;
  static constexpr bool kOneWarp = true;
  template <typename V>
  using Combine = NoCombine;
  static __device__ int64_t row() { return int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes; }
  static __device__ int thread() { return threadIdx.x % kLanes; }
  static __device__ int threads() { return kLanes; }
};

struct Warp {
  static constexpr int kLanes = kWarp;
  static constexpr bool kOneWarp = true;
  static __device__ int64_t row() { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }
  static __device__ int thread() { return threadIdx.x; }
  static __device__ int threads() { return kWarp; }
};

struct Block {
  static constexpr int kLanes = kWarp;
  static constexpr bool kOneWarp = false;
  template <typename V>
  using Combine = BlockCombine<V>;
  static __device__ int64_t row() { return blockIdx.x; }
  static __device__ int thread() { return threadIdx.x; }
  static __device__ int threads() { return blockDim.x; }
  static __device__ void barrier() { __syncthreads(); }
};

// Each row of the thread block has its own named barrier.
struct BlockPart {
  // A thread block has 16 named barriers, and __syncthreads uses barrier 0.
  static constexpr int kMaxRows = 15;
  static constexpr int kLanes = kWarp;
  static constexpr bool kOneWarp = false;
  static __device__ int64_t row() { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }
  static __device__ int thread() { return threadIdx.x; }
  static __device__ int threads() { return blockDim.x; }
  static __device__ void barrier() {
    random_delay();
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
  }
};

#if GPTKERNELS_HOPPER
struct Cluster {
  static constexpr int kLanes = kWarp;
  static constexpr bool kOneWarp = false;
  template <typename V>
  using Combine = ClusterCombine<V>;
  static __device__ int64_t row() { return blockIdx.x / cluster_blocks(); }
  static __device__ int thread() { return cluster_rank() * blockDim.x + threadIdx.x; }
  static __device__ int threads() { return cluster_blocks() * blockDim.x; }
};
#endif

// ---- sums, any number of times in a kernel --------------------------------------------------------------------------

// Gives every thread of a Warp, Block or BlockPart the team's sums of kN values, with at most one barrier.
//
// Consecutive calls must alternate between slots 0 and 1. One barrier per call is then enough: a thread that writes to
// a slot has passed the barrier of the previous call, which used the other slot. Every thread had read this slot before
// it arrived at that barrier.
template <typename Team, typename A, int kN>
__device__ void team_sums(A (&values)[kN], int slot) {
#pragma unroll
  for (int n = 0; n < kN; ++n) values[n] = warp_reduce<Sum>(values[n]);
  if constexpr (!Team::kOneWarp) {
    __shared__ A warps[2][kWarp][kN];  // [slot][warp of the thread block, row by row][sum]
    const int row_warps = blockDim.x / kWarp;
    A(*row)[kN] = warps[slot] + threadIdx.y * row_warps;
    if (threadIdx.x % kWarp == 0)
#pragma unroll
      for (int n = 0; n < kN; ++n) row[threadIdx.x / kWarp][n] = values[n];
    Team::barrier();
    // Reading all warps' sums is faster than a second round of shuffles.
#pragma unroll
    for (int n = 0; n < kN; ++n) values[n] = row[0][n];
#pragma unroll 4
    for (int warp = 1; warp < row_warps; ++warp)
#pragma unroll
      for (int n = 0; n < kN; ++n) values[n] += row[warp][n];
  }
}

}  // namespace gptkernels::cuda
