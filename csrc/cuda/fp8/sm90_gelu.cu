// Float8 matmuls for sm_90a whose epilogue computes GELU or its gradient, and quantises the result. A thread block
// computes every `parts`-th tile of 64 rows of a strip of 256 columns (128 if inner > 768), whose rows of b stay in
// shared memory. Two pairs of warpgroups process the tiles alternately, so that one pair's matmul overlaps with the
// other pair's epilogue. Each warpgroup of a pair computes half of the tile's columns.
//
//   loader:  load the strip's rows of b
//            for each tile, for each step of 128 terms: wait until the stage is empty, load 64 rows of a into it
//   pair:    wait for b
//            for every second tile:
//              wait for the pair's turn
//              for each step: wait until the stage is full, sums += a @ b^T, release the stage
//              pass the turn to the other pair
//              for each piece of 32 columns:
//                product = T(scale_a scale_b sums + bias)                      bias: GELU only
//                values = T(GELU(product))  or  T(product * GELU'(u))
//                store product (GELU only), float8(values), and float8(values) transposed
//                column sums += values (gradient only); amax = max(amax, |values|)
//            store the column sums; update the amax history
//
// fp8_quantize() is launched afterwards, and only adds up the column sums. Without a scale (the amax history is all
// zeros), the kernel writes only `product`, and fp8_quantize() does the rest.
//
// TMA permutes the rows of a and b on their way to shared memory (rows_map, columns_map), so that in every 32 columns a
// thread's accumulators are 8 neighbouring columns of 2 neighbouring rows, for wide stores. For the transposed copy,
// stmatrix joins the threads' pairs of bytes (two rows of a column) into 16 rows of a column.
#include <cuda_fp8.h>

#include <cstddef>

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
constexpr int kStepBytes = kPanelRowBytes;  // one byte per term
constexpr int kStages = 3;
constexpr int kPieceColumns = 32;
constexpr int kPairs = 2;
constexpr int kConsumers = 2 * kPairs;  // 16 warps hide more latency than 8
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kAStep = kRows * kStepBytes;
constexpr int kTransposedBytes = kPieceColumns * kRows;
constexpr int kBBytes = 256 * 768;

// If inner > 768, 256 rows of b do not fit in shared memory.
constexpr int strip_columns(int64_t inner) {
  return inner <= 768 ? 256 : 128;
}
constexpr int kMaxInner = kBBytes / 128;

enum class Function { kGelu, kDgelu };

template <typename T>
struct GeluProduct {
  CUtensorMap a, b;
  Fp8Quantize<T> pass;
  T* product;     // (rows, columns), not written for GELU's gradient if there is a scale
  const T* bias;  // or null
  const float* scale_a;
  const float* scale_b;
  int32_t* done;
  float* partials;  // (partial_rows, columns) or null
  int rows;
  int columns;
  int steps;
  int tiles;   // row tiles
  int strips;  // column strips
  int parts;   // thread blocks per strip
};

// A pair's barrier "turn" completes when the other pair has started the last MMAs of its tile.
struct SharedLayout {
  uint8_t b[kBBytes];                                // 256 rows of 768 terms, or 128 of 1536
  uint8_t a[kStages][kAStep];                        // the ring
  uint8_t transposed[kConsumers][kTransposedBytes];  // of each warpgroup
  uint16_t bias[256];
  float largest[kConsumerWarps];  // of each warp
  uint64_t full[kStages], empty[kStages], b_full, turn[kPairs];
};
static_assert(sizeof(SharedLayout) <= 232448, "a thread block of sm_90 has at most this much shared memory");

#if GPTKERNELS_WGMMA

struct Shared {
  uint32_t first;

