// The threads that share a row: neighbouring lanes of a warp, a block, or the blocks of a cluster; and how their warps
// make one value of theirs.
#pragma once

#include <cstdint>

#include "hopper.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {

// meeting(value, merge), once a kernel, where merge(value) gives every lane what the values of a warp's lanes make
// together.

constexpr int kMostBlocks = 16;  // of a cluster

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

#if GPTKERNELS_HOPPER
// Each block sends its value to all and waits for theirs. That every block is there to be sent to is found out while
// the row is on its way: the meeting is made before the loads.
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

// Of a block whose rows have lanes. Small blocks come and go most evenly.
template <int kItems>
constexpr int kLanesThreads = kItems == 1 ? 128 : 64;

template <int kLanes, int kThreads>
struct Lanes {
  static constexpr int kOfWarp = kLanes;
  static constexpr bool kOneWarp = true;
  template <typename V>
  using Meeting = NoMeeting;
  static __device__ int64_t row() { return int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes; }
  static __device__ int thread() { return threadIdx.x % kLanes; }
  static __device__ int threads() { return kLanes; }
};

struct Block {
  static constexpr int kOfWarp = kWarp;
  static constexpr bool kOneWarp = false;
  template <typename V>
  using Meeting = BlockMeeting<V>;
  static __device__ int64_t row() { return blockIdx.x; }
  static __device__ int thread() { return threadIdx.x; }
  static __device__ int threads() { return blockDim.x; }
};

#if GPTKERNELS_HOPPER
struct Cluster {
  static constexpr int kOfWarp = kWarp;
  static constexpr bool kOneWarp = false;
  template <typename V>
  using Meeting = ClusterMeeting<V>;
  static __device__ int64_t row() { return blockIdx.x / cluster_blocks(); }
  static __device__ int thread() { return cluster_rank() * blockDim.x + threadIdx.x; }
  static __device__ int threads() { return cluster_blocks() * blockDim.x; }
};
#endif

}  // namespace gptkernels::cuda
