// Float8 products for sm_90a with GELU or its gradient in the epilogue, which also quantises the result.
//
//   GELU:           product = T(scale_a scale_b (a @ b^T) + bias);  out = fp8(GELU(product)), and its transpose
//   GELU gradient:  product = T(scale_a scale_b (a @ b^T));  out = fp8(product * GELU'(u)), its transpose, column sums
//
// fp8_quantize, which is launched afterwards, then only reduces the column sums. Without a scale (an all-zero amax
// history) this kernel writes only the product, and fp8_quantize does the rest.
//
// The columns of the product are divided into `strips` of 256 (128 if inner > 768), one strip per block column. A block
// keeps the strip's rows of b, with the whole inner dimension, in shared memory, and processes every `parts`-th tile of
// 64 rows. It has one producer warpgroup (one thread issues TMA loads of a into a ring of 3 stages) and two pairs of
// consumer warpgroups. The pairs alternate tiles ("ping-pong"): while the tensor cores compute one pair's product, the
// other pair runs its epilogue. The two warpgroups of a pair compute half of the tile's columns each. (A single
// warpgroup per tile is slower: 16 warps hide more latency than 8.)
//
// TMA permutes the rows of a and b on their way to shared memory (rows_map, columns_map), so that in every 32 columns a
// thread's accumulators are 8 neighbouring columns of 2 neighbouring rows. So it stores 16 bytes of T or 8 bytes of
// float8 at once; for the transposed copy, stmatrix assembles its pairs of bytes to 16 rows of a column.
#include <cuda_fp8.h>

#include <algorithm>

#include "../../fp8_scale.h"
#include "amax_history.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/elementwise/gelu.cuh"
#include "cuda/gemm/backend.h"
#include "cuda/ptx/pipeline.cuh"
#include "cuda/ptx/sm80.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "sm90_gelu.h"

