// Softmax over the rows of a matrix, and its backward: over whole rows, or over the columns that the causal mask
// leaves.
//
// Every input is read once and the output is written once, so with enough loads in flight the kernels run at the
// memory's rate. Between its load and its store a row stays
//
//   up to 128 packs of 16 bytes    in registers of 8, 16 or 32 lanes             softmax_*_lanes_kernel
//   up to 4096 packs (64 KB)       in registers of a block                       softmax_*_block_kernel
//   up to about 160 KB             in registers and shared memory of a block     softmax_*_block_kernel
//   up to 4 MB (sm_90 and later)   in those of a cluster of up to 16 blocks      softmax_*_cluster_kernel
//   any other row                  nowhere: both passes read it from memory      softmax_*_simple_kernel
//
// A thread writes only columns that it has read itself, so the output may overwrite an input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/launch.cuh"
#include "common/simple_row.cuh"
#include "common/teams.cuh"
#include "softmax_backward.cuh"
#include "softmax_forward.cuh"

namespace gptkernels::cuda {

constexpr int kSoftmaxItems = 4;  // packs per thread in registers: 32 to 40 registers forward, 64 backward

// The block for a row of so many packs in each of `arrays` arrays, or for a cluster block's part of such a row. Packs
// beyond the registers are in shared memory.
struct BlockShape {
  unsigned threads;
  int overflow;  // packs per thread in shared memory, of each array
  int64_t shared_bytes;