  __device__ uint32_t at(size_t offset, int i, int bytes) const {
    return first + static_cast<uint32_t>(offset) + i * bytes;
  }
  __device__ uint32_t b(int step, int columns, int column) const {
    return first + (step * columns + column) * kStepBytes;
  }
  __device__ uint32_t a(int i) const { return at(offsetof(SharedLayout, a), i, kAStep); }
  __device__ uint32_t transposed(int i) const { return at(offsetof(SharedLayout, transposed), i, kTransposedBytes); }
  __device__ uint32_t bias(int i) const { return at(offsetof(SharedLayout, bias), i, 2); }
  __device__ uint32_t full(int i) const { return at(offsetof(SharedLayout, full), i, 8); }
  __device__ uint32_t empty(int i) const { return at(offsetof(SharedLayout, empty), i, 8); }
  __device__ uint32_t b_full() const { return at(offsetof(SharedLayout, b_full), 0, 8); }
  __device__ uint32_t turn(int i) const { return at(offsetof(SharedLayout, turn), i, 8); }

  __device__ void init_barriers() const {
    constexpr int kPairWarps = kConsumerWarps / kPairs;
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), kPairWarps);
    }
    barrier_init(b_full(), 1);
    for (int i = 0; i < kPairs; ++i) barrier_init(turn(i), kPairWarps);
    mbarrier_init_fence();
  }
};

// ---- warpgroup 0 ----------------------------------------------------------------------------------------------------

// One thread calls this function.
template <int kColumns, typename T>
__device__ void load_operands(const GeluProduct<T>& p, const Shared& shared, int strip, int part) {
  mbarrier_expect(shared.b_full(), p.steps * (kColumns * kStepBytes));
  for (int step = 0; step < p.steps; ++step)
    tma_load(shared.b(step, kColumns, 0), p.b, step * kStepBytes, 0, 0, 0, strip * (kColumns / 32), shared.b_full());
  RingPosition<kStages> ring;
  for (int tile = part; tile < p.tiles; tile += p.parts)
    for (int step = 0; step < p.steps; ++step) {
      barrier_wait(shared.empty(ring.slot), ring.phase ^ 1);
      mbarrier_expect(shared.full(ring.slot), kAStep);
      tma_load(shared.a(ring.slot), p.a, step * kStepBytes, 0, 0, tile * (kRows / 16), shared.full(ring.slot));
      ring.advance();
    }
}

// ---- the other warpgroups: the matmul -------------------------------------------------------------------------------

template <bool kE4M3, int n>
__device__ __forceinline__ void start_step(float (&sums)[n], const Shared& shared, int warpgroup, int step, int slot) {
  constexpr int kWarpgroupColumns = 2 * n;
  // A wgmma descriptor holds bits 4 to 17 of an address.
  const Shared low = {shared.first & 0x3FFFF};
  const uint64_t a = panel_descriptor(low.a(slot));
  const uint64_t b = panel_descriptor(low.b(step, 2 * kWarpgroupColumns, warpgroup % 2 * kWarpgroupColumns));
  pin_registers(sums);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kStepBytes / 32; ++i) wgmma_fp8<kE4M3>(sums, a + i * kStepK, b + i * kStepK, i > 0 || step > 0);
  wgmma_commit();
}

// Multiplies half of a tile's columns. `position` is the index of the next step in the thread block's sequence of
// steps.
template <bool kE4M3, int n>
__device__ __forceinline__ void multiply_tile(float (&sums)[n], const Shared& shared, int warpgroup, int steps,
                                              int& position) {
  const bool arrives = threadIdx.x % 32 == 0;
  int slot = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ++position) {
    const int before = slot;
    slot = position % kStages;
    barrier_wait(shared.full(slot), position / kStages & 1);
    start_step<kE4M3>(sums, shared, warpgroup, step, slot);
    if (step > 0) {
      wgmma_wait<1>();
      barrier_arrive_if(arrives, shared.empty(before));
    }
  }
  barrier_arrive_if(arrives, shared.turn(warpgroup / 2 ^ 1));
  wgmma_wait<0>();
  pin_registers(sums);
  barrier_arrive_if(arrives, shared.empty(slot));
}

// ---- the other warpgroups: the epilogue -----------------------------------------------------------------------------

using Pair = uint32_t[2][4];

