// Products for sm_90a, by wgmma and TMA, whose epilogue runs under the next tile's product.
//
// A cluster of two blocks takes tiles of 256 x 256, one after the other; each block 128 rows. A block has a warpgroup
// that loads and two that compute, each 64 x 256 of the tile in float32 registers. The two blocks share the tile's 256
// columns of b: each loads half of them, into both.
//
// When its sums are complete, a warpgroup rounds them (with the bias) to T: 64 registers instead of 128. So the next
// tile's product can start at once, and what is left of the epilogue is done in 8 pieces of 32 columns, each while the
// tensor cores work on a step of that product:
//
//   tensor cores  | tile 1, step 0 | step 1 | ... | step 7 | ... | tile 2, step 0 | ...
//   warps         | tile 0, piece 0| piece 1| ... | piece 7| wait, round, tile 1, piece 0 ...
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "../device.h"
#include "common/hopper.cuh"
#include "common/launch.cuh"
#include "common/partial_sums.cuh"
#include "common/tensor_map.cuh"
#include "common/warpgroups.cuh"
#include "common/wgmma.cuh"
#include "gelu.cuh"
#include "matmul_sm90.h"

#ifndef GK_DEEP
#define GK_DEEP 1
#endif
#ifndef GK_CLUSTER
#define GK_CLUSTER 2
#endif

namespace gptkernels::cuda {
namespace {

constexpr int kCluster = GK_CLUSTER;  // blocks
constexpr int kRows = 128, kColumns = 256, kInner = 64;  // a block's tile; terms of a step
constexpr int kStages = 4;
constexpr int kPieces = 8;                      // of a warpgroup's part of a tile
constexpr int kPieceColumns = kColumns / kPieces;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kConsumerWarps = 8;

// Shared memory: the ring, for each warp two pieces of 16 rows, and for each warpgroup two tiles' column sums.
constexpr int kABytes = kRows * kPanelRowBytes;
constexpr int kBBytes = kColumns * kPanelRowBytes;
constexpr int kBPanel = kInner * kPanelRowBytes;  // 64 columns of b, where its rows are k
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kPieceRowBytes = 2 * kPieceColumns;
constexpr int kPieceBytes = 16 * kPieceRowBytes;
constexpr int kPiecesAt = kStages * kStageBytes;
constexpr int kSumsAt = kPiecesAt + kConsumerWarps * 2 * kPieceBytes;
constexpr int kSumsBytes = 4 * kColumns * 4;  // of a warpgroup and a tile: four warps
constexpr int kBarriersAt = kSumsAt + 2 * 2 * kSumsBytes;
constexpr int kBarriers = 2 * kStages;
constexpr int kSharedBytes = kBarriersAt + 8 * kBarriers;
static_assert(kSharedBytes <= 232448);

enum class Finish { kBias, kGelu, kDgelu };

template <typename T>
struct WgmmaMatmul {
  CUtensorMap a, b;
  T* out;
  T* pre;             // for GELU
  const T* dgelu_at;  // for its gradient
  const T* bias;       // or null
  float* column_sums;  // (row tiles of 64, columns), or null
  int rows;
  int columns;
  int steps;           // of kInner terms
  int tiles;           // of a cluster
  int tiles_across;
};

#if GPTKERNELS_WGMMA

// The byte of a piece at which 16-byte chunk `chunk` of row `row` is: so that 8 rows of a chunk, and 2 rows of 4 chunks,
// are in different banks.
__device__ inline uint32_t piece_offset(int row, int chunk) {
  return row * kPieceRowBytes + ((chunk ^ (row / 2 % 4)) << 4);
}

__device__ inline void cluster_arrive_at(bool one, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred one;\nsetp.ne.b32 one, %1, 0;\n"
      "@one mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(static_cast<int>(one))
      : "memory");
}

// Of a block's part of a tile.
struct TilePosition {
  int row;
  int column;
};

// A lane's part of a tile: 8 columns in each piece, of a row and of the one 8 rows further on.
struct LanePart {
  int64_t offset;  // in the matrices, of the first piece
  int rows_left;   // of the matrix, from there
  int columns_left;

