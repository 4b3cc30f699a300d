// Layernorm with float8 output. Reads x, and the residual, and writes the sum, 2 bytes a number each, and the float8
// numbers twice, a byte each: 4 or 8 bytes a number.
//
// A warp has a row in registers, as in layernorm_forward_registers_kernel. A block has a tile of 32 whole rows: its
// bytes are put together in shared memory, so that the transposed copy is stored in runs of that many, whole sectors.
//
// Where the history has nothing but zeros, the kernel finds the largest magnitude alone. A second kernel, which
// otherwise ends at once, then normalises the sums and writes the float8 numbers.
#include <limits>

#include "../fp8_scale.h"
#include "common/launch.cuh"
#include "fp8_bytes.cuh"
#include "fp8_history.cuh"
#include "fp8_layernorm.h"
#include "layernorm_forward.cuh"
#include "layernorm_shape.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTileRows = 32;
constexpr int kMostBlocks = 2048;

// The workspace: what the second kernel needs to know.
struct FirstCall {
  int32_t is_one;              // whether there was no scale
  float largest[kMostBlocks];  // of each block of the first kernel
};

// The resident blocks of a multiprocessor for which there are registers.
template <typename R>
constexpr int kResident = R::kItems <= 3   ? 4
                          : R::kItems <= 5 ? 3
                                           : 2;

// ---- a tile's bytes in shared memory ----

// A row's bytes, in whole lines of 128. Rows from 16 on have the halves of each line exchanged, so that the lanes that
// store 32 rows of some columns read different banks.
__device__ __host__ constexpr int line_bytes(int width) {
  return (width + 127) / 128 * 128;
}

__device__ int place(int row, int column) {
  return column ^ (row / 16 * 64);
}

// Two neighbouring lanes store the 32 rows of 4 columns, 16 each.
__device__ void store_transposed(const uint8_t* tile, uint8_t* out, int64_t tile_row, int64_t padded, int width) {
  const int pitch = line_bytes(width);
  for (int i = threadIdx.y * kWarp + threadIdx.x; i < width / 2; i += kThreads) {
    const int column = i / 2 * 4, row = i % 2 * 16;
    if (tile_row + row >= padded) continue;
    const uint8_t* from = tile + row * pitch + place(row, column);
    uint32_t words[4][4];  // words[j][k]: 4 columns of row 4 * j + k, then rows 4 * j to 4 * j + 3 of column k
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) words[j][k] = *reinterpret_cast<const uint32_t*>(from + (4 * j + k) * pitch);
      transpose_bytes(words[j]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      __stwb(reinterpret_cast<uint4*>(out + (column + k) * padded + tile_row + row),
             uint4{words[0][k], words[1][k], words[2][k], words[3][k]});
  }
}

// ---- both kernels ----

// kSecond: the kernel for calls without a scale, whose x is the sum that the first has written, if there was a
// residual.
template <typename R, bool kResidual, bool kSecond>
__global__ void __launch_bounds__(kThreads, kResident<R>)
    fp8_layernorm_kernel(const LayernormForward<typename R::T> p, const Fp8Quantize<typename R::T> pass,
                         FirstCall* first, int count, float inverse) {
  using T = typename R::T;
  constexpr int kVec = R::kVec;
  extern __shared__ __align__(128) uint8_t tile[];
  __shared__ int32_t shared_bits;
  const int width = static_cast<int>(p.width), pitch = line_bytes(width);
  const int64_t padded = fp8_padded(p.rows);
  const bool first_thread = threadIdx.x == 0 && threadIdx.y == 0;
  wait_for_previous_kernel();
  if (kSecond && !first->is_one) return;
  int32_t largest = 0;
  if constexpr (kSecond) {
    float amax = 0;
    for (int i = threadIdx.y * kWarp + threadIdx.x; i < count; i += kThreads) amax = fmaxf(amax, first->largest[i]);
    amax = block_largest<kWarps>(amax);
    if (first_thread) shared_bits = __float_as_int(amax);
    __syncthreads();
    largest = shared_bits;
  } else {
    largest = history_largest(pass.history);
  }
  const bool writes = kSecond || largest != 0;
  const bool e4m3 = pass.format == Fp8Format::kE4M3;
  const auto format = e4m3 ? __NV_E4M3 : __NV_E5M2;
  const Fp8Scale scale = fp8_scale(static_cast<uint32_t>(largest), e4m3 ? 8 : 15);
  const float multiplier = __uint_as_float(scale.multiplier);
  if (blockIdx.x == 0 && first_thread) {
    if (writes) *pass.scale = __uint_as_float(scale.scale);
    if (!kSecond) first->is_one = !writes;
  }

  float amax = 0;
  for (int64_t tile_row = int64_t(blockIdx.x) * kTileRows; tile_row < p.rows; tile_row += gridDim.x * kTileRows) {
#pragma unroll 1
    for (int in_tile = threadIdx.y; in_tile < kTileRows; in_tile += kWarps) {
      const int64_t row = tile_row + in_tile;
      uint8_t* const tile_bytes = tile + in_tile * pitch;
      if (row >= p.rows) {
#pragma unroll
        for (int i = 0; i < R::kItems; ++i)
          if (R::has(i, width)) *reinterpret_cast<uint2*>(tile_bytes + place(in_tile, R::column(i))) = {};
        continue;
      }
      R packs, x;
      x.load(p.x + row * width, width);
      if constexpr (kResidual) {
        R residual;
        residual.load(p.residual + row * width, width);
        add_residual(packs, x, residual, p, row, NoDropout());
      } else {
        packs = x;
      }
      const Moments<float> m = row_moments(packs, width, inverse, p.eps);
      if (!kSecond && threadIdx.x == 0) store_statistics(p, row, m);
      const float offset = -m.rest * m.rstd;
      packs.each(width, [&](int i, float (&y)[kVec]) {
        const int column = R::column(i);
        float weight[kVec], bias[kVec];
        load_affine<false>(weight, bias, p, column);
        normalize(y, m, offset, weight, bias);
        const Packed<T, kVec> rounded = narrow<T>(y);
        widen(y, rounded);
#pragma unroll
        for (int k = 0; k < kVec; ++k) {
          const float finite = finite_or_nan(y[k]);
          amax = fmaxf(amax, fabsf(finite));
          y[k] = finite * multiplier;
        }
        if (!writes) return;
        const uint2 bytes = to_fp8(y, format);
        __stwb(reinterpret_cast<uint2*>(pass.out + row * width + column), bytes);
        *reinterpret_cast<uint2*>(tile_bytes + place(in_tile, column)) = bytes;
      });
    }
    if (!writes || pass.out_transposed == nullptr) continue;
    __syncthreads();
    store_transposed(tile, pass.out_transposed, tile_row, padded, width);
    __syncthreads();
  }

  if constexpr (!kSecond) {
    amax = block_largest<kWarps>(amax);
    if (first_thread) {
      first->largest[blockIdx.x] = amax;
      if (pass.history) note_largest(pass.history, __float_as_int(amax));
    }
  }
}