namespace gptkernels::cuda {
namespace {

constexpr int kRows = 64;                   // rows of a tile
constexpr int kStepBytes = kPanelRowBytes;  // inner elements (bytes) per step
constexpr int kStages = 3;
constexpr int kPieceColumns = 32;
constexpr int kPairs = 2;  // pairs of consumer warpgroups
constexpr int kConsumers = 2 * kPairs;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;

// Shared memory: rows of b (256 of up to 768 elements, or 128 of up to 1536), ring buffer of a, one transposed piece
// per consumer warpgroup, bias, largest magnitudes, mbarriers. 232448 bytes is the limit of a block on sm_90.
constexpr int kBBytes = 256 * 768;
constexpr int kAStep = kRows * kStepBytes;
constexpr int kTransposedBytes = kPieceColumns * kRows;  // bytes of a warpgroup's piece
constexpr int kTransposedAt = kBBytes + kStages * kAStep;
constexpr int kBiasAt = kTransposedAt + kConsumers * kTransposedBytes;
constexpr int kAmaxAt = kBiasAt + 2 * 256;
constexpr int kBarriersAt = kAmaxAt + 4 * 4 * kConsumers;
constexpr int kSharedBytes = kBarriersAt + 8 * (2 * kStages + 1 + kPairs);
static_assert(kSharedBytes <= 232448 && kBarriersAt % 8 == 0);

// The columns of a strip: 256, or 128 if 256 rows of b do not fit in shared memory.
constexpr int strip_columns(int64_t inner) {
  return inner <= 768 ? 256 : 128;
}
constexpr int kMaxInner = kBBytes / 128;

enum class Function { kGelu, kDgelu };

template <typename T>
struct GeluProduct {
  CUtensorMap a, b;
  Fp8Quantize<T> pass;
  T* product;     // (rows, columns): always written for GELU; for its gradient only without a scale
  const T* bias;  // or null
  const float* scale_a;
  const float* scale_b;
  int32_t* done;    // set to 1 if the result was quantised, else to 0
  float* partials;  // (partial_rows, columns): column sums of each warp, or null
  int rows;
  int columns;
  int steps;
  int tiles;   // row tiles
  int strips;  // column strips
  int parts;   // blocks per strip
};

#if GPTKERNELS_WGMMA

// Addresses of the mbarriers in shared memory.
struct Barriers {
  uint32_t first;
  __device__ uint32_t full(int slot) const { return first + 8 * slot; }
  __device__ uint32_t empty(int slot) const { return first + 8 * (kStages + slot); }
  __device__ uint32_t weights() const { return first + 8 * (2 * kStages); }
  __device__ uint32_t turn(int pair) const { return first + 8 * (2 * kStages + 1 + pair); }
};

// The producer, one thread: loads the block's rows of b, then the rows of a, tile by tile, into the ring buffer.
template <int kColumns, typename T>
__device__ void load_operands(const GeluProduct<T>& p, uint32_t shared, const Barriers& barriers, int strip, int part) {
  constexpr int kBStep = kColumns * kStepBytes;
  mbarrier_expect(barriers.weights(), p.steps * kBStep);
  for (int step = 0; step < p.steps; ++step)
    tma_load(shared + step * kBStep, p.b, step * kStepBytes, 0, 0, 0, strip * (kColumns / 32), barriers.weights());
  RingPosition<kStages> ring;
  for (int tile = part; tile < p.tiles; tile += p.parts)
    for (int step = 0; step < p.steps; ++step) {
      barrier_wait(barriers.empty(ring.slot), ring.phase ^ 1);
      mbarrier_expect(barriers.full(ring.slot), kAStep);
      tma_load(shared + kBBytes + ring.slot * kAStep, p.a, step * kStepBytes, 0, 0, tile * (kRows / 16),
               barriers.full(ring.slot));
      ring.advance();
    }
}

__device__ inline uint4 load_shared(uint32_t shared) {
  uint32_t words[4];
  load_words(words, shared);
  return {words[0], words[1], words[2], words[3]};
}

// Reduce-scatter of 8 values over the 8 lanes with the same lane % 4. A lane returns the sum of value sum_column(lane),
// which is lane / 4 with its three bits reversed.
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
__device__ inline int sum_column(int lane) {
  return lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
}

template <typename T>
using PackedPair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;

// Replaces infinities by NaN in both numbers; larger_magnitudes ignores NaN.
template <typename T>
__device__ uint32_t finite_or_nan(uint32_t pair) {
  const PackedPair<T> x = reinterpret_cast<const PackedPair<T>&>(pair), zero = {};
  const PackedPair<T> found = __hfma2(x, zero, x);
  return reinterpret_cast<const uint32_t&>(found);
}

template <typename T>
__device__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
  const PackedPair<T> found =
      __hmax2(reinterpret_cast<const PackedPair<T>&>(a), __habs2(reinterpret_cast<const PackedPair<T>&>(b)));
  return reinterpret_cast<const uint32_t&>(found);
}

// 8 neighbouring columns of two neighbouring rows, as words of two columns of T: [row][column / 2].
using Pair = uint32_t[2][4];

template <typename T, Function kFunction, int kColumns>
__global__ void __launch_bounds__(kThreads, 1) fp8_gelu_wgmma_kernel(const __grid_constant__ GeluProduct<T> p) {
  constexpr int kOwnColumns = kColumns / 2, kPieces = kOwnColumns / kPieceColumns;  // per warpgroup
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = shared_address(shared_bytes);
  const Barriers barriers = {shared + kBarriersAt};
  const int strip = blockIdx.x % p.strips, part = blockIdx.x / p.strips;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.empty(i), 8);  // the 8 warps of a pair
    }
    barrier_init(barriers.weights(), 1);
    for (int i = 0; i < kPairs; ++i) barrier_init(barriers.turn(i), 8);
    mbarrier_init_fence();
  }
  if (threadIdx.x < kColumns) {
    const int column = strip * kColumns + threadIdx.x;
    T* const bias = reinterpret_cast<T*>(shared_bytes + kBiasAt);
    bias[threadIdx.x] = p.bias && column < p.columns ? p.bias[column] : narrow<T>(-0.0f);
  }
  __syncthreads();

  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<24>();
    if (threadIdx.x == 0) load_operands<kColumns>(p, shared, barriers, strip, part);
    return;
  }
  alloc_registers<112>();
  constexpr bool kE4M3 = kFunction == Function::kGelu;
  constexpr auto kFormat = kE4M3 ? __NV_E4M3 : __NV_E5M2;
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int row_in_tile = warp * 16 + lane / 4 * 2;  // first of the thread's two rows
  const int pair = warpgroup / 2, first_column = strip * kColumns + warpgroup % 2 * kOwnColumns;
  const int own_column = first_column + lane % 4 * 8;
  const int pieces = min(kPieces, (p.columns - first_column) / kPieceColumns);

  const int32_t bits = history_amax(p.pass.history);
  const bool fused = bits > 0;
  const Fp8Scale scale = fp8_scale(static_cast<uint32_t>(bits), kE4M3 ? 8 : 15);
  const float multiplier = __uint_as_float(scale.multiplier);
  if (blockIdx.x == 0 && threadIdx.x == kWarpgroup) {
    *p.done = fused;
    if (fused) *p.pass.scale = __uint_as_float(scale.scale);
  }
  const float factor = *p.scale_a * *p.scale_b;  // exact: the scales are powers of two

  // The transposed piece in shared memory: 64 bytes per column; 16-byte chunk i is at index i ^ (column / 8), which
  // avoids bank conflicts.
  const auto place = [](int column, int chunk) { return column * kRows + ((chunk ^ column / 8) << 4); };
  const uint32_t transposed = shared + kTransposedAt + warpgroup * kTransposedBytes;
  const uint32_t put_at = transposed + place(lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2, warp);
  const int get_column = thread / 4, get_row = thread % 4 * 16;
  const uint32_t get_at = transposed + place(get_column, thread % 4);

  float sums[kOwnColumns / 2];
  uint32_t amax_pair = 0;
  float totals[kPieces] = {};
  int position = pair * p.steps;  // the next step's index in the sequence of all loads of a

  // Issues the wgmmas of one step.
  const auto issue = [&](int step, int slot) {
    // A wgmma descriptor holds the lower 18 bits of an address.
    const uint64_t a = panel_descriptor((shared & 0x3FFFF) + kBBytes + slot * kAStep);
    const uint64_t b =
        panel_descriptor((shared & 0x3FFFF) + (step * kColumns + warpgroup % 2 * kOwnColumns) * kStepBytes);
    pin_registers(sums);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepBytes / 32; ++i) wgmma_fp8<kE4M3>(sums, a + i * kStepK, b + i * kStepK, i > 0 || step > 0);
    wgmma_commit();
  };
  const auto release = [&](int slot) { barrier_arrive_if(lane == 0, barriers.empty(slot)); };

  // Rounds a piece to float8, stores it and its transposed copy, and tracks the largest magnitude.
  const auto quantise = [&](Pair& pairs, int piece, int row, bool inside) {
    uint32_t words[4];  // two columns x two rows each, the rows of a column adjacent
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 of_row[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t finite = finite_or_nan<T>(pairs[h][i]);
        amax_pair = larger_magnitudes<T>(amax_pair, finite);
        of_row[h] = unpack_pair<T>(finite);
      }
      const float2 first = {of_row[0].x * multiplier, of_row[1].x * multiplier};
      const float2 second = {of_row[0].y * multiplier, of_row[1].y * multiplier};
      words[i] = __nv_cvt_float2_to_fp8x2(first, __NV_SATFINITE, kFormat) |
                 uint32_t(__nv_cvt_float2_to_fp8x2(second, __NV_SATFINITE, kFormat)) << 16;
    }
    if (inside) {
      uint8_t* to = p.pass.out + int64_t(row) * p.columns + own_column + piece * kPieceColumns;
      __stwb(reinterpret_cast<uint2*>(to),
             {__byte_perm(words[0], words[1], 0x6420), __byte_perm(words[2], words[3], 0x6420)});
      __stwb(reinterpret_cast<uint2*>(to + p.columns),
             {__byte_perm(words[0], words[1], 0x7531), __byte_perm(words[2], words[3], 0x7531)});
    }
    if (p.pass.out_transposed == nullptr) return;
    warpgroup_barrier(1 + warpgroup);  // the previous piece has been read
    store_matrices_transposed(put_at, words[0], words[1], words[2], words[3]);
    warpgroup_barrier(1 + warpgroup);
    const int first_row = row - row_in_tile + get_row;
    if (first_row >= p.rows) return;
    const int64_t column = first_column + piece * kPieceColumns + get_column;
    __stwb(reinterpret_cast<uint4*>(p.pass.out_transposed + column * p.rows + first_row), load_shared(get_at));
  };

  barrier_wait(barriers.weights(), 0);
  unsigned turn = pair ^ 1;  // phase parity of barriers.turn; the first pair begins
  for (int tile = part + pair * p.parts; tile < p.tiles; tile += kPairs * p.parts) {
    const int row = tile * kRows + row_in_tile;
    const bool inside = row < p.rows;  // uniform in a warp: rows is a multiple of 16
    const int64_t at = int64_t(row) * p.columns + own_column;
    uint4 next_u[2] = {};  // u of the next piece, prefetched: the points at which GELU's derivative is taken
    const auto load_u = [&](int piece) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        next_u[h] = inside && piece < pieces
                        ? __ldcs(reinterpret_cast<const uint4*>(p.pass.u + at + h * p.columns + piece * kPieceColumns))
                        : uint4{};
    };
    if constexpr (kFunction == Function::kDgelu) load_u(0);
    // The pairs alternate, so that they consume the stages of the ring in order. A pair must not wait on a stage more
    // than one phase ahead, because mbarrier waits distinguish only the current and the previous phase.
    barrier_wait(barriers.turn(pair), turn);
    turn ^= 1;
    int slot = 0;
    for (int step = 0; step < p.steps; ++step, ++position) {
      const int before = slot;
      slot = position % kStages;
      barrier_wait(barriers.full(slot), position / kStages & 1);
      issue(step, slot);
      if (step > 0) {
        wgmma_wait<1>();
        release(before);
      }
    }
    barrier_arrive_if(lane == 0, barriers.turn(pair ^ 1));
    wgmma_wait<0>();
    pin_registers(sums);
    release(slot);
    position += p.steps;  // skip the other pair's steps

