// A product of two matrices whose rows are the terms (a^T b: the gradient of a linear layer's weight), for sm_90a. The
// terms are many and the tiles few, so several clusters add up the terms of one tile. a's sums over the terms (the
// gradient of the bias) are taken from the operands in shared memory.
//
// A cluster of two blocks takes tiles of 256 x 256 as in gemm/sm90_gelu.cu: each block has 128 of the rows, and the two
// share the columns' operand. Clusters are given equal numbers of steps: as many as possible a share of one tile, all
// from the same terms on, so that what one loads the others find in the L2 cache; the clusters that are left over take
// what remains of the tiles, one after the other. What a cluster adds up of a tile (a segment) goes to the workspace in
// float32, and a second kernel adds the segments in their order.
#include <algorithm>

#include "../../device.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/ptx/pipeline.cuh"
#include "cuda/ptx/sm80.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "sm90_weight_gradient.h"

namespace gptkernels::cuda {
namespace {

constexpr int kCluster = 2;                              // blocks
constexpr int kRows = 128, kColumns = 256, kInner = 64;  // a block's tile; terms of a step
constexpr int kStages = 4;
constexpr int kThreads = 3 * kWarpgroup;

// Shared memory: the ring, its barriers.
constexpr int kPanelBytes = kInner * kPanelRowBytes;  // 64 columns of an operand
constexpr int kAPanels = kRows / kPanelColumns, kBPanels = kColumns / kPanelColumns;
constexpr int kStageBytes = (kAPanels + kBPanels) * kPanelBytes;
constexpr int kBarriersAt = kStages * kStageBytes;
constexpr int kSharedBytes = kBarriersAt + 8 * 2 * kStages;
static_assert(kSharedBytes <= 232448);

// A block's part of a segment in the workspace: of a warpgroup's accumulators (wgmma.cuh), the i-th four of all threads
// lie together.
constexpr int kFours = kColumns / 8;
constexpr int64_t kSegmentFours = int64_t{kCluster} * 2 * kFours * kWarpgroup;

// Which cluster adds up which steps of which tile.
struct Shares {
  int tiles;
  int steps;    // of a tile
  int parts;    // of a tile that a cluster each takes
  int length;   // steps of a part, at most
  int rest;     // steps of a tile after these
  int others;   // clusters that take the rests
  int longest;  // steps of such a cluster

