// Matmuls for sm_90a by wgmma and TMA, for gemm/sm90_gelu.cu and loss/sm90_linear_cross_entropy.cu. Separate warps
// compute the epilogue of a tile while the tensor cores compute the next tile.
//
// A cluster of two thread blocks computes tiles of 256 x 256, 128 rows per thread block. Each thread block loads half
// of the tile's columns of b for both thread blocks (multicast). The warpgroups of a thread block:
//
//   0     one thread loads the operands into a ring in shared memory
//   1, 2  MMA warps: each warpgroup computes 64 rows of the tile, in float32 registers
//   3, 4  epilogue warps
//
// Each MMA warp adds the bias to the complete sums of its 16 rows, rounds them to T, and passes them in shared memory
// to its epilogue warp, where each lane has 8 columns. With kRowsAreK, b is stored as (inner, columns), otherwise as
// (columns, inner).
//
//   struct Epilogue {
//     using Arguments;                   derived from TileProduct<T>, with the epilogue's own arguments
//     static constexpr bool kBias;       whether the bias is added before the sums are rounded
//     static constexpr bool kMayBeIdle;  whether there may be fewer tiles than clusters
//     static __device__ int tiles(const Arguments& p);
//     static __device__ TilePosition tile_at(const Arguments& p, int tile, int rank);
//     static __device__ void run(const Arguments& p, uint8_t* shared_bytes, const Barriers& barriers, int rank);
//   };
#pragma once

#include "../../device.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/ptx/pipeline.cuh"
#include "cuda/ptx/sm80.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace gptkernels::cuda::tile_product {

constexpr int kCluster = 2;                              // thread blocks
constexpr int kRows = 128, kColumns = 256, kInner = 64;  // the thread block's part of a tile; a step sums kInner terms
constexpr int kStages = 3;
constexpr int kThreads = 5 * kWarpgroup;
constexpr int kPairs = 8;  // of an MMA warp and an epilogue warp
constexpr int kWarpRows = 16;

constexpr int kABytes = kRows * kPanelRowBytes;
constexpr int kBBytes = kColumns * kPanelRowBytes;
constexpr int kBPanel = kInner * kPanelRowBytes;  // of 64 columns, if kRowsAreK
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kRoundedRowBytes = 2 * kColumns;
constexpr int kRoundedAt = kStages * kStageBytes;
constexpr int kSumsAt = kRoundedAt + kRows * kRoundedRowBytes;
constexpr int kSumsBytes = kPairs * kColumns * 4;  // two buffers alternate
constexpr int kBiasAt = kSumsAt;                   // kernels with a bias have no sums
constexpr int kMaxBias = 2 * kSumsBytes / 2;
constexpr int kBarriersAt = kSumsAt + 2 * kSumsBytes;
constexpr int kBarriers = 2 * kStages + 2 * kPairs;
constexpr int kSharedBytes = kBarriersAt + 8 * kBarriers;
static_assert(kSharedBytes <= 232448);

template <typename T_>
struct TileProduct {
  using T = T_;
  CUtensorMap a, b;
  T* out;
  const T* bias;  // or null
  int rows;
  int columns;
  int steps;  // of kInner terms
  int tiles;  // of 256 x 256
  int tiles_down;
  int tiles_across;
};

#if GPTKERNELS_WGMMA

struct TilePosition {
  int row;
  int column;
};

// `rounded` completes when the MMA warp has stored its rows, `taken` when the epilogue warp has read them.
struct Barriers {
  uint32_t first;
  __device__ uint32_t full(int slot) const { return first + 8 * slot; }
  __device__ uint32_t empty(int slot) const { return first + 8 * (kStages + slot); }
  __device__ uint32_t rounded(int pair) const { return first + 8 * (2 * kStages + pair); }
  __device__ uint32_t taken(int pair) const { return first + 8 * (2 * kStages + kPairs + pair); }
};

__device__ inline TilePosition tile_position(int down, int across, int rank) {
  return {down * (kCluster * kRows) + rank * kRows, across * kColumns};
}

// ---- warpgroup 0 ----------------------------------------------------------------------------------------------------

