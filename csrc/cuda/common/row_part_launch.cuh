// Launches for kernels that load a row once, keep it in registers and shared memory, and store it once (row_part.cuh).
// The width of a row selects the kernel:
//
//   up to 128 packs of 16 bytes    registers of 8, 16 or 32 lanes                      rows_by_lanes_kernel
//   up to 4 packs per thread       registers of a thread block                         rows_by_block_kernel
//   up to about 160 KB             registers and shared memory of a thread block       rows_by_block_kernel
//   up to 4 MB (sm_90 and later;   registers and shared memory of a cluster of up to
//   2.8 MB for two arrays)         16 thread blocks                                    rows_by_cluster_kernel
//
// The computation on a row is an Op:
//
//   struct Op {
//     using T, Arguments;                    Arguments has `rows` and `width`
//     static constexpr RowShapes kShapes;
//     template <bool kHasHeadTail, bool kOverflow>
//     static constexpr int kThreads;         the largest number of threads of a thread block
//     template <typename Team, int kItems, bool kHasHeadTail, bool kOverflow>
//     static __device__ void run(const Arguments& p, uint4* slots, int overflow);   processes the team's row
//   };
//
// `slots` is the thread block's dynamic shared memory. For each array in turn, it contains `overflow` packs per thread.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "launch.cuh"
#include "row_part.cuh"
#include "teams.cuh"

namespace gptkernels::cuda {

constexpr int kRowItems = 4;

struct RowShapes {
  int arrays = 1;
  int resident = 2;
  // If false, rows that do not fit into a thread block's registers use a cluster.
  bool overflow_in_block = true;
  // The cluster's size is doubled until a thread block has at most about this many packs, or until the size is the
  // largest possible.
  int cluster_packs = 2048;
  // The largest number of packs per thread of a cluster; exceeded only if a thread block cannot have enough threads.
  int cluster_items = 12;
  bool wide_head_tail = false;  // if true, aligned rows of more than 128 packs also use kernels with kHasHeadTail
};

// ---- kernels --------------------------------------------------------------------------------------------------------

// Small thread blocks balance the load best.
template <int kItems>
constexpr int kLanesThreads = kItems == 1 ? 128 : 64;

template <typename Op, int kLanes, int kItems, bool kHasHeadTail>
__global__ void __launch_bounds__(kLanesThreads<kItems>) rows_by_lanes_kernel(const typename Op::Arguments p) {
  Op::template run<Lanes<kLanes, kLanesThreads<kItems>>, kItems, kHasHeadTail, false>(p, nullptr, 0);
}

template <typename Op, bool kHasHeadTail, bool kOverflow>
constexpr int kRowThreads = Op::template kThreads<kHasHeadTail, kOverflow>;
template <typename Op, bool kHasHeadTail, bool kOverflow>
constexpr int kRowBlocks = Op::kShapes.resident == 2 ? kTwoBlocks<kRowThreads<Op, kHasHeadTail, kOverflow>> : 0;

template <typename Op, int kItems, bool kHasHeadTail, bool kOverflow>
__global__ void __launch_bounds__(kRowThreads<Op, kHasHeadTail, kOverflow>, kRowBlocks<Op, kHasHeadTail, kOverflow>)
    rows_by_block_kernel(const typename Op::Arguments p, int overflow) {
  extern __shared__ uint4 slots[];
  Op::template run<Block, kItems, kHasHeadTail, kOverflow>(p, slots, overflow);
}

template <typename Op, int kItems, bool kHasHeadTail>
__global__ void __launch_bounds__(kRowThreads<Op, kHasHeadTail, true>, kRowBlocks<Op, kHasHeadTail, true>)
    rows_by_cluster_kernel(const typename Op::Arguments p, int overflow) {
#if GPTKERNELS_HOPPER
  extern __shared__ uint4 slots[];
  Op::template run<Cluster, kItems, kHasHeadTail, true>(p, slots, overflow);
#endif
}

// ---- shapes ---------------------------------------------------------------------------------------------------------

struct BlockShape {
  unsigned threads;
  int overflow;
  int64_t shared_bytes;