  BlockShape(int64_t packs, int arrays, int64_t threads)
      : threads(static_cast<unsigned>(threads)),
        overflow(static_cast<int>(std::max<int64_t>(ceil_div(packs, threads) - kSoftmaxItems, 0))),
        shared_bytes(arrays * overflow * threads * 16) {}
};

// The fewest whole warps' threads that hold so many packs with `items` each.
inline int64_t threads_for(int64_t packs, int64_t items) {
  return ceil_div(ceil_div(packs, items), kWarp) * kWarp;
}

inline BlockShape block_shape(int64_t packs, int arrays, int64_t most_threads) {
  const int64_t items = std::max<int64_t>(ceil_div(packs, most_threads), kSoftmaxItems);
  return {packs, arrays, threads_for(packs, items)};
}

// The packs of a row, plus those of its first 128-byte line that lie before it (RowColumns' kOnLines).
template <typename T>
int64_t packs_on_lines(int64_t width, const T* base) {
  const bool begin_there = width * sizeof(T) % 128 == 0 && reinterpret_cast<uintptr_t>(base) % 128 == 0;
  return width / kPack<T> + (begin_there ? 0 : 7);
}

struct ClusterShape {
  int64_t blocks;
  BlockShape block;
};

// The fewest blocks with at most 32 KB of the row each. Then an SM has blocks of several rows, some of which load while
// others compute or synchronise. A thread has at most 12 packs, so that there are enough threads.
inline ClusterShape cluster_shape(int64_t packs, int arrays, int64_t most_blocks, int64_t most_threads) {
  constexpr int64_t kPartPacks = 2048 + 7;
  constexpr int64_t kMostItems = 12;
  constexpr int64_t kStep = 256;
  int64_t blocks = 2;
  while (blocks < most_blocks && ceil_div(packs, blocks) > kPartPacks) blocks *= 2;
  const int64_t part = ceil_div(packs, blocks);
  const int64_t threads = std::min(ceil_div(part, kStep * kMostItems) * kStep, most_threads);
  return {blocks, {part, arrays, threads}};
}

// The most blocks, a power of 2, in a cluster of this kernel on the current device, whatever the blocks' shape; 1 if
// there are no clusters.
template <auto kKernel, int kMostThreads>
int64_t most_cluster_blocks() {
  if (!built_for_hopper<kKernel>()) return 1;
  return once_a_device([](int) {
    cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    const cudaLaunchConfig_t config =
        launch_config(kMostBlocks, kMostThreads, max_dynamic_shared_memory<kKernel>(), nullptr, nullptr);
    int most = 1;
    cudaOccupancyMaxPotentialClusterSize(&most, kKernel, &config);
    int blocks = 1;
    while (2 * blocks <= std::min(most, kMostBlocks)) blocks *= 2;
    return blocks;
  });
}

// If a cluster can hold a row, calls launch(config, block) for one cluster per row and returns true. (Rows this wide
// are never too many for a grid.)
template <auto kKernel, int kMostThreads, typename Launch>
bool launch_clusters(int64_t rows, int64_t packs, int arrays, Stream stream, const Launch& launch) {
  const int64_t most_blocks = most_cluster_blocks<kKernel, kMostThreads>();
  const ClusterShape shape = cluster_shape(packs, arrays, most_blocks, kMostThreads);
  if (most_blocks == 1 || shape.block.shared_bytes > max_dynamic_shared_memory<kKernel>()) return false;
  cudaLaunchAttribute cluster = cluster_of(static_cast<unsigned>(shape.blocks));
  launch(launch_config(static_cast<unsigned>(rows * shape.blocks), shape.block.threads, shape.block.shared_bytes,
                       stream, &cluster),
         shape.block);
  return true;
}

// Calls lanes(kLanes, kItems, kHasHeadTail) with the constants for rows that a warp can hold, else wider(kHasHeadTail).
// Rows of whole packs are compiled without head and tail, and narrow ones share a warp.
template <typename T, typename ByLanes, typename Wider>
void by_lanes(int64_t width, bool aligned, const ByLanes& lanes, const Wider& wider) {
  const int64_t packs = width / kPack<T>;
  const auto by_warp = [&](auto head_tail) {
    const int64_t items = std::max<int64_t>(ceil_div(packs, kWarp), 1);
    if (items > kSoftmaxItems) return wider(head_tail);
    constexpr int kFewest = head_tail.value ? 1 : 2;
    with_constant<kFewest, kSoftmaxItems>(static_cast<int>(items),
                                          [&](auto i) { lanes(Constant<32>{}, i, head_tail); });
  };
  if (!aligned) return by_warp(std::true_type{});
  if (packs <= 8) return lanes(Constant<8>{}, Constant<1>{}, std::false_type{});
  if (packs <= 16) return lanes(Constant<8>{}, Constant<2>{}, std::false_type{});
  if (packs <= 32) return lanes(Constant<16>{}, Constant<2>{}, std::false_type{});
  by_warp(std::false_type{});
}

// If the registers of a block hold a row, calls block(kItems) with the packs per thread and returns true. These are 4,
// or 3 where 4 would leave more of them beyond the row's end.
template <bool kHasHeadTail, typename ByBlock>
bool by_block(int64_t packs, int64_t most_threads, const ByBlock& block) {
  if (packs > most_threads * kSoftmaxItems) return false;
  if constexpr (!kHasHeadTail) {
    const int64_t threads = threads_for(packs, 3);
    if (threads <= most_threads && threads * 3 < threads_for(packs, 4) * 4) {
      block(Constant<3>{});
      return true;
    }
  }
  block(Constant<kSoftmaxItems>{});
  return true;
}

// Whether a grid can have a block for every row.
template <typename P>
bool fits_grid(const P& p) {
  return p.rows <= std::numeric_limits<int>::max();
}

template <bool kCausal, typename T>
void launch_forward_simple(const SoftmaxRows<T>& p, Stream stream) {
  const unsigned grid = grid_size(p.rows);
  if (can_vectorize<T>(p.width, p.out, p.x))
    softmax_forward_simple_kernel<T, kPack<T>, kCausal><<<grid, simple_threads<kPack<T>>(p.width), 0, stream>>>(p);
  else
    softmax_forward_simple_kernel<T, 1, kCausal><<<grid, simple_threads<1>(p.width), 0, stream>>>(p);
}

template <bool kCausal, typename T>
void launch_backward_simple(const SoftmaxBackwardRows<T>& p, Stream stream) {
  const unsigned grid = grid_size(p.rows);
  if (can_vectorize<T>(p.width, p.dx, p.dout, p.out))
    softmax_backward_simple_kernel<T, kPack<T>, kCausal><<<grid, simple_threads<kPack<T>>(p.width), 0, stream>>>(p);
  else
    softmax_backward_simple_kernel<T, 1, kCausal><<<grid, simple_threads<1>(p.width), 0, stream>>>(p);
}

// Rows that a warp cannot hold. With the causal mask, edge elements cost no time, so kHasHeadTail is always true.
template <bool kCausal, bool kHasHeadTail, typename T>
void launch_forward_wide(const SoftmaxRows<T>& p, Stream stream) {
  const int64_t packs = p.width / kPack<T>;
  constexpr int kThreads = kForwardThreads<T, kHasHeadTail, kCausal, false>;
  if (by_block<kHasHeadTail>(packs, kThreads, [&](auto items) {
        softmax_forward_block_kernel<T, items.value, kHasHeadTail, kCausal, false>
            <<<grid_size(p.rows), static_cast<unsigned>(threads_for(packs, items.value)), 0, stream>>>(p);
      }))
    return;

  const int64_t line_packs = packs_on_lines(p.width, p.out);
  constexpr int kOverflowThreads = kForwardThreads<T, kHasHeadTail, kCausal, true>;
  if constexpr (!kCausal) {
    constexpr auto kernel = softmax_forward_block_kernel<T, kSoftmaxItems, kHasHeadTail, kCausal, true>;
    const BlockShape shape = block_shape(line_packs, 1, kOverflowThreads);
    if (shape.shared_bytes <= max_dynamic_shared_memory<kernel>() / 2 - 1024)
      return kernel<<<grid_size(p.rows), shape.threads, shape.shared_bytes, stream>>>(p);
  }
  constexpr auto kernel = softmax_forward_cluster_kernel<T, kSoftmaxItems, kHasHeadTail, kCausal>;
  if (launch_clusters<kernel, kOverflowThreads>(
          p.rows, line_packs, 1, stream,
          [&](const auto& config, const BlockShape&) { cudaLaunchKernelEx(&config, kernel, p); }))
    return;
  launch_forward_simple<kCausal>(p, stream);
}

template <bool kCausal, typename T>
void launch_forward_registers(const SoftmaxRows<T>& p, Stream stream) {
  by_lanes<T>(
      p.width, can_vectorize<T>(p.width, p.out, p.x),
      [&](auto lanes, auto items, auto head_tail) {
        constexpr int kThreads = kLanesThreads<items.value>;
        const unsigned grid = grid_size(ceil_div(p.rows, kThreads / lanes.value));
        softmax_forward_lanes_kernel<T, lanes.value, items.value, head_tail.value, kCausal>
            <<<grid, kThreads, 0, stream>>>(p);
      },
      [&](auto head_tail) { launch_forward_wide<kCausal, kCausal || head_tail.value>(p, stream); });
}

template <bool kCausal, bool kHasHeadTail, typename T>
void launch_backward_wide(const SoftmaxBackwardRows<T>& p, Stream stream) {
  const int64_t packs = p.width / kPack<T>;
  constexpr int kThreads = 1024;
  if (by_block<kHasHeadTail>(packs, kThreads, [&](auto items) {
        softmax_backward_block_kernel<T, items.value, kHasHeadTail, kCausal, false>
            <<<grid_size(p.rows), static_cast<unsigned>(threads_for(packs, items.value)), 0, stream>>>(p, 0);
      }))
    return;

  const int64_t line_packs = packs_on_lines(p.width, p.dx);
  if constexpr (!kCausal) {
    // There is little to compute, so one block per SM is enough.
    constexpr auto kernel = softmax_backward_block_kernel<T, kSoftmaxItems, kHasHeadTail, kCausal, true>;
    const BlockShape shape = block_shape(line_packs, 2, kThreads);
    if (shape.shared_bytes <= max_dynamic_shared_memory<kernel>())
      return kernel<<<grid_size(p.rows), shape.threads, shape.shared_bytes, stream>>>(p, shape.overflow);
  }
  constexpr auto kernel = softmax_backward_cluster_kernel<T, kSoftmaxItems, kHasHeadTail, kCausal>;
  if (launch_clusters<kernel, kThreads>(
          p.rows, line_packs, 2, stream,
          [&](const auto& config, const BlockShape& shape) { cudaLaunchKernelEx(&config, kernel, p, shape.overflow); }))
    return;
  launch_backward_simple<kCausal>(p, stream);
}

template <bool kCausal, typename T>
void launch_backward_registers(const SoftmaxBackwardRows<T>& p, Stream stream) {
  by_lanes<T>(
      p.width, can_vectorize<T>(p.width, p.dx, p.dout, p.out),
      [&](auto lanes, auto items, auto head_tail) {
        constexpr int kThreads = kLanesThreads<items.value>;
        const unsigned grid = grid_size(ceil_div(p.rows, kThreads / lanes.value));
        softmax_backward_lanes_kernel<T, lanes.value, items.value, head_tail.value, kCausal>
            <<<grid, kThreads, 0, stream>>>(p);
      },
      [&](auto head_tail) { launch_backward_wide<kCausal, kCausal || head_tail.value>(p, stream); });
}

// The simple kernels also take float64; arrays with different offsets from 16 bytes; more rows than a grid has blocks;
// and scales that are not positive, or so small that x - max(x) overflows where scale * (x - max(x)) does not.

template <bool kCausal, typename T>
Status softmax_forward_rows(const SoftmaxRows<T>& p, Stream stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  bool registers = false;
  if constexpr (!std::is_same_v<T, double>) {
    registers = same_misalignment(p.out, p.x) && fits_grid(p) && p.scale >= 1e-30f;
    if (registers) launch_forward_registers<kCausal>(p, stream);
  }
  if (!registers) launch_forward_simple<kCausal>(p, stream);
  return cudaGetLastError();
}

template <bool kCausal, typename T>
Status softmax_backward_rows(const SoftmaxBackwardRows<T>& p, Stream stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  bool registers = false;
  if constexpr (!std::is_same_v<T, double>) {
    registers = same_misalignment(p.dx, p.dout, p.out) && fits_grid(p);
    if (registers) launch_backward_registers<kCausal>(p, stream);
  }
  if (!registers) launch_backward_simple<kCausal>(p, stream);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
