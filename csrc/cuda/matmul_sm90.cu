// Products for sm_90a, by wgmma and TMA, with a bias, GELU or its gradient, which other warps compute while the tensor
// cores work on the next tile.
//
// A cluster of two blocks takes tiles of 256 x 256, one after the other; each block has 128 of the rows. The two share
// the tile's columns of b: each loads half of them, into both. A block has five warpgroups:
//
//   0     one thread loads the operands into a ring in shared memory
//   1, 2  the products, each of 64 rows of the tile, in float32 registers
//   3, 4  the rest
//
// A warp of a product rounds its 16 rows (with the bias) to T when they are complete, leaves them in shared memory for
// one warp of the last two warpgroups, and goes on with the next tile. That warp has the time of a whole tile for them:
// it takes row by row, 8 columns a lane, so that it reads and writes whole rows, and a lane adds up its columns.
#include <algorithm>

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
constexpr int kStages = 3;
constexpr int kThreads = 5 * kWarpgroup;
constexpr int kPairs = 8;  // of a warp of a product and a warp that finishes its rows
constexpr int kWarpRows = 16;
[[maybe_unused]] constexpr int kAhead = 4;  // rows of `pre` on their way to registers

// Shared memory.
constexpr int kABytes = kRows * kPanelRowBytes;
constexpr int kBBytes = kColumns * kPanelRowBytes;
constexpr int kBPanel = kInner * kPanelRowBytes;  // 64 columns of b, where its rows are k
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kRoundedRowBytes = 2 * kColumns;
constexpr int kRoundedAt = kStages * kStageBytes;
constexpr int kSumsAt = kRoundedAt + kRows * kRoundedRowBytes;
constexpr int kSumsBytes = kPairs * kColumns * 4;  // two of them, used in turns
constexpr int kBiasAt = kSumsAt;                   // all of it, in kernels that have one
constexpr int kLongestBias = 2 * kSumsBytes / 2;
constexpr int kBarriersAt = kSumsAt + 2 * kSumsBytes;
constexpr int kBarriers = 2 * kStages + 2 * kPairs;
constexpr int kSharedBytes = kBarriersAt + 8 * kBarriers;
static_assert(kSharedBytes <= 232448);

enum class Finish { kBias, kGelu, kDgelu };

template <typename T>
struct WgmmaMatmul {
  CUtensorMap a, b;
  T* out;
  T* pre;              // (rows, columns): written for GELU, read for its gradient
  const T* bias;       // or null
  float* column_sums;  // (row tiles of 64, columns), or null
  int rows;
  int columns;
  int steps;  // of kInner terms
  int tiles;  // of a cluster
  int tiles_across;
};

#if GPTKERNELS_WGMMA

struct TilePosition {
  int row;  // of the block's part
  int column;
};

struct Barriers {
  uint32_t first;
  __device__ uint32_t full(int slot) const { return first + 8 * slot; }
  __device__ uint32_t empty(int slot) const { return first + 8 * (kStages + slot); }
  __device__ uint32_t rounded(int pair) const { return first + 8 * (2 * kStages + pair); }
  __device__ uint32_t taken(int pair) const { return first + 8 * (2 * kStages + kPairs + pair); }
};

template <typename T>
__device__ TilePosition tile_at(const WgmmaMatmul<T>& p, int tile, int rank) {
  return {tile / p.tiles_across * (kCluster * kRows) + rank * kRows, tile % p.tiles_across * kColumns};
}

// ---- warpgroup 0 ----------------------------------------------------------------------------------------------------

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

// ---- warpgroups 1 and 2 ---------------------------------------------------------------------------------------------

// Where 16-byte chunk `chunk` of row `row` of a warp's rounded rows is.
__device__ inline uint32_t rounded_offset(int row, int chunk) {
  return row * kRoundedRowBytes + ((chunk ^ (row % 8)) << 4);
}

// Rounds half the columns of a warp's 16 rows to shared memory, with the bias; the addresses are where the lane's rows
// and its bias start.
template <bool kBias, typename T>
__device__ void round_half(const float (&sums)[kColumns / 4], uint32_t own, uint32_t bias) {
#pragma unroll
  for (int group = 0; group < kColumns / 128; ++group) {
    uint32_t pairs[8];  // of the bias
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
      // 16 columns are 2 chunks, and `own` ^ 32 i is where the i-th two are of every 8.
      store_matrices((own ^ 32 * i) + 128 * group, words[0], words[1], words[2], words[3]);
    }
  }
}