template <typename Epilogue, bool kRowsAreK>
__device__ void load_operands(const typename Epilogue::Arguments& p, uint32_t shared, const Barriers& barriers,
                              int rank) {
  constexpr uint16_t kAll = (1 << kCluster) - 1;
  RingPosition<kStages> ring;
  const int tiles = Epilogue::tiles(p);
  for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster) {
    const TilePosition at = Epilogue::tile_at(p, tile, rank);
    for (int step = 0; step < p.steps; ++step) {
      const uint32_t full = barriers.full(ring.slot);
      const uint32_t a = shared + ring.slot * kStageBytes, b = a + kABytes;
      barrier_wait(barriers.empty(ring.slot), ring.phase ^ 1);
      mbarrier_expect(full, kStageBytes);
      tma_load(a, p.a, step * kInner, at.row, full);
      if constexpr (kRowsAreK) {
        constexpr int kPanels = kColumns / kPanelColumns / kCluster;
        for (int i = rank * kPanels; i < (rank + 1) * kPanels; ++i)
          tma_load_multicast(b + i * kBPanel, p.b, at.column + i * kPanelColumns, step * kInner, full, kAll);
      } else {
        constexpr int kPart = kColumns / kCluster;
        tma_load_multicast(b + rank * kPart * kPanelRowBytes, p.b, step * kInner, at.column + rank * kPart, full, kAll);
      }
      ring.advance();
    }
  }
}

// ---- warpgroups 1 and 2 ---------------------------------------------------------------------------------------------

__device__ inline uint32_t rounded_offset(int row, int chunk) {
  return row * kRoundedRowBytes + ((chunk ^ (row % 8)) << 4);
}

// Adds the bias to half of the columns of a warp's 16 rows, rounds the results to T, and stores them in shared memory.
template <bool kBias, typename T>
__device__ void round_half(const float (&sums)[kColumns / 4], uint32_t own, uint32_t bias) {
#pragma unroll
  for (int group = 0; group < kColumns / 128; ++group) {
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = kBias ? load_word(bias + 128 * group + 16 * i) : 0x80008000u;  // -0
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* d = sums + 32 * group + 8 * i + 4 * j;
        const float2 add = unpack_pair<T>(pairs[2 * i + j]);
        words[2 * j] = pack_pair<T>(d[0] + add.x, d[1] + add.y);
        words[2 * j + 1] = pack_pair<T>(d[2] + add.x, d[3] + add.y);
      }
      // These 16 columns are the 16-byte chunks 2 i and 2 i + 1 of a group of 8 chunks. With the swizzle of
      // rounded_offset() they are at `own` ^ 32 i.
      store_matrices((own ^ 32 * i) + 128 * group, words[0], words[1], words[2], words[3]);
    }
  }
}

