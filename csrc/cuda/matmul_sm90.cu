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
#include "../gelu.h"
#include "common/hopper.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/tensor_map.cuh"
#include "common/warpgroups.cuh"
#include "common/wgmma.cuh"
#include "gelu.cuh"
#include "matmul_sm90.h"

#ifndef GK_DEEP
#define GK_DEEP 0
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

// Shared memory.
constexpr int kABytes = kRows * kPanelRowBytes;
constexpr int kBBytes = kColumns * kPanelRowBytes;
constexpr int kBPanel = kInner * kPanelRowBytes;  // 64 columns of b, where its rows are k
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kPieceRowBytes = 2 * kPieceColumns;
constexpr int kPieceBytes = 64 * kPieceRowBytes;
constexpr int kBuffers = 4;  // of a piece, for each warpgroup
constexpr int kPiecesAt = kStages * kStageBytes;
constexpr int kSumsAt = kPiecesAt + 2 * kBuffers * kPieceBytes;
constexpr int kSumsBytes = 2 * 4 * kPieceColumns * 4;  // of a warpgroup: two pieces, of four warps
constexpr int kBarriersAt = kSumsAt + 2 * kSumsBytes;
constexpr int kBarriers = 2 * kStages + 2 * kBuffers;
constexpr int kSharedBytes = kBarriersAt + 8 * kBarriers;
static_assert(kSharedBytes <= 232448);

enum class Finish { kBias, kGelu, kDgelu };

template <typename T>
struct WgmmaMatmul {
  CUtensorMap a, b, out;
  CUtensorMap pre;      // written for GELU, read for its gradient
  const T* bias;        // or null
  float* column_sums;   // (row tiles of 64, columns), or null
  int rows;
  int columns;
  int steps;            // of kInner terms
  int tiles;            // of a cluster
  int tiles_across;
};

#if GPTKERNELS_WGMMA

// The byte of a piece at which 16-byte chunk `chunk` of row `row` is (TMA's swizzle by 64 bytes).
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

struct TilePosition {
  int row;  // of the block's part
  int column;
};

struct Barriers {
  uint32_t first;
  __device__ uint32_t full(int slot) const { return first + 8 * slot; }
  __device__ uint32_t empty(int slot) const { return first + 8 * (kStages + slot); }
  __device__ uint32_t piece(int warpgroup, int buffer) const {
    return first + 8 * (2 * kStages + warpgroup * kBuffers + buffer);
  }
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

// Sums over the 16 rows of a warp of `values`, of which a thread has 8 columns: its own rows are summed. Every lane
// returns the sum of one column, that of piece_sum_column.
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
__device__ inline int piece_sum_column(int lane) {
  return lane / 8 % 4 / 2 * 16 + lane / 8 % 2 * 8 + lane % 4 * 2 + lane / 4 % 2;
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
    for (int i = 0; i < 2 * kBuffers; ++i) barrier_init(barriers.piece(0, i), 1);
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
    const uint32_t pieces = shared + kPiecesAt + warpgroup * kBuffers * kPieceBytes;
    float* const piece_sums = reinterpret_cast<float*>(shared_bytes + kSumsAt + warpgroup * kSumsBytes);
    // A warp's 16 rows of a piece, of them a 16 x 8 part for ldmatrix and stmatrix; the next 16 columns are at ^ 32.
    const uint32_t own = piece_offset(warp * 16 + lane % 16, lane / 16);
    // Which block of the cluster a lane tells that a stage was read.
    const uint32_t empty_barriers = in_block(shared_bytes + kBarriersAt + 8 * kStages, lane % kCluster);

    float sums[kColumns / 2];
    uint32_t rounded[kColumns / 4];  // the tile before
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) rounded[i] = 0;
    TilePosition before = {0, 0}, at = {0, 0};
    bool any_before = false, more = true;
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

    const auto load_piece = [&](TilePosition tile, int piece) {
      const int buffer = piece % kBuffers;
      mbarrier_expect(barriers.piece(warpgroup, buffer), kPieceBytes);
      tma_load(pieces + buffer * kPieceBytes, p.pre, tile.column + piece * kPieceColumns, tile.row + warpgroup * 64,
               barriers.piece(warpgroup, buffer));
    };