template <bool kBias, bool kRowsAreK, typename T>
__device__ void multiply(const WgmmaMatmul<T>& p, uint8_t* shared_bytes, const Barriers& barriers, int rank) {
  const uint32_t shared = shared_address(shared_bytes);
  const int lane = threadIdx.x % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int pair = __shfl_sync(~0u, threadIdx.x / 32 - 4, 0);
  const uint32_t rounded = shared + kRoundedAt + pair * kWarpRows * kRoundedRowBytes;
  const uint32_t own = rounded + rounded_offset(lane % 16, lane / 16);
  // Lane 0 reports to block 0 that a stage was read, lane 1 to block 1.
  const uint32_t empty_barriers = in_block(shared_bytes + kBarriersAt + 8 * kStages, lane % kCluster);

  float sums[2][kColumns / 4];  // of each half of the columns
  RingPosition<kStages> ring;

  // Starts a step's products for half the columns.
  const auto start = [&](auto half, bool first) {
    constexpr int kHalf = decltype(half)::value;
    constexpr int kHalfStep = (kRowsAreK ? 2 * kBPanel : kColumns / 2 * kPanelRowBytes) >> 4;
    // A wgmma descriptor takes the lower 18 bits of an address; the bits above select a block of the cluster.
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
    round_half<kBias, T>(sums[kHalf], own + kHalf * kColumns, shared + kBiasAt + 2 * (first + lane % 4 * 2));
  };
  // Rounds the second half and leaves the rows to the warp that finishes them.
  const auto hand_over = [&](int column) {
    round(Constant<1>{}, column);
    __syncwarp();
    barrier_arrive_if(lane == 0, barriers.rounded(pair));
  };

  // While one half of the columns is rounded, the tensor cores have the other: its last step, or the next tile's first.
  wait_for_operands();
  start(Constant<0>{}, true);
  start(Constant<1>{}, true);
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
    const int column = tile_at(p, tile, rank).column;
    wgmma_wait<1>();
    pin_registers(sums[0]);
    barrier_wait(barriers.taken(pair), taken);
    taken ^= 1;
    round(Constant<0>{}, column);
    wgmma_wait<0>();
    pin_registers(sums[1]);
    release();
    tile += gridDim.x / kCluster;
    if (tile >= p.tiles) return hand_over(column);
    wait_for_operands();
    start(Constant<0>{}, true);
    hand_over(column);
    start(Constant<1>{}, true);
  }
}

// ---- warpgroups 3 and 4 ---------------------------------------------------------------------------------------------

struct Words {
  uint32_t v[4];  // 8 elements
};

__device__ inline Words load_shared(uint32_t shared) {
  Words w;
  load_words(w.v, shared);
  return w;
}
// Loads 8 elements that are read once, if they are `inside` the matrix. (With a branch, or a result that is copied, the
// compiler waits for them at once.)
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

template <typename T>
__device__ Words gelu_of(const Words& x) {
  Words result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack_pair<T>(x.v[i]);
    result.v[i] = pack_pair<T>(GeluTanh<T>::value(v.x), GeluTanh<T>::value(v.y));
  }
  return result;
}

// The product times GELU's derivative at `at`; adds the unrounded results to `sums`.
template <typename T>
__device__ Words times_derivative(const Words& product, const Words& at, float (&sums)[8]) {
  Words result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 y = unpack_pair<T>(product.v[i]), x = unpack_pair<T>(at.v[i]);
    const float d0 = y.x * GeluTanh<T>::derivative(x.x), d1 = y.y * GeluTanh<T>::derivative(x.y);
    sums[2 * i] += d0;
    sums[2 * i + 1] += d1;
    result.v[i] = pack_pair<T>(d0, d1);
  }
  return result;
}

