// Quantisation of a matrix (N, C) to float8, with an optional transposed copy and column sums. If there is no amax
// history, or only zeros in it, fp8_largest_kernel first finds the amax. fp8_quantize_kernel computes the scale,
// quantises, and updates the history.
//
// A thread block processes every gridDim.y-th tile of 128 rows of a strip of 64 columns. A thread transposes the bytes
// of 4 rows x 8 columns in registers. The transposed tile is assembled in shared memory, for stores of whole 128-byte
// lines.
#include "../../fp8.h"
#include "../../fp8_scale.h"
#include "amax_history.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/partial_sums.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/elementwise/gelu.cuh"
#include "transpose_tile.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreadColumns = 8;
using Tile = TransposedTile<kThreadColumns>;
constexpr int kTileRows = Tile::kRows;
constexpr int kTileColumns = Tile::kColumns;
constexpr int kThreadRows = Tile::kThreadRows;
constexpr int kGroups = Tile::kGroups;
constexpr int kThreads = Tile::kThreads;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWarpBands = kWarp / kGroups;

// ---------------------------------------------------------------------------------------------------------------
// The function of x and u that is quantised (Fp8Source).

// kResident is the number of thread blocks per SM for __launch_bounds__; these numbers were the fastest
// (docs/notes/fp8.md).
struct ValuesSource {
  static constexpr bool kReadsU = false;
  static constexpr int kResident = 3;
  template <typename T>
  static __device__ float of(float x, float) {
    return x;
  }
};

struct GeluSource {
  static constexpr bool kReadsU = false;
  static constexpr int kResident = 4;
  template <typename T>
  static __device__ float of(float x, float) {
    return widen(narrow<T>(GeluTanh<T>::value(x)));
  }
};

struct GeluGradientSource {
  static constexpr bool kReadsU = true;
  static constexpr int kResident = 3;
  template <typename T>
  static __device__ float of(float x, float u) {
    return widen(narrow<T>(x * GeluTanh<T>::derivative(u)));
  }
};

constexpr int kMaxResident = 4;

template <typename T>
struct Part {
  Packed<T, kPack<T>> packs[kThreadColumns / kPack<T>];

  template <bool kVector>
  __device__ void load_from(const T* from, int64_t count) {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += kPack<T>) {
      auto& pack = packs[i / kPack<T>];
      if constexpr (kVector) {
        pack = count > 0 ? load<kPack<T>>(from + i) : Packed<T, kPack<T>>{};
      } else {
#pragma unroll
        for (int k = 0; k < kPack<T>; ++k) pack.v[k] = i + k < count ? from[i + k] : narrow<T>(0.0f);
      }
    }
  }

  __device__ void to(float (&values)[kThreadColumns]) const {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += kPack<T>) {
      float some[kPack<T>];
      widen(some, packs[i / kPack<T>]);
#pragma unroll
      for (int k = 0; k < kPack<T>; ++k) values[i + k] = some[k];
    }
  }
};

template <typename T>
__device__ bool is_already_quantized(const Fp8Quantize<T>& p) {
  return p.fused.done && *p.fused.done;
}

// ---------------------------------------------------------------------------------------------------------------
// The amax of the values to be quantised. It determines the scale if the amax history does not.

constexpr int kMaxAmaxBlocks = 1024;

template <typename T, typename Source, bool kVector>
__global__ void __launch_bounds__(kThreads) fp8_largest_kernel(const Fp8Quantize<T> p, float* largest) {
  wait_for_previous_kernel();
  if (history_amax(p.history) > 0 || is_already_quantized(p)) return;
  const int64_t size = p.rows * p.width;
  const int64_t stride = int64_t(gridDim.x) * kThreads * kThreadColumns;
  float amax = 0;
  for (int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kThreadColumns; i < size; i += stride) {
    Part<T> x, u;
    float values[kThreadColumns], others[kThreadColumns] = {};
    x.template load_from<kVector>(p.x + i, size - i);
    x.to(values);
    if constexpr (Source::kReadsU) {
      u.template load_from<kVector>(p.u + i, size - i);
      u.to(others);
    }
#pragma unroll
    for (int k = 0; k < kThreadColumns; ++k)
      amax = fmaxf(amax, fabsf(finite_or_nan(Source::template of<T>(values[k], others[k]))));
  }
  amax = block_amax<kWarps>(amax);
  if (threadIdx.x == 0) largest[blockIdx.x] = amax;
}

