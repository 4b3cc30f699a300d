// Softmax over the rows of a matrix, and its backward: over whole rows, or over the columns that the causal mask
// leaves.
//
// Every input is read once and the output written once, so the time is that of the bytes, if only enough of them are
// under way at any time. Where a row stays between its load and its store:
//
//   up to 128 packs of 16 bytes    in registers of 8, 16 or 32 lanes                softmax_*_lanes_kernel
//   up to 4096 packs (64 KB)       in registers of a block                          softmax_*_block_kernel
//   up to about 160 KB             in registers and shared memory of a block        softmax_*_block_kernel
//   up to 4 MB (from sm_90 on)     in those of a cluster of up to 16 blocks         softmax_*_cluster_kernel
//   else                           nowhere: read in each pass (wide_row.cuh)        softmax_*_simple_kernel
//
// A thread writes only columns that it has read itself, so the output may take the place of an input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/launch.cuh"
#include "common/row.cuh"
#include "common/teams.cuh"
#include "common/wide_row_launch.cuh"
#include "softmax_backward.cuh"
#include "softmax_forward.cuh"

namespace gptkernels::cuda {

constexpr int kSoftmaxItems = 4;  // packs a thread in registers: 32 to 40 registers in the forward, 64 in the backward

// How the threads of a block hold a row of so many packs, or their block's part of it, of each of `arrays` arrays: what
// registers leave over is in shared memory.
struct BlockShape {
  unsigned threads;
  int more;  // packs a thread in shared memory, of each array
  int64_t shared_bytes;