  __host__ __device__ int segments() const { return parts * tiles + others + tiles; }
  __host__ __device__ int part_segment(int part, int tile) const { return part * tiles + tile; }
  // Of the other-th cluster after those with a part.
  __host__ __device__ int rest_segment(int other, int tile) const { return parts * tiles + other + tile; }
};

Shares shares_of(int64_t tiles, int64_t steps, int64_t clusters) {
  const int64_t parts = clusters / tiles, others = clusters - parts * tiles;
  const int64_t length = ceil_div(tiles * steps, clusters);
  const int64_t rest = std::max<int64_t>(steps - parts * length, 0);
  return {.tiles = static_cast<int>(tiles),
          .steps = static_cast<int>(steps),
          .parts = static_cast<int>(parts),
          .length = static_cast<int>(length),
          .rest = static_cast<int>(rest),
          .others = static_cast<int>(others),
          .longest = static_cast<int>(others == 0 ? 0 : ceil_div(tiles * rest, others))};
}

template <typename T>
struct WeightMatmul {
  CUtensorMap a, b;
  float4* segments;
  float* segment_sums;  // (segments, 256), or null: of a's columns
  Shares shares;
  int tiles_across;
};

#if GPTKERNELS_WGMMA

struct Segment {
  int tile;
  int first;  // step
  int steps;
  int index;
};

// Calls visit(Segment) for each segment of this cluster.
template <typename Visit>
__device__ void for_segments(const Shares& s, const Visit& visit) {
  const int cluster = blockIdx.x / kCluster, other = cluster - s.parts * s.tiles;
  if (other < 0) {
    const int part = cluster / s.tiles, tile = cluster % s.tiles;
    const int first = part * s.length, steps = min(s.length, s.steps - first);
    if (steps > 0) visit(Segment{tile, first, steps, s.part_segment(part, tile)});
    return;
  }
  const int end = min((other + 1) * s.longest, s.tiles * s.rest);
  for (int at = other * s.longest; at < end;) {
    const int tile = at / s.rest, into = at % s.rest, steps = min(s.rest - into, end - at);
    visit(Segment{tile, s.parts * s.length + into, steps, s.rest_segment(other, tile)});
    at += steps;
  }
}

struct Barriers {
  uint32_t first;
  __device__ uint32_t full(int slot) const { return first + 8 * slot; }
  __device__ uint32_t empty(int slot) const { return first + 8 * (kStages + slot); }
};
constexpr int kSumWarps = kAPanels;
constexpr int kArrivals = kCluster * 8 + kSumWarps;  // that release a stage

// Called by one thread.
template <typename T>
__device__ void load_operands(const WeightMatmul<T>& p, uint32_t shared, const Barriers& barriers, int rank) {
  constexpr uint16_t kAll = (1 << kCluster) - 1;
  constexpr int kOwn = kBPanels / kCluster;
  RingPosition<kStages> ring;
  for_segments(p.shares, [&](const Segment& segment) {
    const int row = segment.tile / p.tiles_across * (kCluster * kRows) + rank * kRows;
    const int column = segment.tile % p.tiles_across * kColumns;
    for (int step = segment.first; step < segment.first + segment.steps; ++step) {
      const uint32_t full = barriers.full(ring.slot);
      const uint32_t a = shared + ring.slot * kStageBytes, b = a + kAPanels * kPanelBytes;
      barrier_wait(barriers.empty(ring.slot), ring.phase ^ 1);
      mbarrier_expect(full, kStageBytes);
      for (int i = 0; i < kAPanels; ++i)
        tma_load(a + i * kPanelBytes, p.a, row + i * kPanelColumns, step * kInner, full);
      for (int i = rank * kOwn; i < (rank + 1) * kOwn; ++i)
        tma_load_multicast(b + i * kPanelBytes, p.b, column + i * kPanelColumns, step * kInner, full, kAll);
      ring.advance();
    }
  });
}

// Called by one warp for each panel of a: sums over the terms. The tiles of one row of tiles have the same a and take
// turns, step by step.
template <typename T>
__device__ void sum_operand(const WeightMatmul<T>& p, uint32_t shared, const Barriers& barriers, int rank, int panel) {
  const int lane = threadIdx.x % 32;
  RingPosition<kStages> ring;
  for_segments(p.shares, [&](const Segment& segment) {
    float sums[8] = {};
    for (int step = segment.first; step < segment.first + segment.steps; ++step) {
      barrier_wait(barriers.full(ring.slot), ring.phase);
      if (p.segment_sums && step % p.tiles_across == segment.tile % p.tiles_across) {
        const uint32_t at = shared + ring.slot * kStageBytes + panel * kPanelBytes;
#pragma unroll
        for (int i = 0; i < kInner / 4; ++i) {
          uint32_t words[4];
          load_words(words, at + panel_offset(4 * i + lane / 8, lane % 8));
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 x = unpack_pair<T>(words[j]);
            sums[2 * j] += x.x;
            sums[2 * j + 1] += x.y;
          }
        }
        __syncwarp();
      }
      barrier_arrive_if(lane == 0, barriers.empty(ring.slot));
      ring.advance();
    }
    if (!p.segment_sums) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[i] += __shfl_xor_sync(~0u, sums[i], 8);
      sums[i] += __shfl_xor_sync(~0u, sums[i], 16);
    }
    float4* const to = reinterpret_cast<float4*>(p.segment_sums + segment.index * (kCluster * kRows) + rank * kRows +
                                                 panel * kPanelColumns + 8 * lane);
    if (lane < 8) {
      to[0] = {sums[0], sums[1], sums[2], sums[3]};
      to[1] = {sums[4], sums[5], sums[6], sums[7]};
    }
  });
}

template <typename T>
__device__ void multiply(const WeightMatmul<T>& p, uint8_t* shared_bytes, const Barriers& barriers, int rank) {
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  // Lane 0 reports to block 0 that a stage was read, lane 1 to block 1.
  const uint32_t empty_barriers = in_block(shared_bytes + kBarriersAt + 8 * kStages, lane % kCluster);
  const auto release = [&](int slot) { barrier_arrive_in_block(lane < kCluster, empty_barriers + 8 * slot); };
  float sums[kColumns / 2];
  RingPosition<kStages> ring;
  for_segments(p.shares, [&](const Segment& segment) {
    for (int step = 0; step < segment.steps; ++step) {
      barrier_wait(barriers.full(ring.slot), ring.phase);
      // A wgmma descriptor takes the lower 18 bits of an address; the bits above select a block of the cluster.
      const uint32_t stage = (shared_address(shared_bytes) & 0x3FFFF) + ring.slot * kStageBytes;
      const uint64_t a = panel_descriptor(stage + warpgroup * kPanelBytes, kPanelBytes);
      const uint64_t b = panel_descriptor(stage + kAPanels * kPanelBytes, kPanelBytes);
      pin_registers(sums);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kInner / 16; ++i)
        wgmma<T, true, true>(sums, a + i * kStepRows, b + i * kStepRows, i > 0 || step > 0);
      wgmma_commit();
      if (step > 0) {  // the step before is complete
        wgmma_wait<1>();
        release(ring.slot == 0 ? kStages - 1 : ring.slot - 1);
      }
      ring.advance();
    }
    wgmma_wait<0>();
    pin_registers(sums);
    release(ring.slot == 0 ? kStages - 1 : ring.slot - 1);
    float4* const to =
        p.segments + segment.index * kSegmentFours + ((rank * 2 + warpgroup) * kFours) * kWarpgroup + thread;
#pragma unroll
    for (int i = 0; i < kFours; ++i)
      to[i * kWarpgroup] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) matmul_weight_wgmma_kernel(const __grid_constant__ WeightMatmul<T> p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = shared_address(shared_bytes);
  const Barriers barriers = {shared + kBarriersAt};
  const int rank = static_cast<int>(cluster_rank());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.empty(i), kArrivals);
    }
    mbarrier_init_fence();
  }
  cluster_barrier();
  if (threadIdx.x < kWarpgroup) {
    give_registers<72>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) load_operands(p, shared, barriers, rank);
    if (warp > 0 && warp <= kSumWarps) sum_operand(p, shared, barriers, rank, warp - 1);
  } else {
    take_registers<216>();
    multiply(p, shared_bytes, barriers, rank);
  }
  cluster_barrier();  // until then the other block may write here
}