#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece >= pieces) break;
      Pair product;
      const uint4 current_u[2] = {next_u[0], next_u[1]};
      if constexpr (kFunction == Function::kDgelu)
        if (piece + 1 < kPieces) load_u(piece + 1);
      uint4 bias = {};
      if constexpr (kFunction == Function::kGelu)
        bias = load_shared(shared + kBiasAt + 2 * (warpgroup % 2 * kOwnColumns + piece * kPieceColumns + lane % 4 * 8));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float2 add = {-0.0f, -0.0f};
          if constexpr (kFunction == Function::kGelu) add = unpack_pair<T>((&bias.x)[i]);
          const float* of = sums + 16 * piece + 4 * i + 2 * h;
          product[h][i] = pack_pair<T>(fmaf(of[0], factor, add.x), fmaf(of[1], factor, add.y));
        }
      if ((kFunction == Function::kGelu || !fused) && inside)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          __stwb(reinterpret_cast<uint4*>(p.product + at + h * p.columns + piece * kPieceColumns),
                 {product[h][0], product[h][1], product[h][2], product[h][3]});
      if (!fused) continue;
      Pair values;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = unpack_pair<T>(product[h][i]);
          if constexpr (kFunction == Function::kGelu) {
            values[h][i] = pack_pair<T>(GeluTanh<T>::value(x.x), GeluTanh<T>::value(x.y));
          } else {
            const float2 u = unpack_pair<T>((&current_u[h].x)[i]);
            values[h][i] = pack_pair<T>(x.x * GeluTanh<T>::derivative(u.x), x.y * GeluTanh<T>::derivative(u.y));
          }
        }
      if constexpr (kFunction == Function::kDgelu) {
        float both[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 first = unpack_pair<T>(values[0][i]), second = unpack_pair<T>(values[1][i]);
          both[2 * i] = first.x + second.x;
          both[2 * i + 1] = first.y + second.y;
        }
        totals[piece] += sum_over_rows(both, lane);
      }
      quantise(values, piece, row, inside);
    }
  }

  if (p.partials) {
    float* const to = p.partials + int64_t((part * kPairs + pair) * 4 + warp) * p.columns;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      if (piece < pieces) to[own_column + piece * kPieceColumns + sum_column(lane)] = totals[piece];
  }
  if (!fused) return;
  float* const largest = reinterpret_cast<float*>(shared_bytes + kAmaxAt);
  const float2 of_two = unpack_pair<T>(amax_pair);
  float amax = warp_reduce<FiniteMax>(fmaxf(of_two.x, of_two.y));
  if (lane == 0) largest[warpgroup * 4 + warp] = amax;
  random_delay();
  asm volatile("bar.sync %0, %1;" ::"n"(1 + kConsumers), "n"(kConsumers * kWarpgroup) : "memory");
  if (threadIdx.x != kWarpgroup) return;
  for (int i = 1; i < 4 * kConsumers; ++i) amax = fmaxf(amax, largest[i]);
  update_history(p.pass.history, __float_as_int(amax));
}