__device__ inline uint4 load_shared(uint32_t shared) {
  uint32_t words[4];
  load_words(words, shared);
  return {words[0], words[1], words[2], words[3]};
}

template <typename T, bool kBias, int n>
__device__ __forceinline__ void round_piece(Pair& product, const float (&sums)[n], int piece, float factor,
                                            const uint4& bias) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float2 add = {-0.0f, -0.0f};
      if constexpr (kBias) add = unpack_pair<T>((&bias.x)[i]);
      const float* of = sums + 16 * piece + 4 * i + 2 * h;
      product[h][i] = pack_pair<T>(fmaf(of[0], factor, add.x), fmaf(of[1], factor, add.y));
    }
}

// `at` is the index in the matrix of the thread's first element of the tile.
template <typename T>
__device__ __forceinline__ void store_product(const GeluProduct<T>& p, int64_t at, int piece, const Pair& product) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    __stwb(reinterpret_cast<uint4*>(p.product + at + h * p.columns + piece * kPieceColumns),
           {product[h][0], product[h][1], product[h][2], product[h][3]});
}

template <Function kFunction, typename T>
__device__ __forceinline__ void apply_function(Pair& values, const Pair& product, const uint4 (&u)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_pair<T>(product[h][i]);
      if constexpr (kFunction == Function::kGelu) {
        values[h][i] = pack_pair<T>(GeluTanh<T>::value(x.x), GeluTanh<T>::value(x.y));
      } else {
        const float2 at = unpack_pair<T>((&u[h].x)[i]);
        values[h][i] = pack_pair<T>(x.x * GeluTanh<T>::derivative(at.x), x.y * GeluTanh<T>::derivative(at.y));
      }
    }
}

// One step of a reduce-scatter between lanes whose indices differ in `bit`. The lane with the bit set gets the sums of
// the upper half of the values, the other lane those of the lower half.
template <int n>
__device__ __forceinline__ void exchange_half(float (&half)[n], const float (&values)[2 * n], int lane, int bit) {
  const bool high = lane & bit;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float sent = high ? values[i] : values[i + n];
    half[i] = (high ? values[i + n] : values[i]) + __shfl_xor_sync(~0u, sent, bit);
  }
}

// Sums a piece's columns over the warp's 16 rows by a reduce-scatter over the 8 lanes with the same lane % 4. A lane
// gets the sum of column sum_column(lane), which is lane / 4.
template <typename T>
__device__ __forceinline__ float sum_over_rows(const Pair& values, int lane) {
  float eight[8], four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 first = unpack_pair<T>(values[0][i]), second = unpack_pair<T>(values[1][i]);
    eight[2 * i] = first.x + second.x;
    eight[2 * i + 1] = first.y + second.y;
  }
  exchange_half(four, eight, lane, 16);
  exchange_half(two, four, lane, 8);
  const bool high = lane & 4;
  const float sent = high ? two[0] : two[1];
  return (high ? two[1] : two[0]) + __shfl_xor_sync(~0u, sent, 4);
}
__device__ inline int sum_column(int lane) {
  return lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
}

template <typename T>
using PackedPair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;

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

// Word i of `words` receives columns 2i and 2i + 1, with two bytes per column: one for each of the thread's two rows.
template <bool kE4M3, typename T>
__device__ __forceinline__ void to_float8(uint32_t (&words)[4], const Pair& values, float multiplier,
                                          uint32_t& amax_pair) {
  constexpr auto kFormat = kE4M3 ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 of_row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t finite = finite_or_nan<T>(values[h][i]);
      amax_pair = larger_magnitudes<T>(amax_pair, finite);
      of_row[h] = unpack_pair<T>(finite);
    }
    const float2 first = {of_row[0].x * multiplier, of_row[1].x * multiplier};
    const float2 second = {of_row[0].y * multiplier, of_row[1].y * multiplier};
    words[i] = __nv_cvt_float2_to_fp8x2(first, __NV_SATFINITE, kFormat) |
               uint32_t(__nv_cvt_float2_to_fp8x2(second, __NV_SATFINITE, kFormat)) << 16;
  }
}