// ---------------------------------------------------------------------------------------------------------------
// Quantisation.

template <typename T, typename Source, bool kVector>
__global__ void __launch_bounds__(kThreads, Source::kResident)
    fp8_quantize_kernel(const Fp8Quantize<T> p, const float* largest, int count, sum_t<T>* partials) {
  using A = sum_t<T>;
  __shared__ Tile tiles[2];
  __shared__ int32_t shared_bits;
  const int group = Tile::group(), band = Tile::band();
  const int64_t column = int64_t(blockIdx.x) * kTileColumns;
  const int64_t mine = column + group * kThreadColumns, columns = p.width - mine;
  const int64_t stride = int64_t(gridDim.y) * kTileRows;
  Part<T> x[kThreadRows], u[Source::kReadsU ? kThreadRows : 1];
  const auto load_tile = [&](int64_t tile) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int64_t row = tile + band * kThreadRows + i;
      const int64_t at = row * p.width + mine, left = row < p.rows ? columns : 0;
      x[i].template load_from<kVector>(p.x + at, left);
      if constexpr (Source::kReadsU) u[i].template load_from<kVector>(p.u + at, left);
    }
  };

  wait_for_previous_kernel();
  if (is_already_quantized(p)) return;
  int64_t tile = int64_t(blockIdx.y) * kTileRows;
  if (tile < p.rows) load_tile(tile);
  int32_t bits = history_amax(p.history);
  if (bits == 0) {
    float amax = 0;
    for (int i = threadIdx.x; i < count; i += kThreads) amax = fmaxf(amax, largest[i]);
    bits = __float_as_int(block_amax<kWarps>(amax));
  }
  if (threadIdx.x == 0) shared_bits = bits;
  __syncthreads();
  const bool e4m3 = p.format == Fp8Format::kE4M3;
  const auto format = e4m3 ? __NV_E4M3 : __NV_E5M2;
  const Fp8Scale scale = fp8_scale(static_cast<uint32_t>(shared_bits), e4m3 ? 8 : 15);
  const float multiplier = __uint_as_float(scale.multiplier);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.scale = __uint_as_float(scale.scale);

  A sums[kThreadColumns] = {};
  float amax = 0;
  for (int buffer = 0; tile < p.rows; tile += stride, buffer ^= 1) {
    uint2 rows[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      float values[kThreadColumns], others[kThreadColumns] = {};
      x[i].to(values);
      if constexpr (Source::kReadsU) u[i].to(others);
#pragma unroll
      for (int k = 0; k < kThreadColumns; ++k) {
        const float value = Source::template of<T>(values[k], others[k]);
        sums[k] += value;
        const float finite = finite_or_nan(value);
        amax = fmaxf(amax, fabsf(finite));
        values[k] = finite * multiplier;
      }
      rows[i] = to_fp8(values, format);
      const int64_t row = tile + band * kThreadRows + i;
      if (row >= p.rows || p.out == nullptr) continue;
      uint8_t* to = p.out + row * p.width + mine;
      if constexpr (kVector) {
        if (columns > 0) __stwb(reinterpret_cast<uint2*>(to), rows[i]);
      } else {
#pragma unroll
        for (int k = 0; k < kThreadColumns; ++k)
          if (k < columns) to[k] = static_cast<uint8_t>((k < 4 ? rows[i].x : rows[i].y) >> 8 * (k % 4));
      }
    }
    if (p.out_transposed) tiles[buffer].put([&](int i, int word) { return word ? rows[i].y : rows[i].x; });
    if (tile + stride < p.rows) load_tile(tile + stride);
    if (p.out_transposed == nullptr) continue;
    __syncthreads();
    const int64_t padded = fp8_padded(p.rows);
    tiles[buffer].store(p.out_transposed, padded, tile, column, padded, p.width);
  }

  if (p.history) {
    amax = block_amax<kWarps>(amax);
    if (threadIdx.x == 0) update_history(p.history, __float_as_int(amax));
  }
  if (p.column_sums == nullptr) return;
  using Bands = A[kWarps][kTileColumns];
  Bands& bands = *reinterpret_cast<Bands*>(tiles);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kThreadColumns; ++k) {
#pragma unroll
    for (int lanes = kGroups; lanes < kWarp; lanes *= 2) sums[k] += __shfl_xor_sync(0xFFFFFFFFu, sums[k], lanes);
    if (band % kWarpBands == 0) bands[threadIdx.x / kWarp][group * kThreadColumns + k] = sums[k];
  }
  __syncthreads();
  const int64_t sum_column = column + threadIdx.x;
  if (threadIdx.x >= kTileColumns || sum_column >= p.width) return;
  A sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += bands[i][threadIdx.x];
  partials[int64_t(blockIdx.y) * p.width + sum_column] = sum;
}