  BlockShape(int64_t packs, int arrays, int64_t threads)
      : threads(static_cast<unsigned>(threads)),
        more(static_cast<int>(std::max<int64_t>(ceil_div(packs, threads) - kSoftmaxItems, 0))),
        shared_bytes(arrays * more * threads * 16) {}
};

// The fewest threads, in whole warps, that hold so many packs with `items` each.
inline int64_t threads_for(int64_t packs, int64_t items) {
  return ceil_div(ceil_div(packs, items), kWarp) * kWarp;
}

inline BlockShape block_shape(int64_t packs, int arrays, int64_t most_threads) {
  const int64_t items = std::max<int64_t>(ceil_div(packs, most_threads), kSoftmaxItems);
  return {packs, arrays, threads_for(packs, items)};
}

// What packs beyond registers take into account (kLines): those of the line in which a row begins.
template <typename T>
int64_t packs_on_lines(int64_t width, const T* base) {
  const bool begin_there = width * sizeof(T) % 128 == 0 && reinterpret_cast<uintptr_t>(base) % 128 == 0;
  return width / kPack<T> + (begin_there ? 0 : 7);
}

struct ClusterShape {
  int64_t blocks;
  BlockShape block;
};

// The fewest blocks with at most 32 KB of a row each: then a multiprocessor has many, of many rows, and some of them
// load while others compute or meet. Threads have at most 12 packs, so that there are enough of them.
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

// The most blocks, 1 or a power of 2, that a cluster of this kernel has on the current device, whatever their shape.
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

// Calls launch(config, block) with a cluster for every row, if a cluster holds one. No memory has more of such rows
// than a grid has blocks.
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

// Calls lanes(kLanes, kItems, kSingles) with these as types, or beyond what a warp holds wider(kSingles). Nobody looks
// for singles where packs alone make up the rows, and narrow ones then have no idle lanes.
template <typename T, typename ByLanes, typename Wider>
void by_lanes(int64_t width, bool aligned, const ByLanes& lanes, const Wider& wider) {
  const int64_t packs = width / kPack<T>;
  const auto by_warp = [&](auto singles) {
    const int64_t items = std::max<int64_t>(ceil_div(packs, kWarp), 1);
    if (items > kSoftmaxItems) return wider(singles);
    constexpr int kFewest = singles.value ? 1 : 2;
    with_row_items<kFewest, kSoftmaxItems>(static_cast<int>(items), [&](auto i) { lanes(Items<32>{}, i, singles); });
  };
  if (!aligned) return by_warp(std::true_type{});
  if (packs <= 8) return lanes(Items<8>{}, Items<1>{}, std::false_type{});
  if (packs <= 16) return lanes(Items<8>{}, Items<2>{}, std::false_type{});
  if (packs <= 32) return lanes(Items<16>{}, Items<2>{}, std::false_type{});
  by_warp(std::false_type{});
}

// Calls block(kItems) with the packs a thread as a type, if a block of so many threads holds a row in registers: 4, or
// 3 where with 4 more of them would be none of the row's.
template <bool kSingles, typename ByBlock>
bool by_block(int64_t packs, int64_t most_threads, const ByBlock& block) {
  if (packs > most_threads * kSoftmaxItems) return false;
  if constexpr (!kSingles) {
    const int64_t threads = threads_for(packs, 3);
    if (threads <= most_threads && threads * 3 < threads_for(packs, 4) * 4) {
      block(Items<3>{});
      return true;
    }
  }
  block(Items<kSoftmaxItems>{});
  return true;
}

// One launch can have a block for every row. More rows than that take the simple way.
template <typename P>
bool fits_grid(const P& p) {
  return p.rows <= std::numeric_limits<int>::max();
}

// What more than a warp holds. Under the mask the look for singles costs nothing: kSingles is true there.
template <bool kCausal, bool kSingles, typename T>
void launch_forward_wide(const SoftmaxRows<T>& p, Stream stream) {
  const int64_t packs = p.width / kPack<T>;
  constexpr int kThreads = kForwardThreads<T, kSingles, kCausal, false>;
  if (by_block<kSingles>(packs, kThreads, [&](auto items) {
        softmax_forward_block_kernel<T, items.value, kSingles, kCausal, false>
            <<<grid_size(p.rows), static_cast<unsigned>(threads_for(packs, items.value)), 0, stream>>>(p);
      }))
    return;

  const int64_t line_packs = packs_on_lines(p.width, p.out);
  constexpr int kMoreThreads = kForwardThreads<T, kSingles, kCausal, true>;
  if constexpr (!kCausal) {
    constexpr auto kernel = softmax_forward_block_kernel<T, kSoftmaxItems, kSingles, kCausal, true>;
    const BlockShape shape = block_shape(line_packs, 1, kMoreThreads);
    if (shape.shared_bytes <= max_dynamic_shared_memory<kernel>() / 2 - 1024)
      return kernel<<<grid_size(p.rows), shape.threads, shape.shared_bytes, stream>>>(p);
  }
  constexpr auto kernel = softmax_forward_cluster_kernel<T, kSoftmaxItems, kSingles, kCausal>;
  if (launch_clusters<kernel, kMoreThreads>(p.rows, line_packs, 1, stream, [&](const auto& config, const BlockShape&) {
        cudaLaunchKernelEx(&config, kernel, p);
      }))
    return;
  launch_unkept<T, 1, kPack<T>, softmax_forward_simple_kernel<T, kPack<T>, kCausal>>(p, stream);
}

template <bool kCausal, typename T>
void launch_forward_registers(const SoftmaxRows<T>& p, Stream stream) {
  by_lanes<T>(
      p.width, packs<T>(p.width, p.out, p.x),
      [&](auto lanes, auto items, auto singles) {
        constexpr int kThreads = kLanesThreads<items.value>;
        const unsigned grid = grid_size(ceil_div(p.rows, kThreads / lanes.value));
        softmax_forward_lanes_kernel<T, lanes.value, items.value, singles.value, kCausal>
            <<<grid, kThreads, 0, stream>>>(p);
      },
      [&](auto singles) { launch_forward_wide<kCausal, kCausal || singles.value>(p, stream); });
}

template <bool kCausal, bool kSingles, typename T>
void launch_backward_wide(const SoftmaxBackwardRows<T>& p, Stream stream) {
  const int64_t packs = p.width / kPack<T>;
  constexpr int kThreads = 1024;
  if (by_block<kSingles>(packs, kThreads, [&](auto items) {
        softmax_backward_block_kernel<T, items.value, kSingles, kCausal, false>
            <<<grid_size(p.rows), static_cast<unsigned>(threads_for(packs, items.value)), 0, stream>>>(p, 0);
      }))
    return;

  const int64_t line_packs = packs_on_lines(p.width, p.dx);
  if constexpr (!kCausal) {
    // There is little to compute: one block to a multiprocessor suffices.
    constexpr auto kernel = softmax_backward_block_kernel<T, kSoftmaxItems, kSingles, kCausal, true>;
    const BlockShape shape = block_shape(line_packs, 2, kThreads);
    if (shape.shared_bytes <= max_dynamic_shared_memory<kernel>())
      return kernel<<<grid_size(p.rows), shape.threads, shape.shared_bytes, stream>>>(p, shape.more);
  }
  constexpr auto kernel = softmax_backward_cluster_kernel<T, kSoftmaxItems, kSingles, kCausal>;
  if (launch_clusters<kernel, kThreads>(
          p.rows, line_packs, 2, stream,
          [&](const auto& config, const BlockShape& shape) { cudaLaunchKernelEx(&config, kernel, p, shape.more); }))
    return;
  launch_unkept<T, 2, kPack<T>, softmax_backward_simple_kernel<T, kPack<T>, kCausal>>(p, stream);
}

template <bool kCausal, typename T>
void launch_backward_registers(const SoftmaxBackwardRows<T>& p, Stream stream) {
  by_lanes<T>(
      p.width, packs<T>(p.width, p.dx, p.dout, p.out),
      [&](auto lanes, auto items, auto singles) {
        constexpr int kThreads = kLanesThreads<items.value>;
        const unsigned grid = grid_size(ceil_div(p.rows, kThreads / lanes.value));
        softmax_backward_lanes_kernel<T, lanes.value, items.value, singles.value, kCausal>
            <<<grid, kThreads, 0, stream>>>(p);
      },
      [&](auto singles) { launch_backward_wide<kCausal, kCausal || singles.value>(p, stream); });
}

// The simple way, an element at a time and a row read in each pass, is for float64 and what the others leave out:
// arrays whose rows begin at different places of a pack; scales that are not positive, or so small that x - max(x)
// overflows where scale * (x - max(x)) does not; rows beyond a grid.

template <bool kCausal, typename T>
Status softmax_forward_rows(const SoftmaxRows<T>& p, Stream stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  bool registers = false;
  if constexpr (!std::is_same_v<T, double>) {
    registers = in_step(p.out, p.x) && fits_grid(p) && p.scale >= 1e-30f;
    if (registers) launch_forward_registers<kCausal>(p, stream);
  }
  if (!registers) launch_unkept<T, 1, 1, softmax_forward_simple_kernel<T, 1, kCausal>>(p, stream);
  return cudaGetLastError();
}

template <bool kCausal, typename T>
Status softmax_backward_rows(const SoftmaxBackwardRows<T>& p, Stream stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  bool registers = false;
  if constexpr (!std::is_same_v<T, double>) {
    registers = in_step(p.dx, p.dout, p.out) && fits_grid(p);
    if (registers) launch_backward_registers<kCausal>(p, stream);
  }
  if (!registers) launch_unkept<T, 2, 1, softmax_backward_simple_kernel<T, 1, kCausal>>(p, stream);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