__device__ __forceinline__ void store_float8(uint8_t* to, int stride, const uint32_t (&words)[4]) {
  __stwb(reinterpret_cast<uint2*>(to),
         {__byte_perm(words[0], words[1], 0x6420), __byte_perm(words[2], words[3], 0x6420)});
  __stwb(reinterpret_cast<uint2*>(to + stride),
         {__byte_perm(words[0], words[1], 0x7531), __byte_perm(words[2], words[3], 0x7531)});
}

// The warpgroup's piece of the transposed copy has 64 bytes per column in shared memory. 16-byte chunk i of a column is
// at index i ^ (column / 8), which avoids bank conflicts.
struct TransposedPiece {
  uint32_t put_at, get_at;  // addresses
  int get_row, get_column;
};

template <typename T>
__device__ __forceinline__ void store_transposed(const GeluProduct<T>& p, const TransposedPiece& own, int warpgroup,
                                                 int first_row, int first_column, const uint32_t (&words)[4]) {
  warpgroup_barrier(1 + warpgroup);
  store_matrices_transposed(own.put_at, words[0], words[1], words[2], words[3]);
  warpgroup_barrier(1 + warpgroup);
  const int row = first_row + own.get_row;
  if (row >= p.rows) return;
  const int64_t column = first_column + own.get_column;
  __stwb(reinterpret_cast<uint4*>(p.pass.out_transposed + column * p.rows + row), load_shared(own.get_at));
}

template <typename T>
__device__ __forceinline__ void load_u(uint4 (&u)[2], const GeluProduct<T>& p, int64_t at, int piece, bool inside,
                                       int pieces) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    u[h] = inside && piece < pieces
               ? __ldcs(reinterpret_cast<const uint4*>(p.pass.u + at + h * p.columns + piece * kPieceColumns))
               : uint4{};
}

template <typename T>
__device__ __forceinline__ void update_amax(const GeluProduct<T>& p, float* largest, int warpgroup, int warp, int lane,
                                            uint32_t amax_pair) {
  const float2 of_two = unpack_pair<T>(amax_pair);
  float amax = warp_reduce<FiniteMax>(fmaxf(of_two.x, of_two.y));
  if (lane == 0) largest[warpgroup * 4 + warp] = amax;
  random_delay();
  asm volatile("bar.sync %0, %1;" ::"n"(1 + kConsumers), "n"(kConsumers * kWarpgroup) : "memory");
  if (threadIdx.x != kWarpgroup) return;
  for (int i = 1; i < kConsumerWarps; ++i) amax = fmaxf(amax, largest[i]);
  update_history(p.pass.history, __float_as_int(amax));
}