template <typename Epilogue, bool kRowsAreK>
__device__ void multiply(const typename Epilogue::Arguments& p, uint8_t* shared_bytes, const Barriers& barriers,
                         int rank) {
  using T = typename Epilogue::Arguments::T;
  const uint32_t shared = shared_address(shared_bytes);
  const int lane = threadIdx.x % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int pair = __shfl_sync(~0u, threadIdx.x / 32 - 4, 0);
  const uint32_t rounded = shared + kRoundedAt + pair * kWarpRows * kRoundedRowBytes;
  const uint32_t own = rounded + rounded_offset(lane % 16, lane / 16);
  // Lane 0 releases a stage in thread block 0 of the cluster, lane 1 in thread block 1.
  const uint32_t empty_barriers = in_block(shared_bytes + kBarriersAt + 8 * kStages, lane % kCluster);

  float sums[2][kColumns / 4];  // halves of the columns
  RingPosition<kStages> ring;

  const auto start = [&](auto half, bool first) {
    constexpr int kHalf = decltype(half)::value;
    constexpr int kHalfStep = (kRowsAreK ? 2 * kBPanel : kColumns / 2 * kPanelRowBytes) >> 4;
    // A wgmma descriptor takes the lower 18 bits of an address; the bits above select a thread block of the cluster.
    const uint32_t stage = (shared & 0x3FFFF) + ring.slot * kStageBytes;
    const uint64_t a = panel_descriptor(stage + warpgroup * 64 * kPanelRowBytes);
    const uint64_t b = panel_descriptor(stage + kABytes, kRowsAreK ? kBPanel : 16) + kHalf * kHalfStep;
    pin_registers(sums[kHalf]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i)
      wgmma<T, kRowsAreK>(sums[kHalf], a + i * kStepK, b + i * (kRowsAreK ? kStepRows : kStepK), i > 0 || !first);
    wgmma_commit();
  };
  const auto wait_for_operands = [&] { barrier_wait(barriers.full(ring.slot), ring.phase); };
  const auto release = [&] {
    barrier_arrive_in_block(lane < kCluster, empty_barriers + 8 * ring.slot);
    ring.advance();
  };
  const auto round = [&](auto half, int column) {
    constexpr int kHalf = decltype(half)::value;
    const int first = column + kHalf * (kColumns / 2);
    round_half<Epilogue::kBias, T>(sums[kHalf], own + kHalf * kColumns, shared + kBiasAt + 2 * (first + lane % 4 * 2));
  };
  const auto hand_over = [&](int column) {
    round(Constant<1>{}, column);
    __syncwarp();
    barrier_arrive_if(lane == 0, barriers.rounded(pair));
  };

  // While one half of the columns is rounded, the tensor cores compute the other half's last step or the next tile's
  // first step.
  wait_for_operands();
  start(Constant<0>{}, true);
  start(Constant<1>{}, true);
  const int tiles = Epilogue::tiles(p);
  unsigned taken = 1;
  for (int tile = blockIdx.x / kCluster;;) {
    for (int step = 1; step < p.steps - 1; ++step) {
      wgmma_wait<0>();
      release();
      wait_for_operands();
      start(Constant<0>{}, false);
      start(Constant<1>{}, false);
    }
    wgmma_wait<0>();
    release();
    wait_for_operands();
    start(Constant<0>{}, false);
    start(Constant<1>{}, false);
    const int column = Epilogue::tile_at(p, tile, rank).column;
    wgmma_wait<1>();
    pin_registers(sums[0]);
    barrier_wait(barriers.taken(pair), taken);
    taken ^= 1;
    round(Constant<0>{}, column);
    wgmma_wait<0>();
    pin_registers(sums[1]);
    release();
    tile += gridDim.x / kCluster;
    if (tile >= tiles) return hand_over(column);
    wait_for_operands();
    start(Constant<0>{}, true);
    hand_over(column);
    start(Constant<1>{}, true);
  }
}

// ---- helpers for the epilogues (warpgroups 3 and 4) -----------------------------------------------------------------

__device__ inline uint32_t rounded_rows(const uint8_t* shared_bytes, int pair) {
  return shared_address(shared_bytes) + kRoundedAt + pair * kWarpRows * kRoundedRowBytes;
}

struct Words {
  uint32_t v[4];  // 8 elements
};

__device__ inline Words load_shared(uint32_t shared) {
  Words w;
  load_words(w.v, shared);
  return w;
}

// The compiler would wait at once for a load behind a branch, or one whose value is returned.
template <typename T>
__device__ void load_once(Words& w, const T* global, bool inside) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(w.v[0]), "+r"(w.v[1]), "+r"(w.v[2]), "+r"(w.v[3])
      : "l"(global), "r"(static_cast<int>(inside)));
}