  __device__ bool inside(int piece, int i) const { return rows_left > 8 * i && columns_left > piece * kPieceColumns; }
};

struct Barriers {
  uint32_t first;
  __device__ uint32_t full(int slot) const { return first + 8 * slot; }
  __device__ uint32_t empty(int slot) const { return first + 8 * (kStages + slot); }
};

template <typename T>
__device__ TilePosition tile_at(const WgmmaMatmul<T>& p, int tile, int rank) {
  return {tile / p.tiles_across * (kCluster * kRows) + rank * kRows, tile % p.tiles_across * kColumns};
}

// By one thread: all tiles' operands into the ring.
template <bool kRowsAreK, typename T>
__device__ void load_operands(const WgmmaMatmul<T>& p, uint32_t shared, const Barriers& barriers, int rank) {
  constexpr uint16_t kAll = (1 << kCluster) - 1;
  RingPosition<kStages> ring;
  for (int tile = blockIdx.x / kCluster; tile < p.tiles; tile += gridDim.x / kCluster) {
    const TilePosition at = tile_at(p, tile, rank);
    for (int step = 0; step < p.steps; ++step) {
      const uint32_t full = barriers.full(ring.slot);
      const uint32_t a = shared + ring.slot * kStageBytes, b = a + kABytes;
      barrier_wait(barriers.empty(ring.slot), ring.phase ^ 1);
      mbarrier_expect(full, kStageBytes);
      tma_load(a, p.a, step * kInner, at.row, full);
      if constexpr (kRowsAreK) {
        constexpr int kPanels = kColumns / kPanelColumns / kCluster;  // of each block
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

// Sums over the 8 lanes of a warp that have the same lane % 4: of `values`, 8 columns of a lane, every lane returns the
// total of column lane_column(lane).
__device__ inline float sum_over_rows(const float (&values)[8], int lane) {
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool high = lane & 16;
    const float sent = high ? values[i] : values[i + 4];
    four[i] = (high ? values[i + 4] : values[i]) + __shfl_xor_sync(~0u, sent, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool high = lane & 8;
    const float sent = high ? four[i] : four[i + 2];
    two[i] = (high ? four[i + 2] : four[i]) + __shfl_xor_sync(~0u, sent, 8);
  }
  const bool high = lane & 4;
  const float sent = high ? two[0] : two[1];
  return (high ? two[1] : two[0]) + __shfl_xor_sync(~0u, sent, 4);
}
__device__ inline int lane_column(int lane) {
  return lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
}

__device__ inline uint4 load_shared(uint32_t shared) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(shared) : "memory");
  return x;
}

// What is read once; zeros where not `inside`.
__device__ inline uint4 load_once(const void* global, bool inside) {
  uint4 x = {0, 0, 0, 0};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "l"(global), "r"(static_cast<int>(inside))
      : "memory");
  return x;
}

// Two of them, or what is in `pair`.
__device__ inline void load_bias(uint32_t& pair, const void* global, bool inside) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.b32 %0, [%1];\n}"
               : "+r"(pair)
               : "l"(global), "r"(static_cast<int>(inside))
               : "memory");
}

