// Products for sm_90a, by wgmma and TMA, with GELU or its gradient, of which most is done while the tensor cores work
// on the next tile's product.
//
// A cluster of two blocks takes tiles of 256 x 256, one after the other; each block has 128 of the rows. The two share
// the tile's columns of b: each loads half of them, into both. A block has a warpgroup of which one thread loads the
// operands into a ring in shared memory, and two that compute, each 64 rows of the tile in float32 registers.
//
// When its sums are complete, a warpgroup rounds them (with the bias) to T: half as many registers. So the next tile's
// product can start at once, and the rest of the epilogue is done in 8 pieces of 32 columns, each while the tensor
// cores work on a step of that product:
//
//   tensor cores  | tile 1, step 0  | step 1  | ... | step 7  | ... | last |       | tile 2, step 0  | ...
//   warps         | tile 0, piece 0 | piece 1 | ... | piece 7 | wait       | round | tile 1, piece 0 | ...
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "../device.h"
#include "common/hopper.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/partial_sums.cuh"
#include "common/tensor_map.cuh"
#include "common/warpgroups.cuh"
#include "common/wgmma.cuh"
#include "gelu.cuh"
#include "matmul_sm90.h"

namespace gptkernels::cuda {
namespace {

constexpr int kCluster = 2;                              // blocks
constexpr int kRows = 128, kColumns = 256, kInner = 64;  // a block's tile; terms of a step
constexpr int kStages = 4;
constexpr int kPieces = 8;  // of a warpgroup's part of a tile
constexpr int kPieceColumns = kColumns / kPieces;
constexpr int kThreads = 3 * kWarpgroup;
[[maybe_unused]] constexpr int kConsumerWarps = 8;

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

enum class Finish { kGelu, kDgelu };

template <typename T>
struct WgmmaMatmul {
  CUtensorMap a, b, out;
  CUtensorMap pre;     // written for GELU, read for its gradient
  const T* bias;       // or null
  float* column_sums;  // (row tiles of 64, columns), or null
  int rows;
  int columns;
  int steps;  // of kInner terms
  int tiles;  // of a cluster
  int tiles_across;
};

#if GPTKERNELS_WGMMA

// The byte of a piece at which 16-byte chunk `chunk` of row `row` is (TMA's swizzle by 64 bytes).
__device__ inline uint32_t piece_offset(int row, int chunk) {
  return row * kPieceRowBytes + ((chunk ^ (row / 2 % 4)) << 4);
}

// The threads whose `one` is true arrive at a barrier in any block of the cluster. (An arrival with release at cluster
// scope, which is not needed here, waits for all of the thread's stores: products then took 1.5 times as long.)
__device__ inline void barrier_arrive_in_block(bool one, uint32_t barrier) {
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

// Called by one thread: loads the operands of all of the block's tiles into the ring.
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

// Sums over the 16 rows of a warp. A thread's `values` are 8 columns, already summed over its own rows. Each lane
// returns the sum of one column, piece_sum_column(lane).
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

// Loads two elements of the bias into `pair`, which stays as it is if they are not `inside` the matrix.
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
  const int rank = static_cast<int>(cluster_rank());

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
    // Where this lane's 16 bytes are for ldmatrix and stmatrix, in the warp's 16 rows and the first 16 columns of a
    // piece; for the next 16 columns it is own ^ 32.
    const uint32_t own = piece_offset(warp * 16 + lane % 16, lane / 16);
    // Lane 0 reports to block 0 that a stage was read, lane 1 to block 1.
    const uint32_t empty_barriers = in_block(shared_bytes + kBarriersAt + 8 * kStages, lane % kCluster);

    float sums[kColumns / 2];
    uint32_t rounded[kColumns / 4];  // the tile before
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) rounded[i] = 0;
    TilePosition before = {0, 0}, at = {0, 0};
    bool any_before = false, more = true;
    RingPosition<kStages> ring;