template <typename T>
__device__ void store_global(T* global, const Words& w) {
  *reinterpret_cast<uint4*>(global) = {w.v[0], w.v[1], w.v[2], w.v[3]};
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <typename Epilogue, bool kRowsAreK>
__global__ void __launch_bounds__(kThreads, 1)
    matmul_wgmma_kernel(const __grid_constant__ typename Epilogue::Arguments p) {
  using T = typename Epilogue::Arguments::T;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const Barriers barriers = {shared_address(shared_bytes) + kBarriersAt};
  const int rank = static_cast<int>(cluster_rank());
  if constexpr (Epilogue::kMayBeIdle)
    if (blockIdx.x / kCluster >= Epilogue::tiles(p)) return;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.empty(i), kCluster * kPairs);
    }
    for (int i = 0; i < kPairs; ++i) {
      barrier_init(barriers.rounded(i), 1);
      barrier_init(barriers.taken(i), 1);
    }
    mbarrier_init_fence();
  }
  if constexpr (Epilogue::kBias) {
    T* const bias = reinterpret_cast<T*>(shared_bytes + kBiasAt);
    for (int i = threadIdx.x; i < p.tiles_across * kColumns; i += kThreads)
      bias[i] = p.bias && i < p.columns ? p.bias[i] : T(-0.0f);
  }
  cluster_barrier();

  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    dealloc_registers<24>();
    if (threadIdx.x == 0) load_operands<Epilogue, kRowsAreK>(p, shared_address(shared_bytes), barriers, rank);
  } else if (warpgroup < 3) {
    alloc_registers<160>();
    multiply<Epilogue, kRowsAreK>(p, shared_bytes, barriers, rank);
  } else {
    dealloc_registers<64>();
    Epilogue::run(p, shared_bytes, barriers, rank);
  }
  cluster_barrier();  // until this barrier, the other thread block may write to this one's shared memory
}

#else

template <typename Epilogue, bool kRowsAreK>
__global__ void __launch_bounds__(kStubThreads)
    matmul_wgmma_kernel(const __grid_constant__ typename Epilogue::Arguments p) {}

#endif

// ---- host code ------------------------------------------------------------------------------------------------------

inline int64_t max_clusters() {
  return multiprocessors() / kCluster;
}
inline int64_t tiles_down(int64_t rows) {
  return ceil_div(rows, kCluster * kRows);
}
inline int64_t tiles_across(int64_t columns) {
  return ceil_div(columns, kColumns);
}

// The fraction of the kernel's time for which clusters have tiles, if all tiles take equally long and max_clusters()
// clusters run at once.
inline double busy(int64_t tiles) {
  return static_cast<double>(tiles) / static_cast<double>(ceil_div(tiles, max_clusters()) * max_clusters());
}

template <typename T>
struct Operands {
  const T* a;  // (rows, inner)
  const T* b;  // (inner, columns)
  int64_t rows, columns, inner, a_ld, b_ld;
};

template <typename T>
bool supports(const Operands<T>& p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  if (p.rows < 1 || p.columns < 1 || p.inner <= kInner) return false;
  if (p.rows >= kLargest || p.columns >= kLargest || p.inner >= kLargest) return false;
  if (tiles_down(p.rows) * tiles_across(p.columns) >= kLargest) return false;
  if (p.columns % 8 != 0 || p.a_ld % 8 != 0 || p.b_ld % 8 != 0) return false;
  return all_aligned(p.a, p.b) && tensor_map_encoder();
}

template <bool kRowsAreK, typename T>
TileProduct<T> make_product(const Operands<T>& p, T* out, const T* bias) {
  return {.a = matrix_map<T>(p.a, p.rows, p.inner, p.a_ld, kRows, kInner),
          .b = kRowsAreK ? matrix_map<T>(p.b, p.inner, p.columns, p.b_ld, kInner, kPanelColumns)
                         : matrix_map<T>(p.b, p.columns, p.inner, p.b_ld, kColumns / kCluster, kInner),
          .out = out,
          .bias = bias,
          .rows = static_cast<int>(p.rows),
          .columns = static_cast<int>(p.columns),
          .steps = static_cast<int>(ceil_div(p.inner, kInner)),
          .tiles = static_cast<int>(tiles_down(p.rows) * tiles_across(p.columns)),
          .tiles_down = static_cast<int>(tiles_down(p.rows)),
          .tiles_across = static_cast<int>(tiles_across(p.columns))};
}

template <typename Epilogue, bool kRowsAreK>
cudaError_t launch(const typename Epilogue::Arguments& p, Stream stream) {
  constexpr auto kernel = matmul_wgmma_kernel<Epilogue, kRowsAreK>;
  max_dynamic_shared_memory<kernel>();
  cudaLaunchAttribute cluster = cluster_of(kCluster);
  const int64_t clusters = min(int64_t{p.tiles}, int64_t{max_clusters()});
  const auto blocks = static_cast<unsigned>(kCluster * clusters);
  const cudaLaunchConfig_t config = launch_config(blocks, kThreads, kSharedBytes, stream, &cluster);
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace gptkernels::cuda::tile_product