template <typename T, Finish kFinish, bool kRowsAreK>
__global__ void __launch_bounds__(kThreads, 1) matmul_wgmma_kernel(const __grid_constant__ WgmmaMatmul<T> p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = shared_address(shared_bytes);
  const Barriers barriers = {shared + kBarriersAt};
  const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.empty(i), kCluster * kConsumerWarps);
    }
    mbarrier_init_fence();
  }
  cluster_barrier();

  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 0) load_operands<kRowsAreK>(p, shared, barriers, rank);
  } else {
    take_registers<240>();
    const int thread = threadIdx.x % kWarpgroup;
    const int lane = thread % 32;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
    const int warp = __shfl_sync(~0u, thread / 32, 0);
    const uint32_t pieces = shared + kPiecesAt + (warpgroup * 4 + warp) * 2 * kPieceBytes;
    float* const tile_sums = reinterpret_cast<float*>(shared_bytes + kSumsAt + warpgroup * 2 * kSumsBytes);
    // Accumulators go to a piece as 16 x 8 parts (the next 16 columns are at ^ 32), and come back as 8 columns of rows
    // lane / 4 and lane / 4 + 8 (at + 8 rows).
    const uint32_t part = piece_offset(lane % 16, lane / 16);
    const uint32_t chunk = piece_offset(lane / 4, lane % 4);
    // Which block of the cluster a lane tells that a stage was read.
    const uint32_t empty_barriers = in_block(shared_bytes + kBarriersAt + 8 * kStages, lane % kCluster);

    float sums[kColumns / 2];
    uint32_t rounded[kColumns / 4];  // the tile before
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) rounded[i] = 0;
    TilePosition before = {0, 0};
    LanePart before_part = {};
    bool any_before = false;
    int parity = 0;  // of the tile whose column sums are next
    RingPosition<kStages> ring;

    const auto issue = [&](bool first) {
      const uint32_t stage = (shared & 0x3FFFF) + ring.slot * kStageBytes;
      const uint64_t a = panel_descriptor(stage + warpgroup * 64 * kPanelRowBytes);
      const uint64_t b = panel_descriptor(stage + kABytes, kRowsAreK ? kBPanel : 16);
      pin_registers(sums);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kInner / 16; ++i)
        wgmma<T, kRowsAreK>(sums, a + i * kStepK, b + i * (kRowsAreK ? kStepRows : kStepK), i > 0 || !first);
      wgmma_commit();
    };
    const auto release = [&](int slot) { cluster_arrive_at(lane < kCluster, empty_barriers + 8 * slot); };

    const int own_row = warpgroup * 64 + warp * 16 + lane / 4, own_column = lane % 4 * 8;
    const auto lane_part = [&](TilePosition tile) -> LanePart {
      const int row = tile.row + own_row, column = tile.column + own_column;
      return {static_cast<int64_t>(row) * p.columns + column, p.rows - row, p.columns - column};
    };
    const int64_t next_row = 8 * static_cast<int64_t>(p.columns);

    uint4 ahead[2][2];  // of `pre`, the next two pieces
    const auto load_ahead = [&](const LanePart& at, int piece) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ahead[piece % 2][i] =
            load_once(p.dgelu_at + at.offset + piece * kPieceColumns + i * next_row, at.inside(piece, i));
    };

    // Piece `piece` of the tile before, from `rounded`.
    const auto finish = [&](int piece) {
      const uint32_t buffer = pieces + piece % 2 * kPieceBytes;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_matrices(buffer + (part ^ 32 * i), rounded[8 * piece + 4 * i], rounded[8 * piece + 4 * i + 1],
                       rounded[8 * piece + 4 * i + 2], rounded[8 * piece + 4 * i + 3]);
      __syncwarp();
      uint4 loaded[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) loaded[i] = load_shared(buffer + chunk + 8 * kPieceRowBytes * i);
      float totals[8] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!before_part.inside(piece, i)) continue;
        const int64_t to = before_part.offset + piece * kPieceColumns + i * next_row;
        const uint32_t x[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
        uint4 result = loaded[i];
        if constexpr (kFinish == Finish::kGelu) {
          *reinterpret_cast<uint4*>(p.pre + to) = loaded[i];
          uint32_t y[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 u = unpack_pair<T>(x[j]);
            y[j] = pack_pair<T>(GeluTanh<T>::value(u.x), GeluTanh<T>::value(u.y));
          }
          result = {y[0], y[1], y[2], y[3]};
        } else if constexpr (kFinish == Finish::kDgelu) {
          const uint4 where = ahead[piece % 2][i];
          const uint32_t at_words[4] = {where.x, where.y, where.z, where.w};
          uint32_t y[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 product = unpack_pair<T>(x[j]), u = unpack_pair<T>(at_words[j]);
            const float d0 = product.x * GeluTanh<T>::derivative(u.x);
            const float d1 = product.y * GeluTanh<T>::derivative(u.y);
            y[j] = pack_pair<T>(d0, d1);
            totals[2 * j] += d0;
            totals[2 * j + 1] += d1;
          }
          result = {y[0], y[1], y[2], y[3]};
        }
        *reinterpret_cast<uint4*>(p.out + to) = result;
      }
      if constexpr (kFinish == Finish::kDgelu) {
        if (piece + 2 < kPieces) load_ahead(before_part, piece + 2);
        if (p.column_sums)
          tile_sums[(parity * 4 + warp) * kColumns + piece * kPieceColumns + own_column + lane_column(lane)] =
              sum_over_rows(totals, lane);
      }
    };
    // After the last piece: the warps' sums.
    const auto finish_sums = [&] {
      if (kFinish != Finish::kDgelu || !p.column_sums) return;
      warpgroup_barrier(1 + warpgroup);
      float* const to = p.column_sums + static_cast<int64_t>(before.row / 64 + warpgroup) * p.columns;
#pragma unroll
      for (int i = thread; i < kColumns; i += kWarpgroup) {
        float total = tile_sums[parity * 4 * kColumns + i];
        for (int j = 1; j < 4; ++j) total += tile_sums[(parity * 4 + j) * kColumns + i];
        if (before.column + i < p.columns) to[before.column + i] = total;
      }
      parity ^= 1;
    };

    for (int tile = blockIdx.x / kCluster; tile < p.tiles; tile += gridDim.x / kCluster) {
      const TilePosition at = tile_at(p, tile, rank);
      int held = 0;  // the slot of the step before
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        barrier_wait(barriers.full(ring.slot), ring.phase);
        issue(piece == 0);
        if (any_before) finish(piece);
        if (GK_DEEP) {
          if (piece > 0) {
            wgmma_wait<1>();
            release(held);
          }
          held = ring.slot;
          ring.advance();
        } else {
          wgmma_wait<0>();
          pin_registers(sums);
          release(ring.slot);
          ring.advance();
        }
      }
      if (any_before) finish_sums();
      // What the end of the tile needs is loaded here, where `rounded` is free. Two biases a word; -0 changes no sum.
      before_part = lane_part(at);
      if constexpr (kFinish == Finish::kDgelu) {
        load_ahead(before_part, 0);
        load_ahead(before_part, 1);
      }
      uint32_t bias[kColumns / 8];
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        bias[i] = 0x80008000u;
        if constexpr (kFinish != Finish::kDgelu)
          load_bias(bias[i], p.bias + at.column + 8 * i + lane % 4 * 2, p.bias && at.column + 8 * i < p.columns);
      }
      for (int step = kPieces; step < p.steps; ++step) {
        barrier_wait(barriers.full(ring.slot), ring.phase);
        issue(false);
        if (GK_DEEP) {
          wgmma_wait<1>();
          release(held);
          held = ring.slot;
          ring.advance();
        } else {
          wgmma_wait<0>();
          pin_registers(sums);
          release(ring.slot);
          ring.advance();
        }
      }
      wgmma_wait<0>();
      pin_registers(sums);
      if (GK_DEEP) release(held);
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        const float2 b = kFinish == Finish::kDgelu ? float2{0, 0} : unpack_pair<T>(bias[i]);
        if constexpr (kFinish == Finish::kDgelu) {
          rounded[2 * i] = pack_pair<T>(sums[4 * i], sums[4 * i + 1]);
          rounded[2 * i + 1] = pack_pair<T>(sums[4 * i + 2], sums[4 * i + 3]);
        } else {
          rounded[2 * i] = pack_pair<T>(sums[4 * i] + b.x, sums[4 * i + 1] + b.y);
          rounded[2 * i + 1] = pack_pair<T>(sums[4 * i + 2] + b.x, sums[4 * i + 3] + b.y);
        }
      }
      before = at;
      any_before = true;
    }
    if (any_before) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) finish(piece);
      finish_sums();
    }
  }
  cluster_barrier();  // until then the other block may write here
}