    const auto issue = [&](bool first) {
      // A wgmma descriptor takes the lower 18 bits of an address; the bits above select a block of the cluster.
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
    const auto release = [&](int slot) { barrier_arrive_in_block(lane < kCluster, empty_barriers + 8 * slot); };

    const auto load_piece = [&](TilePosition tile, int piece) {
      const int buffer = piece % kBuffers;
      mbarrier_expect(barriers.piece(warpgroup, buffer), kPieceBytes);
      tma_load(pieces + buffer * kPieceBytes, p.pre, tile.column + piece * kPieceColumns, tile.row + warpgroup * 64,
               barriers.piece(warpgroup, buffer));
    };

    // Piece `piece` of the tile before, from `rounded`.
    const auto finish = [&](int piece) {
      const uint32_t (&words)[8] = reinterpret_cast<const uint32_t (&)[8]>(rounded[8 * piece]);
      const int row = before.row + warpgroup * 64, column = before.column + piece * kPieceColumns;
      if constexpr (kFinish == Finish::kGelu) {
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
      const auto step = [&](bool first, auto meanwhile) {
        barrier_wait(barriers.full(ring.slot), ring.phase);
        issue(first);
        meanwhile();
        wgmma_wait<0>();
        pin_registers(sums);
        release(ring.slot);
        ring.advance();
      };
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        step(piece == 0, [&] {
          if (any_before) finish(piece);
        });
      // The bias is loaded once the registers of `rounded` are free: two elements a word, -0 (which changes no sum)
      // outside the matrix.
      uint32_t bias[kColumns / 8];
      if constexpr (kFinish == Finish::kGelu) {
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
          bias[i] = 0x80008000u;
          load_bias(bias[i], p.bias + at.column + 8 * i + lane % 4 * 2, p.bias && at.column + 8 * i < p.columns);
        }
      }
      for (int i = kPieces; i < p.steps; ++i) step(false, [] {});
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        float2 add = {-0.0f, -0.0f};
        if constexpr (kFinish == Finish::kGelu) add = unpack_pair<T>(bias[i]);
        rounded[2 * i] = pack_pair<T>(sums[4 * i] + add.x, sums[4 * i + 1] + add.y);
        rounded[2 * i + 1] = pack_pair<T>(sums[4 * i + 2] + add.x, sums[4 * i + 3] + add.y);
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
      .out = matrix_map<T>(p.out, p.rows, p.columns, p.columns, 64, kPieceColumns),
      .pre = matrix_map<T>(kFinish == Finish::kGelu ? p.pre_gelu : p.dgelu_at, p.rows, p.columns, p.columns, 64,
                           kPieceColumns),
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

// b's rows are k where it is not transposed: the gradient's for a torch.nn.Linear, GELU's for a Conv1D.
template <typename T, Finish kFinish>
cudaError_t launch(const Matmul<T>& p, float* column_sums, Stream stream) {
  return p.b_transposed ? launch<T, kFinish, false>(p, column_sums, stream)
                        : launch<T, kFinish, true>(p, column_sums, stream);
}

// ---- which products these kernels compute ---------------------------------------------------------------------------

// Whether the kernels have code for this device; all of them are compiled alike.
template <typename T>
bool built() {
  return built_for_wgmma<matmul_wgmma_kernel<T, Finish::kGelu, false>>();
}

inline bool aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Whether sizes and addresses suit TMA, 16-byte accesses and 32-bit indices.
template <typename T>
bool can_serve(const Matmul<T>& p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  const bool plain = p.batches == 1 && p.alpha == 1 && !p.wide_out && !p.accumulate;
  if (!plain || !(p.pre_gelu || p.dgelu_at) || p.a_transposed) return false;
  if (p.rows < 1 || p.columns < 1 || p.inner <= (kPieces - 1) * kInner) return false;
  if (p.rows >= kLargest || p.columns >= kLargest || p.inner >= kLargest) return false;
  if (tiles_down(p) * tiles_across(p) >= kLargest) return false;
  if (p.columns % 8 != 0 || p.out_ld != p.columns || p.a_ld % 8 != 0 || p.b_ld % 8 != 0) return false;
  return aligned(p.a, 16) && aligned(p.b, 16) && aligned(p.out, 16) && aligned(p.pre_gelu, 16) &&
         aligned(p.dgelu_at, 16) && aligned(p.bias, 4) && tensor_map_encoder() && built<T>();
}

// Whether it is faster than cuBLASLt (docs/mlp.md has the measurements). GELU's gradient is faster only if it also
// saves the separate pass for the column sums. Tiles are large: where there are few, some SMs are idle at the end, and
// cuBLASLt's smaller tiles are faster.
template <typename T>
bool is_faster(const Matmul<T>& p) {
  constexpr double kBusy = 0.85;
  const int64_t tiles = tiles_down(p) * tiles_across(p);
  const int64_t clusters = multiprocessors() / kCluster;
  const int64_t slots = ceil_div(tiles, clusters) * clusters;
  return (p.pre_gelu || p.column_sums) && static_cast<double>(tiles) >= kBusy * static_cast<double>(slots);
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
    if (p.pre_gelu) return launch<T, Finish::kGelu>(p, nullptr, stream);
    float* const partials = static_cast<float*>(p.column_sums ? workspace : nullptr);
    const cudaError_t error = launch<T, Finish::kDgelu>(p, partials, stream);
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

#define GPTKERNELS_INSTANTIATE(T)                              \
  template bool matmul_sm90_serves<T>(const Matmul<T>&);       \
  template int64_t matmul_sm90_workspace<T>(const Matmul<T>&); \
  template cudaError_t matmul_sm90<T>(const Matmul<T>&, void*, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