template <Function kFunction, int kColumns, typename T>
__device__ __forceinline__ void compute_tiles(const GeluProduct<T>& p, SharedLayout* layout, const Shared& shared,
                                              int strip, int part) {
  constexpr int kWarpgroupColumns = kColumns / 2, kPieces = kWarpgroupColumns / kPieceColumns;
  constexpr bool kGelu = kFunction == Function::kGelu;
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup - 1, 0);
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int pair = warpgroup / 2;
  const int row_in_tile = warp * 16 + lane / 4 * 2;
  const int first_column = strip * kColumns + warpgroup % 2 * kWarpgroupColumns;
  const int own_column = first_column + lane % 4 * 8;
  const int pieces = min(kPieces, (p.columns - first_column) / kPieceColumns);

  const int32_t bits = history_amax(p.pass.history);
  const bool fused = bits > 0;
  const Fp8Scale scale = fp8_scale(static_cast<uint32_t>(bits), kGelu ? 8 : 15);
  const float multiplier = __uint_as_float(scale.multiplier);
  if (blockIdx.x == 0 && threadIdx.x == kWarpgroup) {
    *p.done = fused;
    if (fused) *p.pass.scale = __uint_as_float(scale.scale);
  }
  const float factor = *p.scale_a * *p.scale_b;  // exact: the scales are powers of two

  const uint32_t transposed = shared.transposed(warpgroup);
  const auto place = [&](int column, int chunk) { return transposed + column * kRows + ((chunk ^ column / 8) << 4); };
  const TransposedPiece transposed_piece = {
      .put_at = place(lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2, warp),
      .get_at = place(thread / 4, thread % 4),
      .get_row = thread % 4 * 16,
      .get_column = thread / 4,
  };

  float sums[kWarpgroupColumns / 2];
  uint32_t amax_pair = 0;
  float totals[kPieces] = {};
  int position = pair * p.steps;
  barrier_wait(shared.b_full(), 0);
  unsigned turn = pair ^ 1;  // phase parity; the first pair begins
  for (int tile = part + pair * p.parts; tile < p.tiles; tile += kPairs * p.parts) {
    const int row = tile * kRows + row_in_tile;
    const bool inside = row < p.rows;  // uniform in a warp: rows is a multiple of 16
    const int64_t at = int64_t(row) * p.columns + own_column;
    uint4 next_u[2] = {};
    if constexpr (!kGelu) load_u(next_u, p, at, 0, inside, pieces);
    // The pairs alternate, so that they consume the stages of the ring in order: mbarrier waits distinguish only the
    // current and the previous phase, so no pair may wait on a stage more than one phase ahead.
    barrier_wait(shared.turn(pair), turn);
    turn ^= 1;
    multiply_tile<kGelu>(sums, shared, warpgroup, p.steps, position);
    position += p.steps;  // the other pair's steps

#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece >= pieces) break;
      Pair product, values;
      const uint4 u[2] = {next_u[0], next_u[1]};
      if constexpr (!kGelu)
        if (piece + 1 < kPieces) load_u(next_u, p, at, piece + 1, inside, pieces);
      uint4 bias = {};
      if constexpr (kGelu)
        bias = load_shared(shared.bias(warpgroup % 2 * kWarpgroupColumns + piece * kPieceColumns + lane % 4 * 8));
      round_piece<T, kGelu>(product, sums, piece, factor, bias);
      if ((kGelu || !fused) && inside) store_product(p, at, piece, product);
      if (!fused) continue;
      apply_function<kFunction, T>(values, product, u);
      if constexpr (!kGelu) totals[piece] += sum_over_rows<T>(values, lane);
      uint32_t words[4];
      to_float8<kGelu, T>(words, values, multiplier, amax_pair);
      if (inside)
        store_float8(p.pass.out + int64_t(row) * p.columns + own_column + piece * kPieceColumns, p.columns, words);
      if (p.pass.out_transposed)
        store_transposed(p, transposed_piece, warpgroup, row - row_in_tile, first_column + piece * kPieceColumns,
                         words);
    }
  }

  if (p.partials) {
    float* const to = p.partials + int64_t((part * kPairs + pair) * 4 + warp) * p.columns;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      if (piece < pieces) to[own_column + piece * kPieceColumns + sum_column(lane)] = totals[piece];
  }
  if (fused) update_amax(p, layout->largest, warpgroup, warp, lane, amax_pair);
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <typename T, Function kFunction, int kColumns>
__global__ void __launch_bounds__(kThreads, 1) fp8_gelu_wgmma_kernel(const __grid_constant__ GeluProduct<T> p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto* const layout = reinterpret_cast<SharedLayout*>(shared_bytes);
  const Shared shared = {shared_address(shared_bytes)};
  const int strip = blockIdx.x % p.strips, part = blockIdx.x / p.strips;
  if (threadIdx.x == 0) shared.init_barriers();
  if (threadIdx.x < kColumns) {
    const int column = strip * kColumns + threadIdx.x;
    reinterpret_cast<T*>(layout->bias)[threadIdx.x] = p.bias && column < p.columns ? p.bias[column] : narrow<T>(-0.0f);
  }
  __syncthreads();

  if (threadIdx.x < kWarpgroup) {
    dealloc_registers<24>();
    if (threadIdx.x == 0) load_operands<kColumns>(p, shared, strip, part);
  } else {
    alloc_registers<112>();
    compute_tiles<kFunction, kColumns>(p, layout, shared, strip, part);
  }
}