#else

template <typename T, Finish kFinish, bool kRowsAreK>
__global__ void __launch_bounds__(kStubThreads) matmul_wgmma_kernel(const __grid_constant__ WgmmaMatmul<T> p) {}

#endif

constexpr int64_t clusters_for(int64_t tiles, int64_t multiprocessors) {
  return std::min(tiles, multiprocessors / kCluster);
}

template <typename T>
int64_t tiles_down(const Matmul<T>& p) {
  return ceil_div(p.rows, kCluster * kRows);
}
template <typename T>
int64_t tiles_across(const Matmul<T>& p) {
  return ceil_div(p.columns, kColumns);
}

template <typename T, Finish kFinish, bool kRowsAreK>
cudaError_t launch(const Matmul<T>& p, float* column_sums, Stream stream) {
  constexpr auto kernel = matmul_wgmma_kernel<T, kFinish, kRowsAreK>;
  const WgmmaMatmul<T> problem = {
      .a = matrix_map<T>(p.a, p.rows, p.inner, p.a_ld, kRows, kInner),
      .b = kRowsAreK ? matrix_map<T>(p.b, p.inner, p.columns, p.b_ld, kInner, kPanelColumns)
                     : matrix_map<T>(p.b, p.columns, p.inner, p.b_ld, kColumns / kCluster, kInner),
      .out = p.out,
      .pre = kFinish == Finish::kGelu ? p.pre_gelu : nullptr,
      .dgelu_at = p.dgelu_at,
      .bias = p.bias,
      .column_sums = column_sums,
      .rows = static_cast<int>(p.rows),
      .columns = static_cast<int>(p.columns),
      .steps = static_cast<int>(ceil_div(p.inner, kInner)),
      .tiles = static_cast<int>(tiles_down(p) * tiles_across(p)),
      .tiles_across = static_cast<int>(tiles_across(p))};
  max_dynamic_shared_memory<kernel>();
  cudaLaunchAttribute cluster = cluster_of(kCluster);
  const auto blocks = static_cast<unsigned>(kCluster * clusters_for(problem.tiles, multiprocessors()));
  const cudaLaunchConfig_t config = launch_config(blocks, kThreads, kSharedBytes, stream, &cluster);
  return cudaLaunchKernelEx(&config, kernel, problem);
}