#else

template <typename T>
__global__ void __launch_bounds__(kStubThreads) matmul_weight_wgmma_kernel(const __grid_constant__ WeightMatmul<T> p) {}

#endif

// ---- the second kernel ----------------------------------------------------------------------------------------------

template <typename T>
struct WeightSegments {
  T* out;
  T* a_sums;  // or null
  const float4* segments;
  const float* segment_sums;
  Shares shares;
  int rows;
  int columns;
  int64_t out_ld;
  int tiles_across;
};

// Calls visit(index) for each segment of a tile, in the order of its terms.
template <typename Visit>
__device__ void for_segments_of(const Shares& s, int tile, const Visit& visit) {
  for (int part = 0; part < s.parts && part * s.length < s.steps; ++part) visit(s.part_segment(part, tile));
  if (s.rest == 0) return;
  const int last = ((tile + 1) * s.rest - 1) / s.longest;
  for (int other = tile * s.rest / s.longest; other <= last; ++other) visit(s.rest_segment(other, tile));
}

constexpr int kAddThreads = 256;

// A thread adds four elements of a tile over its segments; the threads of the last blocks, a column's sum each.
template <typename T>
__global__ void __launch_bounds__(kAddThreads) weight_segments_kernel(const WeightSegments<T> p) {
  wait_for_previous_kernel();
  const int64_t index = int64_t(blockIdx.x) * kAddThreads + threadIdx.x;
  const int tile = static_cast<int>(index / kSegmentFours), four = static_cast<int>(index % kSegmentFours);
  if (tile < p.shares.tiles) {
    float4 sum = {};
    for_segments_of(p.shares, tile, [&](int segment) {
      const float4 x = p.segments[segment * kSegmentFours + four];
      sum.x += x.x;
      sum.y += x.y;
      sum.z += x.z;
      sum.w += x.w;
    });
    const int thread = four % kWarpgroup, block = four / kWarpgroup / kFours, lane = thread % 32;
    const int row = tile / p.tiles_across * (kCluster * kRows) + block * 64 + thread / 32 * 16 + lane / 4;
    const int column = tile % p.tiles_across * kColumns + four / kWarpgroup % kFours * 8 + lane % 4 * 2;
    if (column >= p.columns) return;
    T* const out = p.out + row * p.out_ld + column;
    if (row < p.rows) store_narrow<2>(out, {sum.x, sum.y});
    if (row + 8 < p.rows) store_narrow<2>(out + 8 * p.out_ld, {sum.z, sum.w});
    return;
  }
  const int64_t row = index - p.shares.tiles * kSegmentFours;
  if (!p.a_sums || row >= p.rows) return;
  float sum = 0;
  const int first = static_cast<int>(row / (kCluster * kRows)) * p.tiles_across;
  for (int across = 0; across < p.tiles_across; ++across)
    for_segments_of(p.shares, first + across, [&](int segment) {
      sum += p.segment_sums[segment * (kCluster * kRows) + row % (kCluster * kRows)];
    });
  p.a_sums[row] = narrow<T>(sum);
}

// ---- host -----------------------------------------------------------------------------------------------------------

template <typename T>
int64_t tiles_across(const Matmul<T>& p) {
  return ceil_div(p.columns, kColumns);
}

template <typename T>
int64_t tiles(const Matmul<T>& p) {
  return ceil_div(p.rows, kCluster * kRows) * tiles_across(p);
}

template <typename T>
Shares shares_of(const Matmul<T>& p) {
  return shares_of(tiles(p), ceil_div(p.inner, kInner), multiprocessors() / kCluster);
}

