// Layernorm with float8 output. If the scale is known, x (2 bytes per element) is read once. The float8 result (1 byte
// per element) is written once or, with a transposed copy, twice.
//
// A warp keeps a row in registers, as in layernorm_forward_registers_kernel. A thread block assembles tiles of 32 whole
// rows in shared memory, so that the transposed copy is stored in whole sectors of 32 bytes.
//
// The same kernel is launched twice:
//
// - The first launch normalises, writes the sums (with a residual), the statistics and each thread block's largest
//   magnitude, and updates the amax history. It also quantises if the scale is known: if there is a history that is not
//   all zeros.
// - The second launch returns at once if the scale was known. If not, it computes the scale from the thread blocks'
//   largest magnitudes, normalises again, and quantises.
#include <limits>

#include "../../fp8_scale.h"
#include "amax_history.cuh"
#include "convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/norm/forward.cuh"
#include "cuda/norm/shape.cuh"
#include "layernorm.h"

namespace gptkernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTileRows = 32;
constexpr int kMaxBlocks = 2048;

struct CalibrationWorkspace {
  int32_t active;  // 1: no scale, so the second launch must quantise
  float largest[kMaxBlocks];
};

template <typename R>
constexpr int kResident = R::kItems <= 3   ? 4
                          : R::kItems <= 5 ? 3
                                           : 2;

// ---- a tile's bytes in shared memory ----

// A row occupies whole lines of 128 bytes.
__device__ __host__ constexpr int line_bytes(int width) {
  return (width + 127) / 128 * 128;
}

// Rows 16 to 31 have the halves of each line exchanged, so that the two lanes that read rows 0..15 and 16..31 of the
// same columns in store_transposed() use different banks.
__device__ int place(int row, int column) {
  return column ^ (row / 16 * 64);
}

// Two neighbouring lanes store 4 columns, 16 rows each.
__device__ void store_transposed(const uint8_t* tile, uint8_t* out, int64_t tile_row, int64_t padded, int width) {
  const int pitch = line_bytes(width);
  for (int i = threadIdx.y * kWarp + threadIdx.x; i < width / 2; i += kThreads) {
    const int column = i / 2 * 4, row = i % 2 * 16;
    if (tile_row + row >= padded) continue;
    const uint8_t* from = tile + row * pitch + place(row, column);
    // words[j][k] is 4 columns of row 4 * j + k and, after transpose_bytes(), rows 4 * j to 4 * j + 3 of column k.
    uint32_t words[4][4];
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

// ---- the kernel ----

// kCalibrated is true in the second launch. With a residual, p.x is then the sum that the first launch has written.
template <typename R, bool kResidual, bool kCalibrated>
__global__ void __launch_bounds__(kThreads, kResident<R>)
    fp8_layernorm_kernel(const LayernormForward<typename R::T> p, const Fp8Quantize<typename R::T> quantization,
                         CalibrationWorkspace* first, int count, float inverse) {
  using T = typename R::T;
  constexpr int kVec = R::kVec;
  extern __shared__ __align__(128) uint8_t tile[];
  __shared__ int32_t shared_bits;
  const int width = static_cast<int>(p.width), pitch = line_bytes(width);
  const int64_t padded = fp8_padded(p.rows);
  const bool first_thread = threadIdx.x == 0 && threadIdx.y == 0;
  wait_for_previous_kernel();
  if (kCalibrated && !first->active) return;
  int32_t largest = 0;
  if constexpr (kCalibrated) {
    float amax = 0;
    for (int i = threadIdx.y * kWarp + threadIdx.x; i < count; i += kThreads) amax = fmaxf(amax, first->largest[i]);
    amax = block_amax<kWarps>(amax);
    if (first_thread) shared_bits = __float_as_int(amax);
    __syncthreads();
    largest = shared_bits;
  } else {
    largest = history_amax(quantization.history);
  }
  const bool writes = kCalibrated || largest != 0;
  const bool e4m3 = quantization.format == Fp8Format::kE4M3;
  const auto format = e4m3 ? __NV_E4M3 : __NV_E5M2;
  const Fp8Scale scale = fp8_scale(static_cast<uint32_t>(largest), e4m3 ? 8 : 15);
  const float multiplier = __uint_as_float(scale.multiplier);
  if (blockIdx.x == 0 && first_thread) {
    if (writes) *quantization.scale = __uint_as_float(scale.scale);
    if (!kCalibrated) first->active = !writes;
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
      if (!kCalibrated && threadIdx.x == 0) store_statistics(p, row, m);
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
        __stwb(reinterpret_cast<uint2*>(quantization.out + row * width + column), bytes);
        *reinterpret_cast<uint2*>(tile_bytes + place(in_tile, column)) = bytes;
      });
    }
    if (!writes || quantization.out_transposed == nullptr) continue;
    __syncthreads();
    store_transposed(tile, quantization.out_transposed, tile_row, padded, width);
    __syncthreads();
  }

  if constexpr (!kCalibrated) {
    amax = block_amax<kWarps>(amax);
    if (first_thread) {
      first->largest[blockIdx.x] = amax;
      if (quantization.history) update_history(quantization.history, __float_as_int(amax));
    }
  }
}