// ---- which products these kernels compute ---------------------------------------------------------------------------

template <typename T>
Finish finish_of(const Matmul<T>& p) {
  return p.dgelu_at ? Finish::kDgelu : p.pre_gelu ? Finish::kGelu : Finish::kBias;
}

template <typename T>
bool built(Finish finish) {
  switch (finish) {
    case Finish::kBias:
      return built_for_wgmma<matmul_wgmma_kernel<T, Finish::kBias, false>>();
    case Finish::kGelu:
      return built_for_wgmma<matmul_wgmma_kernel<T, Finish::kGelu, false>>();
    default:
      return built_for_wgmma<matmul_wgmma_kernel<T, Finish::kDgelu, true>>();
  }
}

inline bool aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// What TMA, 16-byte accesses and 32-bit indices take.
template <typename T>
bool can_serve(const Matmul<T>& p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  const bool plain = p.batches == 1 && p.alpha == 1 && !p.wide_out && !p.accumulate;
  const bool epilogue = p.bias || p.pre_gelu || p.dgelu_at;
  if (!plain || !epilogue || p.a_transposed || p.b_transposed == (p.dgelu_at != nullptr)) return false;
  if (p.rows < 1 || p.columns < 1 || p.inner <= (kPieces - 1) * kInner) return false;
  if (p.rows >= kLargest || p.columns >= kLargest || p.inner >= kLargest) return false;
  if (tiles_down(p) * tiles_across(p) >= kLargest) return false;
  if (p.columns % 8 != 0 || p.out_ld != p.columns || p.a_ld % 8 != 0 || p.b_ld % 8 != 0) return false;
  return aligned(p.a, 16) && aligned(p.b, 16) && aligned(p.out, 16) && aligned(p.pre_gelu, 16) &&
         aligned(p.dgelu_at, 16) && aligned(p.bias, 4) && tensor_map_encoder() && built<T>(finish_of(p));
}