template <Finish kFinish, typename T>
__device__ void finish(const WgmmaMatmul<T>& p, uint8_t* shared_bytes, const Barriers& barriers, int rank) {
  const int lane = threadIdx.x % 32;
  const int pair = __shfl_sync(~0u, threadIdx.x / 32 - 12, 0);
  const uint32_t rounded = shared_address(shared_bytes) + kRoundedAt + pair * kWarpRows * kRoundedRowBytes;
  unsigned phase = 0;
  for (int tile = blockIdx.x / kCluster; tile < p.tiles; tile += gridDim.x / kCluster) {
    const TilePosition at = tile_at(p, tile, rank);
    const int row = at.row + pair * kWarpRows, column = at.column + 8 * lane;
    const int rows = column < p.columns ? min(p.rows - row, kWarpRows) : 0;  // this lane's; negative: none
    const int64_t first = static_cast<int64_t>(row) * p.columns + column;
    T* out = p.out + first;
    T* pre = p.pre + first;
    Words ahead[kAhead] = {};
    if constexpr (kFinish == Finish::kDgelu) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load_once(ahead[i], pre + static_cast<int64_t>(i) * p.columns, i < rows);
      pre += static_cast<int64_t>(kAhead) * p.columns;
    }
    float sums[8] = {};
    barrier_wait(barriers.rounded(pair), phase);
#pragma unroll 1
    for (int r0 = 0; r0 < kWarpRows; r0 += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int r = r0 + i;
        if (r >= rows) continue;
        const Words product = load_shared(rounded + rounded_offset(r, lane));
        if constexpr (kFinish == Finish::kGelu) {
          store_global(pre, product);
          pre += p.columns;
          store_global(out, gelu_of<T>(product));
        } else if constexpr (kFinish == Finish::kDgelu) {
          store_global(out, times_derivative<T>(product, ahead[i], sums));
          load_once(ahead[i], pre, r + kAhead < rows);
          pre += p.columns;
        } else {
          store_global(out, product);
        }
        out += p.columns;
      }
    }
    __syncwarp();
    barrier_arrive_if(lane == 0, barriers.taken(pair));
    if (kFinish == Finish::kDgelu && p.column_sums) {
      // The sums of 64 rows: those of four warps.
      const int warpgroup = pair / 4, thread = threadIdx.x % kWarpgroup;
      float* const group =
          reinterpret_cast<float*>(shared_bytes + kSumsAt + phase * kSumsBytes) + warpgroup * (4 * kColumns);
      float4* const own = reinterpret_cast<float4*>(group + pair % 4 * kColumns + 8 * lane);
      own[0] = {sums[0], sums[1], sums[2], sums[3]};
      own[1] = {sums[4], sums[5], sums[6], sums[7]};
      warpgroup_barrier(1 + warpgroup);
#pragma unroll
      for (int i = 0; i < kColumns; i += kWarpgroup) {
        const int mine = i + thread;
        float total = group[mine];
#pragma unroll
        for (int j = 1; j < 4; ++j) total += group[j * kColumns + mine];
        if (at.column + mine < p.columns)
          p.column_sums[static_cast<int64_t>(at.row / 64 + warpgroup) * p.columns + at.column + mine] = total;
      }
    }
    phase ^= 1;
  }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <typename T, Finish kFinish, bool kRowsAreK>
__global__ void __launch_bounds__(kThreads, 1) matmul_wgmma_kernel(const __grid_constant__ WgmmaMatmul<T> p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const Barriers barriers = {shared_address(shared_bytes) + kBarriersAt};
  const int rank = static_cast<int>(cluster_rank());

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
  if constexpr (kFinish != Finish::kDgelu) {
    T* const bias = reinterpret_cast<T*>(shared_bytes + kBiasAt);
    for (int i = threadIdx.x; i < p.tiles_across * kColumns; i += kThreads)
      bias[i] = p.bias && i < p.columns ? p.bias[i] : T(-0.0f);
  }
  cluster_barrier();

  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    give_registers<24>();
    if (threadIdx.x == 0) load_operands<kRowsAreK>(p, shared_address(shared_bytes), barriers, rank);
  } else if (warpgroup < 3) {
    take_registers<160>();
    multiply<kFinish != Finish::kDgelu, kRowsAreK>(p, shared_bytes, barriers, rank);
  } else {
    give_registers<64>();
    finish<kFinish>(p, shared_bytes, barriers, rank);
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
      .pre = kFinish == Finish::kGelu ? p.pre_gelu : const_cast<T*>(p.dgelu_at),
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

// ---- which products these kernels can compute -----------------------------------------------------------------------

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
  const bool plain = p.batches == 1 && p.alpha == 1 && !p.wide_out && !p.accumulate && !p.a_sums;
  if (!plain || p.a_transposed) return false;
  if (p.rows < 1 || p.columns < 1 || p.inner <= kInner) return false;
  if (p.rows >= kLargest || p.columns >= kLargest || p.inner >= kLargest) return false;
  if (tiles_down(p) * tiles_across(p) >= kLargest) return false;
  if (!p.dgelu_at && tiles_across(p) * kColumns > kLongestBias) return false;
  if (p.columns % 8 != 0 || p.out_ld != p.columns || p.a_ld % 8 != 0 || p.b_ld % 8 != 0) return false;
  return aligned(p.a, 16) && aligned(p.b, 16) && aligned(p.out, 16) && aligned(p.pre_gelu, 16) &&
         aligned(p.dgelu_at, 16) && tensor_map_encoder() && built<T>();
}

}  // namespace

template <typename T>
bool matmul_sm90_takes(const Matmul<T>& p) {
  if constexpr (sizeof(T) != 2) {
    return false;
  } else {
    return can_serve(p);
  }
}

template <typename T>
double matmul_sm90_busy(const Matmul<T>& p) {
  const int64_t tiles = tiles_down(p) * tiles_across(p);
  const int64_t clusters = multiprocessors() / kCluster;
  return static_cast<double>(tiles) / static_cast<double>(ceil_div(tiles, clusters) * clusters);
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
    if (!p.dgelu_at) return launch<T, Finish::kBias>(p, nullptr, stream);
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
  template bool matmul_sm90_takes<T>(const Matmul<T>&);        \
  template double matmul_sm90_busy<T>(const Matmul<T>&);       \
  template int64_t matmul_sm90_workspace<T>(const Matmul<T>&); \
  template cudaError_t matmul_sm90<T>(const Matmul<T>&, void*, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
