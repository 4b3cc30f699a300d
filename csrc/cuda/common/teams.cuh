// Teams: the threads that share a row of a matrix. A kernel over rows is a template over its team, which says
//
//   row()                the row of this thread's team
//   thread(), threads()  this thread's number in its team, and how many threads the team has
//   kLanes, kOneWarp     how many lanes of a warp share a row, and whether these are the whole team
//
//   team           threads of a row       rows of a block     combine values by        used by
//   -------------  ---------------------  ------------------  -----------------------  -----------------------------
//   Lanes<k, n>    k: 8, 16 or 32 lanes   n / k               shuffles                 softmax, fused_classifier
//   Warp           32                     blockDim.y          shuffles                 layernorm
//   Block          blockDim.x             1                   shared memory            layernorm forward, softmax,
//                                                                                      fused_classifier
//   BlockPart      blockDim.x             blockDim.y          shared memory            layernorm backward
//   Cluster        2 to 16 blocks         1 for a cluster     distributed shared mem.  softmax, fused_classifier
//
// Threads 0, 1, 2, ... of a team take packs 0, 1, 2, ... of 16 bytes, so that a warp accesses 512 neighbouring bytes. A
// row of 768 bfloat16 is 96 packs, which a Warp holds as 3 packs per thread:
//
//   column   0     8     16         248   256              504   512              760
//          +-----+-----+-----+---+-----+-----+-----+---+-----+-----+-----+---+-----+
//   lane   |  0  |  1  |  2  |...| 31  |  0  |  1  |...| 31  |  0  |  1  |...| 31  |
//          +-----+-----+-----+---+-----+-----+-----+---+-----+-----+-----+---+-----+
//           packs[0] of each lane       packs[1]              packs[2]
//
// Where a team keeps its row while it works on it:
//
//   type       where the row is                       used by
//   ---------  -------------------------------------  ------------------------------------------------------------
//   RowPart    registers, the rest in shared memory   softmax, fused_classifier: any width and alignment, up to 4 MB
//   Row        registers                              layernorm: whole packs, up to 16384 bfloat16
//   RowRing    a ring in shared memory, then a Row    layernorm backward: a block per SM walks over all rows
//   (none)     read from memory again in each pass    the *_simple_kernels: any width, alignment, dtype
//
// They are in row_part.cuh, row.cuh, ../layernorm_ring.cuh and simple_row.cuh. Two types hold rows in
// registers because their kernels are limited by different things. A RowPart is for kernels limited by the memory: it
// takes any row and 4 packs per thread. layernorm's are limited by instructions: a Row has up to 7 packs per thread and
// knows at compile time which of them need no bounds check, which is 3 to 7 % of its kernels' time (docs/layernorm.md).
#pragma once

#include <cstdint>

#include "hopper.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {

// ---- combining one value of every thread, once in a kernel ----------------------------------------------------------

// meeting(value, merge): every thread gets the combination of all threads' values. `value` is already the same in all
// lanes of a warp; merge(value) combines the values of a warp's lanes. V() must be neutral.

struct NoMeeting {
  template <typename V, typename Merge>
  __device__ void operator()(V&, const Merge&) {}
};

template <typename V>
struct BlockMeeting {
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

constexpr int kMostBlocks = 16;  // of a cluster

#if GPTKERNELS_HOPPER
// Each block sends its value to all blocks and waits for theirs. A block must have started before others may write to
// its shared memory; constructing the meeting before the loads hides that wait behind them.
template <typename V>
class ClusterMeeting {
 public:
  __device__ ClusterMeeting() {
    if (threadIdx.x == 0) {
      mbarrier_init(&shared().met);
      mbarrier_init_fence();
      mbarrier_expect(&shared().met, cluster_blocks() * sizeof(V));
    }
    cluster_arrive();
  }

  template <typename Merge>
  __device__ void operator()(V& value, const Merge& merge) {
    BlockMeeting<V>()(value, merge);
    cluster_wait();
    if (threadIdx.x < cluster_blocks())
      store_in_block(&shared().values[cluster_rank()], value, &shared().met, threadIdx.x);
    mbarrier_wait(&shared().met, 0);
    const unsigned lane = threadIdx.x % kWarp;
    value = lane < cluster_blocks() ? shared().values[lane] : V();
    merge(value);
  }

 private:
  struct Shared {
    V values[kMostBlocks];
    uint64_t met;
  };
  static __device__ Shared& shared() {
    __shared__ Shared shared;
    return shared;
  }
};
#endif

// ---- the teams ------------------------------------------------------------------------------------------------------

// Several narrow rows per warp. The block is one-dimensional, with kThreads threads.
template <int kLanes_, int kThreads>
struct Lanes {
  static constexpr int kLanes = kLanes_;
  static constexpr bool kOneWarp = true;
  template <typename V>
  using Meeting = NoMeeting;
  static __device__ int64_t row() { return int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes; }
  static __device__ int thread() { return threadIdx.x % kLanes; }
  static __device__ int threads() { return kLanes; }
};

// blockDim.x is 32.
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
  using Meeting = BlockMeeting<V>;
  static __device__ int64_t row() { return blockIdx.x; }
  static __device__ int thread() { return threadIdx.x; }
  static __device__ int threads() { return blockDim.x; }
  static __device__ void barrier() { __syncthreads(); }
};

// Several rows of several warps each in one block. Every row has a named barrier of its own. CUDA has 16 of these per
// block, and few blocks with that many fit on an SM: this team is for kernels with one block per SM.
struct BlockPart {
  static constexpr int kMostRows = 15;  // of a block
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
  using Meeting = ClusterMeeting<V>;
  static __device__ int64_t row() { return blockIdx.x / cluster_blocks(); }
  static __device__ int thread() { return cluster_rank() * blockDim.x + threadIdx.x; }
  static __device__ int threads() { return cluster_blocks() * blockDim.x; }
};
#endif

// ---- sums, any number of times --------------------------------------------------------------------------------------

// Adds kN values of every thread over its team, with one barrier. Consecutive calls pass slots 0 and 1 in turn, so a
// call needs no second barrier: a thread that writes to a slot has passed the barrier of the other slot's call, and
// before that barrier all threads had read this slot. For Warp, Block and BlockPart.
template <typename Team, typename A, int kN>
__device__ void team_sums(A (&values)[kN], int slot) {
#pragma unroll
  for (int n = 0; n < kN; ++n) values[n] = warp_reduce<Sum>(values[n]);
  if constexpr (!Team::kOneWarp) {
    __shared__ A warps[2][kWarp][kN];  // all warps of a block, row by row
    const int row_warps = blockDim.x / kWarp;
    A(*row)[kN] = warps[slot] + threadIdx.y * row_warps;
    if (threadIdx.x % kWarp == 0)
#pragma unroll
      for (int n = 0; n < kN; ++n) row[threadIdx.x / kWarp][n] = values[n];
    Team::barrier();
    // Every thread adds these few values itself, which takes less time than a second round of shuffles.
#pragma unroll
    for (int n = 0; n < kN; ++n) values[n] = row[0][n];
#pragma unroll 4
    for (int warp = 1; warp < row_warps; ++warp)
#pragma unroll
      for (int n = 0; n < kN; ++n) values[n] += row[warp][n];
  }
}

}  // namespace gptkernels::cuda
