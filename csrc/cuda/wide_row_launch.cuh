// The launch shape of a kernel on wide rows (wide_row.cuh): how many blocks share a row, how many stages their rings
// have, and how many clusters are resident.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "common/launch.cuh"
#include "wide_row.cuh"

namespace gptkernels::cuda {

struct WideLayout {
  int cluster;  // blocks that share a row
  int blocks;   // on an SM
  int stages;   // the least for a ring
};

// The first layout in which a row fits is taken. Small clusters come first, since a larger one synchronises more
// slowly. One stage of a ring is in use, the others load. With three or more blocks on an SM one stage is enough: while
// one block waits for its load or for the others of its cluster, the other blocks compute. Before sm_90 there are no
// clusters.
constexpr WideLayout kWideLayouts[] = {
    {1, 24, 2}, {1, 20, 1}, {1, 6, 1}, {1, 3, 1}, {1, 1, 2}, {2, 1, 2},
    {4, 3, 1},  {8, 3, 1},  {8, 2, 1}, {8, 1, 1}, {1, 1, 1},
};

// Divides a row among at most max_warps warps of a block (at least 3/5 of them), so that the busiest of an SM's four
// schedulers has the fewest packs. Of equally good divisions, the one with the most warps.
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

// `limit` is the most dynamic shared memory of a block that is alone on its SM. stages = 0: a row does not fit.
template <typename T>
WideShape wide_shape(int64_t width, bool aligned, int64_t limit, int max_cluster) {
  using Rows = WideRows<T>;
  constexpr int kReserved = 1024;  // bytes that CUDA reserves in each block
  constexpr int64_t kMostStages = 3;
  const int64_t packs = ceil_div(width, kPack<T>) + !aligned;
  const auto try_layout = [&](const WideLayout& layout) {
    WideShape shape = divide(packs, layout, std::max(kWideThreads<T> / kWarp / layout.blocks, 1));
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

// The number of clusters that are resident on the current device. The query takes longer than a launch, so the last
// answer is cached together with its question, in one atomic word.
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

// Launches a kernel of (P, WideShape) with one resident wave of clusters.
template <auto kKernel, typename P>
void launch_wide(const P& p, WideShape shape, Stream stream) {
  cudaLaunchAttribute cluster = cluster_of(shape.cluster);
  cudaLaunchConfig_t config = launch_config(shape.cluster, shape.warps * kWarp, shape.shared_bytes, stream,
                                            shape.cluster > 1 ? &cluster : nullptr);
  shape.grid = static_cast<unsigned>(std::min(p.rows, clusters_at_once<kKernel>(shape, config)) * shape.cluster);
  config.gridDim = dim3(shape.grid);
  cudaLaunchKernelEx(&config, kKernel, p, shape);
}

// Returns false if a row fits in no layout.
template <typename T, auto kKernel, typename P>
bool launch_wide_rows(const P& p, bool aligned, Stream stream) {
  const int max_cluster = built_for_hopper<kKernel>() ? 8 : 1;
  const WideShape shape = wide_shape<T>(p.width, aligned, max_dynamic_shared_memory<kKernel>(), max_cluster);
  if (shape.stages) launch_wide<kKernel>(p, shape, stream);
  return shape.stages > 0;
}

}  // namespace gptkernels::cuda