// Whether sizes and addresses suit TMA and 32-bit indices, and every cluster has work.
template <typename T>
bool can_serve(const Matmul<T>& p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  const bool plain = p.batches == 1 && p.alpha == 1 && !p.wide_out && !p.accumulate && !p.bias && !p.pre_gelu &&
                     !p.dgelu_at && !p.column_sums;
  if (!plain || !p.a_transposed || p.b_transposed) return false;
  if (p.rows < 1 || p.columns < 1 || p.inner < 1) return false;
  if (p.rows >= kLargest || p.columns >= kLargest || p.inner >= kLargest) return false;
  const int64_t steps = tiles(p) * ceil_div(p.inner, kInner);
  if (steps >= kLargest || steps < multiprocessors()) return false;
  if (p.columns % 2 != 0 || p.out_ld % 2 != 0 || p.a_ld % 8 != 0 || p.b_ld % 8 != 0) return false;
  const auto aligned = [](const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  return aligned(p.a, 16) && aligned(p.b, 16) && aligned(p.out, 4) && tensor_map_encoder() &&
         built_for_wgmma<matmul_weight_wgmma_kernel<T>>();
}

}  // namespace

template <typename T>
int64_t matmul_sm90_weight_tiles(const Matmul<T>& p) {
  return tiles(p);
}

template <typename T>
double matmul_sm90_weight_filled(const Matmul<T>& p) {
  constexpr double kTile = double{kCluster * kRows} * kColumns;
  return static_cast<double>(p.rows) * static_cast<double>(p.columns) / (kTile * static_cast<double>(tiles(p)));
}

template <typename T>
int64_t matmul_sm90_weight_workspace(const Matmul<T>& p) {
  const int64_t segments = shares_of(p).segments();
  return segments *
         (kSegmentFours * int64_t(sizeof(float4)) + (p.a_sums ? kCluster * kRows * int64_t(sizeof(float)) : 0));
}

template <typename T>
bool matmul_sm90_weight_takes(const Matmul<T>& p) {
  if constexpr (sizeof(T) != 2) {
    return false;
  } else {
    return can_serve(p);
  }
}

template <typename T>
cudaError_t matmul_sm90_weight(const Matmul<T>& p, void* workspace, Stream stream) {
  if constexpr (sizeof(T) != 2) {
    return cudaErrorNotSupported;
  } else {
    constexpr auto kernel = matmul_weight_wgmma_kernel<T>;
    const Shares shares = shares_of(p);
    float4* const segments = static_cast<float4*>(workspace);
    float* const segment_sums =
        p.a_sums ? reinterpret_cast<float*>(segments + shares.segments() * kSegmentFours) : nullptr;
    const WeightMatmul<T> problem = {.a = matrix_map<T>(p.a, p.inner, p.rows, p.a_ld, kInner, kPanelColumns),
                                     .b = matrix_map<T>(p.b, p.inner, p.columns, p.b_ld, kInner, kPanelColumns),
                                     .segments = segments,
                                     .segment_sums = segment_sums,
                                     .shares = shares,
                                     .tiles_across = static_cast<int>(tiles_across(p))};
    max_dynamic_shared_memory<kernel>();
    cudaLaunchAttribute cluster = cluster_of(kCluster);
    const auto blocks = static_cast<unsigned>(kCluster * (multiprocessors() / kCluster));
    const cudaLaunchConfig_t config = launch_config(blocks, kThreads, kSharedBytes, stream, &cluster);
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, problem);
    if (error != cudaSuccess) return error;
    const WeightSegments<T> sums = {.out = p.out,
                                    .a_sums = p.a_sums,
                                    .segments = segments,
                                    .segment_sums = segment_sums,
                                    .shares = shares,
                                    .rows = static_cast<int>(p.rows),
                                    .columns = static_cast<int>(p.columns),
                                    .out_ld = p.out_ld,
                                    .tiles_across = problem.tiles_across};
    const int64_t threads = shares.tiles * kSegmentFours + (p.a_sums ? p.rows : 0);
    launch_early<weight_segments_kernel<T>>(grid_size(ceil_div(threads, kAddThreads)), kAddThreads, 0, stream, sums);
    return cudaGetLastError();
  }
}

#define GPTKERNELS_INSTANTIATE(T)                                     \
  template bool matmul_sm90_weight_takes<T>(const Matmul<T>&);        \
  template int64_t matmul_sm90_weight_tiles<T>(const Matmul<T>&);     \
  template double matmul_sm90_weight_filled<T>(const Matmul<T>&);     \
  template int64_t matmul_sm90_weight_workspace<T>(const Matmul<T>&); \
  template cudaError_t matmul_sm90_weight<T>(const Matmul<T>&, void*, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