#else

template <typename T, Function kFunction, int kColumns>
__global__ void __launch_bounds__(kStubThreads) fp8_gelu_wgmma_kernel(const __grid_constant__ GeluProduct<T> p) {}

#endif

// Returns a tensor map of a dense matrix of bytes whose row index is split in kRank dimensions: `sizes`, `strides` (in
// rows) and `boxes` describe them, the fastest first. The innermost dimension is the columns, 128 per box.
template <int kRank>
CUtensorMap block_map(const void* data, int64_t columns, const int64_t (&sizes)[kRank], const int64_t (&strides)[kRank],
                      const int (&boxes)[kRank]) {
  cuuint64_t all_sizes[kRank + 1] = {static_cast<cuuint64_t>(columns)}, all_strides[kRank];
  cuuint32_t box[kRank + 1] = {kStepBytes}, steps[kRank + 1] = {1};
  for (int i = 0; i < kRank; ++i) {
    all_sizes[i + 1] = static_cast<cuuint64_t>(sizes[i]);
    all_strides[i] = static_cast<cuuint64_t>(strides[i] * columns);
    box[i + 1] = static_cast<cuuint32_t>(boxes[i]);
    steps[i + 1] = 1;
  }
  CUtensorMap map;
  tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank + 1, const_cast<void*>(data), all_sizes, all_strides,
                       box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

// Loads the even rows of every 16 first, so that rows g and g + 8 of a warp's accumulators are rows 2g and 2g + 1 of a.
CUtensorMap rows_map(const void* data, int64_t rows, int64_t columns) {
  return block_map<3>(data, columns, {8, 2, rows / 16}, {2, 1, 16}, {8, 2, kRows / 16});
}

// Loads row 8 t + 2 j + i of every 32 (t, j = 0..3, i = 0, 1) to row 8 j + 2 t + i of shared memory. Thread t of a quad
// holds columns 8 j + 2 t + i of the accumulators, which are then the 8 neighbouring rows 8 t + 2 j + i of b.
CUtensorMap columns_map(const void* data, int64_t rows, int64_t columns, int box_rows) {
  return block_map<4>(data, columns, {2, 4, 4, rows / 32}, {1, 8, 2, 32}, {2, 4, 4, box_rows / 32});
}

template <typename T>
int strips_of(const Fp8Matmul<T>& p) {
  return static_cast<int>(ceil_div(p.columns, strip_columns(p.inner)));
}

template <typename T>
int parts_of(const Fp8Matmul<T>& p) {
  return std::max(multiprocessors() / strips_of(p), 1);
}

// The workspace: the flag `done`, the column sums of each warp, then the workspace of fp8_quantize.
constexpr int64_t kFlagBytes = 16;

template <typename T>
int64_t partial_rows(const Fp8Matmul<T>& p) {
  return int64_t(parts_of(p)) * kPairs * 4;
}

template <typename T>
int64_t partial_bytes(const Fp8Matmul<T>& p) {
  return partial_rows(p) * p.columns * int64_t(sizeof(float));
}

template <typename T, Function kFunction, int kColumns>
cudaError_t launch(const Fp8Matmul<T>& p, Fp8Quantize<T> pass, Stream stream) {
  constexpr auto kernel = fp8_gelu_wgmma_kernel<T, kFunction, kColumns>;
  auto* const workspace = static_cast<char*>(pass.workspace);
  auto* const done = reinterpret_cast<int32_t*>(workspace);
  auto* const partials = reinterpret_cast<float*>(workspace + kFlagBytes);
  pass.workspace = workspace + kFlagBytes + partial_bytes(p);
  const GeluProduct<T> problem = {.a = rows_map(p.a, p.rows, p.inner),
                                  .b = columns_map(p.b, p.columns, p.inner, kColumns),
                                  .pass = pass,
                                  .product = p.out,
                                  .bias = p.bias,
                                  .scale_a = p.scale_a,
                                  .scale_b = p.scale_b,
                                  .done = done,
                                  .partials = pass.column_sums ? partials : nullptr,
                                  .rows = static_cast<int>(p.rows),
                                  .columns = static_cast<int>(p.columns),
                                  .steps = static_cast<int>(ceil_div(p.inner, kStepBytes)),
                                  .tiles = static_cast<int>(ceil_div(p.rows, kRows)),
                                  .strips = strips_of(p),
                                  .parts = parts_of(p)};
  max_dynamic_shared_memory<kernel>();
  kernel<<<problem.strips * problem.parts, kThreads, kSharedBytes, stream>>>(problem);
  pass.fused = {.done = done, .partials = partials, .partial_rows = partial_rows(p)};
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? fp8_quantize(pass, stream) : error;
}

template <typename T, Function kFunction>
cudaError_t launch(const Fp8Matmul<T>& p, const Fp8Quantize<T>& pass, Stream stream) {
  return strip_columns(p.inner) == 256 ? launch<T, kFunction, 256>(p, pass, stream)
                                       : launch<T, kFunction, 128>(p, pass, stream);
}

inline bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// True if the kernel supports the operation, formats, sizes and alignment.
template <typename T>
bool supports(const Fp8Matmul<T>& p, const Fp8Quantize<T>& pass) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  const bool gelu = pass.source == Fp8Source::kGelu && !pass.column_sums;
  const bool dgelu = pass.source == Fp8Source::kGeluGradient && !p.bias;
  const Fp8Format format = gelu ? Fp8Format::kE4M3 : Fp8Format::kE5M2;
  if (!(gelu || dgelu) || !pass.history || !p.fast_accumulation) return false;
  if (p.a_format != format || p.b_format != Fp8Format::kE4M3 || pass.format != format) return false;
  if (p.rows < 1 || p.columns < 1 || p.inner < 1 || p.inner > kMaxInner) return false;
  if (p.rows >= kLargest || p.columns >= kLargest || strips_of(p) > multiprocessors()) return false;
  if (p.rows % 16 != 0 || p.columns % 32 != 0) return false;
  return aligned(p.a) && aligned(p.b) && aligned(p.out) && aligned(pass.u) && aligned(pass.out) &&
         aligned(pass.out_transposed) && tensor_map_encoder() &&
         built_for_wgmma<fp8_gelu_wgmma_kernel<T, Function::kGelu, 256>>();
}