// Whether it is faster than cuBLASLt, as measured (docs/linear.md): a block's tile is large, so that with few of them
// multiprocessors stand idle at the end. cuBLASLt, which has smaller ones, loses a fifth to a third to a GELU, but
// hardly anything to a bias.
template <typename T>
bool is_faster(const Matmul<T>& p) {
  const int64_t tiles = tiles_down(p) * tiles_across(p);
  const int64_t clusters = multiprocessors() / kCluster;
  const double busy = static_cast<double>(tiles) / static_cast<double>(ceil_div(tiles, clusters) * clusters);
  return busy >= (finish_of(p) == Finish::kBias ? 0.95 : 0.75);
}

enum class Choice { kMeasured, kCublas, kOwn };

// GPTKERNELS_MATMUL=cublas or own.
Choice choice() {
  const char* name = std::getenv("GPTKERNELS_MATMUL");
  if (!name) return Choice::kMeasured;
  return !std::strcmp(name, "cublas") ? Choice::kCublas : !std::strcmp(name, "own") ? Choice::kOwn : Choice::kMeasured;
}

}  // namespace

template <typename T>
bool matmul_sm90_serves(const Matmul<T>& p) {
  if constexpr (sizeof(T) != 2) {
    return false;
  } else {
    const Choice wanted = choice();
    return wanted != Choice::kCublas && can_serve(p) && (wanted == Choice::kOwn || is_faster(p));
  }
}

// The sums of every 64 rows.
template <typename T>
int64_t matmul_sm90_workspace(const Matmul<T>& p) {
  return p.column_sums ? tiles_down(p) * (kCluster * kRows / 64) * p.columns * int64_t(sizeof(float)) : 0;
}

template <typename T>
cudaError_t matmul_sm90(const Matmul<T>& p, void* workspace, Stream stream) {
  if constexpr (sizeof(T) != 2) {
    return cudaErrorNotSupported;
  } else {
    float* const partials = p.column_sums ? static_cast<float*>(workspace) : nullptr;
    cudaError_t error;
    switch (finish_of(p)) {
      case Finish::kBias:
        error = launch<T, Finish::kBias, false>(p, nullptr, stream);
        break;
      case Finish::kGelu:
        error = launch<T, Finish::kGelu, false>(p, nullptr, stream);
        break;
      default:
        error = launch<T, Finish::kDgelu, true>(p, partials, stream);
    }
    if (error != cudaSuccess || !partials) return error;
    launch_partial_sums<T, float>({.first = p.column_sums,
                                   .second = nullptr,
                                   .partials = partials,
                                   .count = tiles_down(p) * (kCluster * kRows / 64),
                                   .width = p.columns,
                                   .split = p.columns},
                                  stream);
    return cudaGetLastError();
  }
}

#define GPTKERNELS_INSTANTIATE(T)                             \
  template bool matmul_sm90_serves<T>(const Matmul<T>&);      \
  template int64_t matmul_sm90_workspace<T>(const Matmul<T>&); \
  template cudaError_t matmul_sm90<T>(const Matmul<T>&, void*, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