// ---- launches ----

template <typename R, bool kResidual, bool kCalibrated>
unsigned launch(const LayernormForward<typename R::T>& p, const Fp8Quantize<typename R::T>& quantization,
                CalibrationWorkspace* first, int count, Stream stream) {
  constexpr auto kKernel = fp8_layernorm_kernel<R, kResidual, kCalibrated>;
  max_dynamic_shared_memory<kKernel>();
  const int64_t filling = min(int64_t{kResident<R>} * multiprocessors(), int64_t{kMaxBlocks});
  const unsigned grid = grid_size(min(ceil_div(p.rows, kTileRows), filling));
  const int64_t bytes = kTileRows * line_bytes(static_cast<int>(p.width));
  launch_early<kKernel>(dim3(grid), dim3(kWarp, kWarps), bytes, stream, p, quantization, first, count,
                        1 / float(p.width));
  return grid;
}

template <bool kResidual, typename R>
void launch_both(LayernormForward<typename R::T> p, const Fp8Quantize<typename R::T>& quantization, Stream stream) {
  auto* const first = static_cast<CalibrationWorkspace*>(quantization.workspace);
  const unsigned count = launch<R, kResidual, false>(p, quantization, first, 0, stream);
  if constexpr (kResidual) p.x = p.sum;
  launch<R, false, true>(p, quantization, first, static_cast<int>(count), stream);
}

template <typename T>
RowShape shape_of_row(const LayernormForward<T>& p) {
  return row_shape<T, Block>(max(p.width / kPack<T>, int64_t{1}), kMaxWarpItems, forward_max_threads<T>);
}

}  // namespace

int64_t fp8_layernorm_workspace() {
  return sizeof(CalibrationWorkspace);
}

template <typename T>
bool fp8_layernorm_supports(const LayernormForward<T>& p, const Fp8Quantize<T>& quantization) {
  if constexpr (sizeof(T) != 2) {
    return false;
  } else {
    const bool vectors =
        can_vectorize<T>(p.width, p.sum, p.x, p.residual, p.weight, p.bias, p.x_bias, quantization.out);
    return p.rows > 0 && p.rows <= std::numeric_limits<int>::max() && vectors && shape_of_row(p).threads == kWarp &&
           quantization.source == Fp8Source::kValues && quantization.column_sums == nullptr;
  }
}

template <typename T>
Status fp8_layernorm(const LayernormForward<T>& p, const Fp8Quantize<T>& quantization, Stream stream) {
  if constexpr (sizeof(T) == 2) {
    with_warp_row<T, kMaxWarpItems>(shape_of_row(p), [&](auto type) {
      using R = typename decltype(type)::type;
      if (p.residual)
        launch_both<true, R>(p, quantization, stream);
      else
        launch_both<false, R>(p, quantization, stream);
    });
  }
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                                             \
  template bool fp8_layernorm_supports<T>(const LayernormForward<T>&, const Fp8Quantize<T>&); \
  template Status fp8_layernorm<T>(const LayernormForward<T>&, const Fp8Quantize<T>&, Stream);
GPTKERNELS_FOR_FP8(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