// ---- launches ----

// Returns the number of blocks.
template <typename R, bool kResidual, bool kSecond>
unsigned launch(const LayernormForward<typename R::T>& p, const Fp8Quantize<typename R::T>& pass, FirstCall* first,
                int count, Stream stream) {
  constexpr auto kKernel = fp8_layernorm_kernel<R, kResidual, kSecond>;
  max_dynamic_shared_memory<kKernel>();  // raises its limit
  const int64_t filling = std::min<int64_t>(int64_t(kResident<R>) * multiprocessors(), kMostBlocks);
  const unsigned grid = grid_size(std::min(ceil_div(p.rows, kTileRows), filling));
  const int64_t bytes = kTileRows * line_bytes(static_cast<int>(p.width));
  launch_early<kKernel>(dim3(grid), dim3(kWarp, kWarps), bytes, stream, p, pass, first, count, 1 / float(p.width));
  return grid;
}

template <bool kResidual, typename R>
void launch_both(LayernormForward<typename R::T> p, const Fp8Quantize<typename R::T>& pass, Stream stream) {
  auto* const first = static_cast<FirstCall*>(pass.workspace);
  const unsigned count = launch<R, kResidual, false>(p, pass, first, 0, stream);
  if constexpr (kResidual) p.x = p.sum;
  launch<R, false, true>(p, pass, first, static_cast<int>(count), stream);
}

template <typename T>
RowShape shape_of_row(const LayernormForward<T>& p) {
  return row_shape<T, Block>(std::max<int64_t>(p.width / kPack<T>, 1), kMostWarpItems, forward_max_threads<T>);
}

}  // namespace

int64_t fp8_layernorm_workspace() {
  return sizeof(FirstCall);
}

template <typename T>
bool fp8_layernorm_serves(const LayernormForward<T>& p, const Fp8Quantize<T>& pass) {
  if constexpr (sizeof(T) != 2) {
    return false;
  } else {
    const bool vectors = can_vectorize<T>(p.width, p.sum, p.x, p.residual, p.weight, p.bias, p.x_bias, pass.out);
    return p.rows > 0 && p.rows <= std::numeric_limits<int>::max() && vectors && shape_of_row(p).threads == kWarp &&
           pass.source == Fp8Source::kValues && pass.column_sums == nullptr;
  }
}

template <typename T>
Status fp8_layernorm(const LayernormForward<T>& p, const Fp8Quantize<T>& pass, Stream stream) {
  if constexpr (sizeof(T) == 2) {
    with_row<T, Warp, kMostWarpItems>(shape_of_row(p), [&](auto type) {
      using R = typename decltype(type)::type;
      if (p.residual)
        launch_both<true, R>(p, pass, stream);
      else
        launch_both<false, R>(p, pass, stream);
    });
  }
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                                           \
  template bool fp8_layernorm_serves<T>(const LayernormForward<T>&, const Fp8Quantize<T>&); \
  template Status fp8_layernorm<T>(const LayernormForward<T>&, const Fp8Quantize<T>&, Stream);
GPTKERNELS_FOR_FP8(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