#else

template <typename T, Function kFunction, int kColumns>
__global__ void __launch_bounds__(kStubThreads) fp8_gelu_wgmma_kernel(const __grid_constant__ GeluProduct<T> p) {}

#endif

// ---- host code ------------------------------------------------------------------------------------------------------

// Maps a dense matrix of bytes. `sizes`, `strides` (in rows) and `boxes` split its row index into kRank dimensions, the
// fastest-varying first. The map's innermost dimension is the columns, 128 per box.
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

// The even rows of every 16 rows of a are loaded first, so that rows g and g + 8 of a warp's accumulators are rows 2g
// and 2g + 1 of a.
CUtensorMap rows_map(const void* data, int64_t rows, int64_t columns) {
  return block_map<3>(data, columns, {8, 2, rows / 16}, {2, 1, 16}, {8, 2, kRows / 16});
}

// Row 8 t + 2 j + i of every 32 rows of b (t, j = 0..3, i = 0, 1) is loaded to row 8 j + 2 t + i of shared memory. Lane
// t of every 4 holds columns 8 j + 2 t + i of the accumulators, which are then the 8 neighbouring rows 8 t + 2 j + i of
// b.
CUtensorMap columns_map(const void* data, int64_t rows, int64_t columns, int box_rows) {
  return block_map<4>(data, columns, {2, 4, 4, rows / 32}, {1, 8, 2, 32}, {2, 4, 4, box_rows / 32});
}

template <typename T>
int strips_of(const Fp8Matmul<T>& p) {
  return static_cast<int>(ceil_div(p.columns, strip_columns(p.inner)));
}

template <typename T>
int parts_of(const Fp8Matmul<T>& p) {
  return max(multiprocessors() / strips_of(p), 1);
}

// The workspace holds the flag `done`, each warp's column sums, and fp8_quantize()'s workspace.
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
  kernel<<<problem.strips * problem.parts, kThreads, int(sizeof(SharedLayout)), stream>>>(problem);
  pass.fused = {.done = done, .partials = partials, .partial_rows = partial_rows(p)};
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? fp8_quantize(pass, stream) : error;
}

template <typename T, Function kFunction>
cudaError_t launch(const Fp8Matmul<T>& p, const Fp8Quantize<T>& pass, Stream stream) {
  return strip_columns(p.inner) == 256 ? launch<T, kFunction, 256>(p, pass, stream)
                                       : launch<T, kFunction, 128>(p, pass, stream);
}

template <typename T>
bool supports(const Fp8Matmul<T>& p, const Fp8Quantize<T>& pass) {
  constexpr int64_t kLargest = int64_t{1} << 30;  // 32-bit indices
  const bool gelu = pass.source == Fp8Source::kGelu && !pass.column_sums;
  const bool dgelu = pass.source == Fp8Source::kGeluGradient && !p.bias;
  const Fp8Format format = gelu ? Fp8Format::kE4M3 : Fp8Format::kE5M2;
  if (!(gelu || dgelu) || !pass.history || !p.fast_accumulation) return false;
  if (p.a_format != format || p.b_format != Fp8Format::kE4M3 || pass.format != format) return false;
  if (p.rows < 1 || p.columns < 1 || p.inner < 1 || p.inner > kMaxInner) return false;
  if (p.rows >= kLargest || p.columns >= kLargest || strips_of(p) > multiprocessors()) return false;
  if (p.rows % 16 != 0 || p.columns % 32 != 0) return false;
  return all_aligned(p.a, p.b, p.out, pass.u, pass.out, pass.out_transposed) && tensor_map_encoder() &&
         built_for_wgmma<fp8_gelu_wgmma_kernel<T, Function::kGelu, 256>>();
}

// To make up for loading b, at least 85 % of the SMs must have a thread block, and each thread block at least 4 tiles.
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
