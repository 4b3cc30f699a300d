// How wide rows (wide_row.cuh) are laid over the blocks of a device: what shares a row, how many rows it keeps, and how
// many such groups there are at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "launch.cuh"
#include "wide_row.cuh"

namespace gptkernels::cuda {

// A way to lay rows: blocks that share one, blocks on a multiprocessor, and the fewest rows in a ring.
struct WideLayout {
  int cluster;
  int blocks;
  int stages;
};

// The first in which a row fits is taken; small clusters first, since a meeting costs more the more meet. Of a ring's
// rows one is being worked on. Three blocks on a multiprocessor may do with that one: while one of them waits for its
// meeting or its loads, the others work. Before sm_90 those of one block are left.
constexpr WideLayout kWideLayouts[] = {
    {1, 24, 2}, {1, 20, 1}, {1, 6, 1}, {1, 3, 1}, {1, 1, 2}, {2, 1, 2},
    {4, 3, 1},  {8, 3, 1},  {8, 2, 1}, {8, 1, 1}, {1, 1, 1},
};

// Divides a row among up to max_warps warps of a block, and not far fewer, so that the busiest of a multiprocessor's
// four schedulers has the fewest packs to see to. Of equally good divisions that with the most warps.
inline WideShape divide(int64_t packs, const WideLayout& layout, int max_warps) {
  constexpr int kSchedulers = 4;
  WideShape best = {};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int warps = max_warps; warps > max_warps * 3 / 5; --warps) {
    const int64_t part = ceil_div(ceil_div(packs, layout.cluster * warps), kWarp) * kWarp;
    const int64_t busiest = ceil_div(warps * layout.blocks, kSchedulers) * part;
    if (busiest >= least) continue;
    least = busiest;
    best = {.cluster = layout.cluster, .warps = warps, .stages = 0, .part = part, .grid = 0, .shared_bytes = 0};
  }
  return best;
}

// `limit` is the dynamic shared memory that a block alone on a multiprocessor may have; stages = 0: no row fits.
template <typename T, int kArrays>
WideShape wide_shape(int64_t width, bool aligned, int64_t limit, int max_cluster) {
  using Rows = WideRows<T, kArrays, kPack<T>, true>;
  constexpr int kReserved = 1024;  // by CUDA, in each block
  constexpr int64_t kMostStages = 3;
  const int64_t packs = ceil_div(width, kPack<T>) + !aligned;
  const auto try_layout = [&](const WideLayout& layout) {
    WideShape shape = divide(packs, layout, std::max(kWideThreads<T, true> / kWarp / layout.blocks, 1));
    const int64_t available = (limit + kReserved) / layout.blocks - kReserved - Rows::shared_bytes(shape);
    shape.stages = static_cast<int>(std::min(available / Rows::stage_bytes(shape), kMostStages));
    shape.shared_bytes = static_cast<unsigned>(Rows::shared_bytes(shape));
    return shape;
  };
  for (const WideLayout& layout : kWideLayouts) {
    if (layout.cluster > max_cluster) continue;
    const WideShape shape = try_layout(layout);
    if (shape.stages >= layout.stages) return shape;
  }
  return {};
}

// As many clusters as the current device holds at once. Asking for that takes longer than a launch, so that the last
// answer is remembered, behind what it answers.
template <auto kKernel>
int64_t clusters_at_once(const WideShape& shape, const cudaLaunchConfig_t& config) {
  constexpr int kAnswerBits = 16;
  static std::atomic<uint64_t> last;
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t question = ((uint64_t(device) << 4 | shape.cluster) << 6 | shape.warps) << 20 | shape.shared_bytes;
  const uint64_t known = last.load(std::memory_order_relaxed);
  if (known >> kAnswerBits == question) return known % (1 << kAnswerBits);
  int clusters = 0;
  if (shape.cluster > 1) {
    cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config);
  } else {
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kKernel, shape.warps * kWarp, shape.shared_bytes);
    clusters *= multiprocessors();
  }
  clusters = std::clamp(clusters, 1, (1 << kAnswerBits) - 1);
  last.store(question << kAnswerBits | clusters, std::memory_order_relaxed);
  return clusters;
}

// Launches a kernel of (P, WideShape) as a persistent grid of as many clusters as a device holds.
template <auto kKernel, typename P>
void launch_wide(const P& p, WideShape shape, Stream stream) {
  cudaLaunchAttribute cluster = cluster_of(shape.cluster);
  cudaLaunchConfig_t config = launch_config(shape.cluster, shape.warps * kWarp, shape.shared_bytes, stream,
                                            shape.cluster > 1 ? &cluster : nullptr);
  shape.grid = static_cast<unsigned>(std::min(p.rows, clusters_at_once<kKernel>(shape, config)) * shape.cluster);
  config.gridDim = dim3(shape.grid);
  cudaLaunchKernelEx(&config, kKernel, p, shape);
}

// A row at a block, which reads it from memory in each pass.
template <typename T, int kArrays, int kVec, auto kKernel, typename P>
void launch_unkept(const P& p, Stream stream) {
  WideShape shape = divide(ceil_div(p.width, kVec) + 1, {1, 1, 0}, kWideThreads<T, false> / kWarp);
  shape.shared_bytes = static_cast<unsigned>(WideRows<T, kArrays, kVec, false>::shared_bytes(shape));
  launch_wide<kKernel>(p, shape, stream);
}

template <typename T, int kArrays, auto kKept, auto kUnkept, typename P>
void launch_wide_rows(const P& p, bool aligned, Stream stream) {
  const int max_cluster = built_for_hopper<kKept>() ? 8 : 1;
  const WideShape shape = wide_shape<T, kArrays>(p.width, aligned, max_dynamic_shared_memory<kKept>(), max_cluster);
  if (shape.stages)
    launch_wide<kKept>(p, shape, stream);
  else
    launch_unkept<T, kArrays, kPack<T>, kUnkept>(p, stream);
}

}  // namespace gptkernels::cuda