    // Piece `piece` of the tile before, from `rounded`.
    const auto finish = [&](int piece) {
      const uint32_t(&words)[8] = reinterpret_cast<const uint32_t(&)[8]>(rounded[8 * piece]);
      const int row = before.row + warpgroup * 64, column = before.column + piece * kPieceColumns;
      if constexpr (kFinish == Finish::kBias) {
        const uint32_t out = pieces + piece % kBuffers * kPieceBytes;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          store_matrices(out + (own ^ 32 * i), words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        fence_async_shared();
        if (thread == 0) tma_store_wait_read<kBuffers - 2>();
        warpgroup_barrier(1 + warpgroup);
        if (thread == 0) {
          tma_store(p.out, out, column, row);
          tma_store_commit();
        }
      } else if constexpr (kFinish == Finish::kGelu) {
        const uint32_t pre = pieces + piece % 2 * 2 * kPieceBytes, out = pre + kPieceBytes;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          store_matrices(pre + (own ^ 32 * i), words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        uint32_t result[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 x = unpack_pair<T>(words[i]);
          result[i] = pack_pair<T>(GeluTanh<T>::value(x.x), GeluTanh<T>::value(x.y));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
          store_matrices(out + (own ^ 32 * i), result[4 * i], result[4 * i + 1], result[4 * i + 2], result[4 * i + 3]);
        fence_async_shared();
        if (thread == 0) tma_store_wait_read();
        warpgroup_barrier(1 + warpgroup);
        if (thread == 0) {
          tma_store(p.pre, pre, column, row);
          tma_store(p.out, out, column, row);
          tma_store_commit();
        }
      } else {
        const int buffer = piece % kBuffers;
        const uint32_t out = pieces + buffer * kPieceBytes;
        barrier_wait(barriers.piece(warpgroup, buffer), piece / kBuffers & 1);
        const int own_row = row + warp * 16 + lane / 4;
        const bool inside[2] = {own_row < p.rows, own_row + 8 < p.rows};
        float totals[8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t x[4];
          load_matrices(x, out + (own ^ 32 * i));
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 product = unpack_pair<T>(words[4 * i + j]), where = unpack_pair<T>(x[j]);
            const float d0 = product.x * GeluTanh<T>::derivative(where.x);
            const float d1 = product.y * GeluTanh<T>::derivative(where.y);
            x[j] = pack_pair<T>(d0, d1);
            float& total0 = totals[4 * i + j / 2 * 2];
            float& total1 = totals[4 * i + j / 2 * 2 + 1];
            total0 = (j % 2 ? total0 : 0) + (inside[j % 2] ? d0 : 0);
            total1 = (j % 2 ? total1 : 0) + (inside[j % 2] ? d1 : 0);
          }
          store_matrices(out + (own ^ 32 * i), x[0], x[1], x[2], x[3]);
        }
        float* const warp_sums = piece_sums + piece % 2 * (4 * kPieceColumns);
        if (p.column_sums) warp_sums[warp * kPieceColumns + piece_sum_column(lane)] = sum_over_rows(totals, lane);
        fence_async_shared();
        warpgroup_barrier(1 + warpgroup);
        if (thread == 0) {
          tma_store(p.out, out, column, row);
          tma_store_commit();
          tma_store_wait_read<1>();  // the buffer of the piece before is free
          if (piece + 3 < kPieces)
            load_piece(before, piece + 3);
          else if (more)
            load_piece(at, piece + 3 - kPieces);
        }
        if (p.column_sums && warp == 1 && column + lane < p.columns) {
          float total = warp_sums[lane];
#pragma unroll
          for (int i = 1; i < 4; ++i) total += warp_sums[i * kPieceColumns + lane];
          p.column_sums[static_cast<int64_t>(row / 64) * p.columns + column + lane] = total;
        }
      }
    };

    for (int tile = blockIdx.x / kCluster; tile < p.tiles; tile += gridDim.x / kCluster) {
      at = tile_at(p, tile, rank);
      if (kFinish == Finish::kDgelu && !any_before && thread == 0)
        for (int piece = 0; piece < 3; ++piece) load_piece(at, piece);
      int held = 0;  // the slot of the step before
      const auto complete_step = [&] {
        if (GK_DEEP) {
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
          pin_registers(sums);
          release(ring.slot);
        }
        held = ring.slot;
        ring.advance();
      };
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
          complete_step();
        }
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
          complete_step();
        }
      }
      // Two biases a word; -0 changes no sum.
      uint32_t bias[kColumns / 8];
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        const int column = at.column + 8 * i + lane % 4 * 2;
        bias[i] = kFinish != Finish::kDgelu && p.bias && column < p.columns
                      ? __ldg(reinterpret_cast<const uint32_t*>(p.bias + column))
                      : 0x80008000u;
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
    more = false;
    if (any_before) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) finish(piece);
    }
    if (thread == 0) tma_store_wait();
  }
  cluster_barrier();  // until then the other block may write here
}

#else

template <typename T, Finish kFinish, bool kRowsAreK>
__global__ void __launch_bounds__(kStubThreads) matmul_wgmma_kernel(const __grid_constant__ WgmmaMatmul<T> p) {}

#endif

template <typename T, Finish kFinish, bool kRowsAreK>
cudaError_t launch(const WgmmaMatmul<T>& p, Stream stream) {
  constexpr auto kernel = matmul_wgmma_kernel<T, kFinish, kRowsAreK>;
  max_dynamic_shared_memory<kernel>();
  const int clusters = std::min(p.tiles, multiprocessors() / kCluster);
  cudaLaunchAttribute cluster = cluster_of(kCluster);
  const cudaLaunchConfig_t config = launch_config(clusters * kCluster, kThreads, kSharedBytes, stream, &cluster);
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace
}  // namespace gptkernels::cuda