// True if at least 85 % of the SMs are busy, each with enough tiles (4) to amortise loading b.
template <typename T>
bool is_faster(const Fp8Matmul<T>& p) {
  constexpr double kBusy = 0.85;
  const int blocks = strips_of(p) * parts_of(p);
  return blocks >= kBusy * multiprocessors() && ceil_div(p.rows, kRows) >= int64_t{4} * parts_of(p);
}

}  // namespace

template <typename T>
bool fp8_gelu_sm90_supports(const Fp8Matmul<T>& product, const Fp8Quantize<T>& pass) {
  if constexpr (sizeof(T) != 2) {
    return false;
  } else {
    const GemmBackend requested = gemm_backend();
    return requested != GemmBackend::kCublas && supports(product, pass) &&
           (requested == GemmBackend::kOwn || is_faster(product));
  }
}

template <typename T>
int64_t fp8_gelu_sm90_workspace(const Fp8Matmul<T>& p) {
  return kFlagBytes + partial_bytes(p) + fp8_quantize_workspace<T>(p.rows, p.columns);
}

template <typename T>
Status fp8_gelu_sm90(const Fp8Matmul<T>& product, const Fp8Quantize<T>& pass, Stream stream) {
  if constexpr (sizeof(T) != 2) {
    return cudaErrorNotSupported;
  } else {
    return pass.source == Fp8Source::kGelu ? launch<T, Function::kGelu>(product, pass, stream)
                                           : launch<T, Function::kDgelu>(product, pass, stream);
  }
}

#define GPTKERNELS_INSTANTIATE(T)                                                      \
  template bool fp8_gelu_sm90_supports<T>(const Fp8Matmul<T>&, const Fp8Quantize<T>&); \
  template int64_t fp8_gelu_sm90_workspace<T>(const Fp8Matmul<T>&);                    \
  template Status fp8_gelu_sm90<T>(const Fp8Matmul<T>&, const Fp8Quantize<T>&, Stream);
GPTKERNELS_FOR_FP8(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