  BlockShape(int64_t packs, int arrays, int64_t threads)
      : threads(static_cast<unsigned>(threads)),
        overflow(static_cast<int>(max(ceil_div(packs, threads) - kRowItems, int64_t{0}))),
        shared_bytes(arrays * overflow * threads * 16) {}
};

inline int64_t threads_for(int64_t packs, int64_t items) {
  return ceil_div(ceil_div(packs, items), kWarp) * kWarp;
}

inline BlockShape block_shape(int64_t packs, int arrays, int64_t max_threads) {
  const int64_t items = max(ceil_div(packs, max_threads), int64_t{kRowItems});
  return {packs, arrays, threads_for(packs, items)};
}

// Returns an upper bound on the number of packs from the start of the 128-byte line that contains a row's first pack to
// the end of the row. (With kOverflow, RowColumns places thread 0 at the start of this line.) Up to 7 of these packs
// are in front of the row.
template <typename T>
int64_t packs_on_lines(int64_t width, const T* base) {
  const bool begin_there = width * sizeof(T) % 128 == 0 && reinterpret_cast<uintptr_t>(base) % 128 == 0;
  return width / kPack<T> + (begin_there ? 0 : 7);
}

struct ClusterShape {
  int64_t blocks;
  BlockShape block;
};

// Small clusters let an SM hold thread blocks of several rows, of which some load while others compute or synchronise.
inline ClusterShape cluster_shape(const RowShapes& op, int64_t packs, int64_t max_blocks, int64_t max_threads) {
  constexpr int64_t kStep = 256;
  int64_t blocks = 2;
  while (blocks < max_blocks && ceil_div(packs, blocks) > op.cluster_packs + 7) blocks *= 2;
  const int64_t part = ceil_div(packs, blocks);
  const int64_t threads = min(ceil_div(part, kStep * op.cluster_items) * kStep, max_threads);
  return {blocks, {part, op.arrays, threads}};
}

// Returns the largest possible size of a cluster that is a power of 2, or 1 if clusters are not supported.
template <auto kKernel, int kMaxThreads>
int64_t max_cluster_blocks() {
  if (!built_for_hopper<kKernel>()) return 1;
  return once_a_device([](int) {
    cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    const cudaLaunchConfig_t config =
        launch_config(kMaxClusterBlocks, kMaxThreads, max_dynamic_shared_memory<kKernel>(), nullptr, nullptr);
    int most = 1;
    cudaOccupancyMaxPotentialClusterSize(&most, kKernel, &config);
    int blocks = 1;
    while (2 * blocks <= min(most, kMaxClusterBlocks)) blocks *= 2;
    return blocks;
  });
}

// ---- launches -------------------------------------------------------------------------------------------------------

// Returns false if a cluster cannot hold a row. The grid cannot exceed CUDA's limit, because memory cannot hold so many
// rows of this width.
template <typename Op, bool kHasHeadTail>
bool launch_rows_by_cluster(const typename Op::Arguments& p, int64_t line_packs, Stream stream) {
  constexpr auto kernel = rows_by_cluster_kernel<Op, kRowItems, kHasHeadTail>;
  constexpr int kThreads = kRowThreads<Op, kHasHeadTail, true>;
  const int64_t max_blocks = max_cluster_blocks<kernel, kThreads>();
  const auto [blocks, block] = cluster_shape(Op::kShapes, line_packs, max_blocks, kThreads);
  if (max_blocks == 1 || block.shared_bytes > max_dynamic_shared_memory<kernel>()) return false;
  cudaLaunchAttribute cluster = cluster_of(static_cast<unsigned>(blocks));
  const cudaLaunchConfig_t config =
      launch_config(static_cast<unsigned>(p.rows * blocks), block.threads, block.shared_bytes, stream, &cluster);
  cudaLaunchKernelEx(&config, kernel, p, block.overflow);
  return true;
}

template <typename Op, bool kHasHeadTail>
bool launch_wide_rows(const typename Op::Arguments& p, const typename Op::T* base, Stream stream) {
  const int64_t packs = p.width / kPack<typename Op::T>;
  const unsigned grid = grid_size(p.rows);
  constexpr int kThreads = kRowThreads<Op, kHasHeadTail, false>;
  if (packs <= kThreads * kRowItems) {
    const auto launch = [&](auto items) {
      const unsigned threads = static_cast<unsigned>(threads_for(packs, items.value));
      rows_by_block_kernel<Op, items.value, kHasHeadTail, false><<<grid, threads, 0, stream>>>(p, 0);
    };
    // With 3 packs per thread, fewer packs may be beyond the row's end than with 4.
    if constexpr (!kHasHeadTail)
      if (const int64_t threads = threads_for(packs, 3);
          threads <= kThreads && threads * 3 < threads_for(packs, kRowItems) * kRowItems)
        return launch(Constant<3>{}), true;
    return launch(Constant<kRowItems>{}), true;
  }
  const int64_t line_packs = packs_on_lines(p.width, base);
  if constexpr (Op::kShapes.overflow_in_block) {
    constexpr auto kernel = rows_by_block_kernel<Op, kRowItems, kHasHeadTail, true>;
    constexpr int kResident = Op::kShapes.resident;
    constexpr int kReserved = 1024;  // bytes of shared memory that CUDA reserves per thread block
    const BlockShape block = block_shape(line_packs, Op::kShapes.arrays, kRowThreads<Op, kHasHeadTail, true>);
    if (block.shared_bytes <= max_dynamic_shared_memory<kernel>() / kResident - kReserved * (kResident - 1)) {
      kernel<<<grid, block.threads, block.shared_bytes, stream>>>(p, block.overflow);
      return true;
    }
  }
  return launch_rows_by_cluster<Op, kHasHeadTail>(p, line_packs, stream);
}

// Returns false, without a launch, if the rows are too many or too wide. The address of `base` determines how columns
// are divided into packs (RowColumns); all arrays must have the same offset from a multiple of 16 bytes. `aligned` rows
// start at a multiple of 16 bytes and consist of whole packs.
template <typename Op>
bool launch_rows(const typename Op::Arguments& p, const typename Op::T* base, bool aligned, Stream stream) {
  if (p.rows > std::numeric_limits<int>::max()) return false;
  const int64_t packs = p.width / kPack<typename Op::T>;
  const int items = static_cast<int>(max(ceil_div(packs, kWarp), int64_t{1}));
  const auto by_lanes = [&](auto lanes, auto items, auto head_tail) {
    constexpr int kThreads = kLanesThreads<items.value>;
    rows_by_lanes_kernel<Op, lanes.value, items.value, head_tail.value>
        <<<grid_size(ceil_div(p.rows, kThreads / lanes.value)), kThreads, 0, stream>>>(p);
  };
  const auto by_warp = [&](auto fewest, auto head_tail) {
    constexpr bool kWideHeadTail = Op::kShapes.wide_head_tail || head_tail.value;
    if (items > kRowItems) return launch_wide_rows<Op, kWideHeadTail>(p, base, stream);
    with_constant<fewest.value, kRowItems>(items, [&](auto items) { by_lanes(Constant<32>{}, items, head_tail); });
    return true;
  };
  if (!aligned) return by_warp(Constant<1>{}, std::true_type{});
  if (packs > 32) return by_warp(Constant<2>{}, std::false_type{});
  if (packs <= 8)
    by_lanes(Constant<8>{}, Constant<1>{}, std::false_type{});
  else if (packs <= 16)
    by_lanes(Constant<8>{}, Constant<2>{}, std::false_type{});
  else
    by_lanes(Constant<16>{}, Constant<2>{}, std::false_type{});
  return true;
}

}  // namespace gptkernels::cuda