// ---------------------------------------------------------------------------------------------------------------
// Launches.

constexpr int64_t kAmaxBytes = kMaxAmaxBlocks * sizeof(float);

// grid.x is the number of strips, and grid.y the number of thread blocks per strip. Unless there are more strips, the
// grid has at most `resident` thread blocks per SM.
dim3 quantize_grid(int64_t rows, int64_t width, int resident) {
  constexpr int64_t kMaxRuns = 1024;
  const int64_t strips = max(ceil_div(width, kTileColumns), int64_t{1});
  const int64_t filling = max(int64_t{resident} * multiprocessors() / strips, int64_t{1});
  const int64_t runs = clamp(ceil_div(rows, kTileRows), 1, min(filling, kMaxRuns));
  return {grid_size(strips), static_cast<unsigned>(runs)};
}

template <typename T, typename Source, bool kVector>
void launch(const Fp8Quantize<T>& p, Stream stream) {
  auto* largest = static_cast<float*>(p.workspace);
  void* const own_partials = static_cast<char*>(p.workspace) + kAmaxBytes;
  auto* const partials = static_cast<sum_t<T>*>(p.fused.partials ? p.fused.partials : own_partials);
  const int64_t size = p.rows * p.width;
  const int64_t filling = min(int64_t{8} * multiprocessors(), int64_t{kMaxAmaxBlocks});
  const auto count = static_cast<int>(clamp(ceil_div(size, kThreads * kThreadColumns), 1, filling));
  launch_early<fp8_largest_kernel<T, Source, kVector>>(dim3(count), dim3(kThreads), 0, stream, p, largest);
  const dim3 grid = quantize_grid(p.rows, p.width, Source::kResident);
  launch_early<fp8_quantize_kernel<T, Source, kVector>>(grid, dim3(kThreads), 0, stream, p, largest, count, partials);
  if (p.column_sums && p.width > 0)
    launch_partial_sums<T, sum_t<T>>({.first = p.column_sums,
                                      .second = nullptr,
                                      .partials = partials,
                                      .count = max(int64_t{grid.y}, p.fused.partial_rows),
                                      .width = p.width,
                                      .split = p.width},
                                     stream);
}

template <typename T, typename Source>
Status launch(const Fp8Quantize<T>& p, Stream stream) {
  if (can_vectorize<T>(p.width, p.x, p.u, p.out) && p.width % kThreadColumns == 0)
    launch<T, Source, true>(p, stream);
  else
    launch<T, Source, false>(p, stream);
  return cudaGetLastError();
}

}  // namespace

template <typename T>
int64_t fp8_quantize_workspace(int64_t rows, int64_t width) {
  const int64_t most = quantize_grid(rows, width, kMaxResident).y;
  return kAmaxBytes + most * width * int64_t(sizeof(sum_t<T>));
}

template <typename T>
Status fp8_quantize(const Fp8Quantize<T>& p, Stream stream) {
  switch (p.source) {
    case Fp8Source::kGelu: return launch<T, GeluSource>(p, stream);
    case Fp8Source::kGeluGradient: return launch<T, GeluGradientSource>(p, stream);
    default: return launch<T, ValuesSource>(p, stream);
  }
}

#define GPTKERNELS_INSTANTIATE(T)                               \
  template int64_t fp8_quantize_workspace<T>(int64_t, int64_t); \
  template Status fp8_quantize<T>(const Fp8Quantize<T>&, Stream);
GPTKERNELS_FOR_FP8(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
