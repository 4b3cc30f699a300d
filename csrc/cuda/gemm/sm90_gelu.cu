// Matmuls for sm_90a with bias and GELU, or with GELU's gradient and its sums over the rows.
#include "backend.h"
#include "cuda/common/partial_sums.cuh"
#include "cuda/elementwise/gelu.cuh"
#include "sm90_gelu.h"
#include "sm90_mainloop.cuh"

namespace gptkernels::cuda {
namespace {

using namespace tile_product;

[[maybe_unused]] constexpr int kAhead = 4;  // rows in flight per warp

enum class Function { kGelu, kDgelu };

template <typename T>
struct MatmulArguments : TileProduct<T> {
  T* pre;              // (rows, columns): written for GELU, read for GELU's gradient
  float* column_sums;  // (tiles of 64 rows, columns), or null
};

#if GPTKERNELS_WGMMA

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

#endif

// For GELU's gradient, each lane keeps the sums over the rows of its 8 columns in registers.
template <typename T, Function kFunction>
struct GeluEpilogue {
  using Arguments = MatmulArguments<T>;
  [[maybe_unused]] static constexpr bool kBias = kFunction == Function::kGelu, kMayBeIdle = false;

#if GPTKERNELS_WGMMA
  static __device__ int tiles(const Arguments& p) { return p.tiles; }

  static __device__ TilePosition tile_at(const Arguments& p, int tile, int rank) {
    return tile_position(tile / p.tiles_across, tile % p.tiles_across, rank);
  }

  static __device__ void run(const Arguments& p, uint8_t* shared_bytes, const Barriers& barriers, int rank) {
    const int lane = threadIdx.x % 32;
    const int pair = __shfl_sync(~0u, threadIdx.x / 32 - 12, 0);
    const uint32_t rounded = rounded_rows(shared_bytes, pair);
    unsigned phase = 0;
    for (int tile = blockIdx.x / kCluster; tile < tiles(p); tile += gridDim.x / kCluster) {
      const TilePosition at = tile_at(p, tile, rank);
      const int row = at.row + pair * kWarpRows, column = at.column + 8 * lane;
      const int rows = column < p.columns ? min(p.rows - row, kWarpRows) : 0;
      const int64_t first = static_cast<int64_t>(row) * p.columns + column;
      T* out = p.out + first;
      T* pre = p.pre + first;
      Words ahead[kAhead] = {};
      if constexpr (kFunction == Function::kDgelu) {
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
          if constexpr (kFunction == Function::kGelu) {
            store_global(pre, product);
            store_global(out, gelu_of<T>(product));
          } else {
            store_global(out, times_derivative<T>(product, ahead[i], sums));
            load_once(ahead[i], pre, r + kAhead < rows);
          }
          pre += p.columns;
          out += p.columns;
        }
      }
      __syncwarp();
      barrier_arrive_if(lane == 0, barriers.taken(pair));
      if (kFunction == Function::kDgelu && p.column_sums) add_column_sums(p, shared_bytes, at, pair, phase, sums);
      phase ^= 1;
    }
  }

 private:
  static __device__ void add_column_sums(const Arguments& p, uint8_t* shared_bytes, const TilePosition& at, int pair,
                                         unsigned phase, const float (&sums)[8]) {
    const int warpgroup = pair / 4, thread = threadIdx.x % kWarpgroup;
    float* const group =
        reinterpret_cast<float*>(shared_bytes + kSumsAt + phase * kSumsBytes) + warpgroup * (4 * kColumns);
    float4* const own = reinterpret_cast<float4*>(group + pair % 4 * kColumns + 8 * (thread % 32));
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
#endif
};

template <typename T>
Operands<T> operands(const Matmul<T>& p) {
  return {.a = p.a, .b = p.b, .rows = p.rows, .columns = p.columns, .inner = p.inner, .a_ld = p.a_ld, .b_ld = p.b_ld};
}

template <typename T, Function kFunction, bool kRowsAreK>
cudaError_t launch_gelu(const Matmul<T>& p, float* column_sums, Stream stream) {
  using Epilogue = GeluEpilogue<T, kFunction>;
  T* const pre = kFunction == Function::kGelu ? p.pre_gelu : const_cast<T*>(p.dgelu_at);
  return launch<Epilogue, kRowsAreK>({make_product<kRowsAreK>(operands(p), p.out, p.bias), pre, column_sums}, stream);
}

// b is not transposed in nn.Linear's backward and Conv1D's forward.
template <typename T, Function kFunction>
cudaError_t launch_gelu(const Matmul<T>& p, float* column_sums, Stream stream) {
  return p.b_transposed ? launch_gelu<T, kFunction, false>(p, column_sums, stream)
                        : launch_gelu<T, kFunction, true>(p, column_sums, stream);
}

// ---- which matmuls these kernels support ----------------------------------------------------------------------------

// All kernels are compiled for the same architectures.
template <typename T>
bool built() {
  return built_for_wgmma<matmul_wgmma_kernel<GeluEpilogue<T, Function::kGelu>, false>>();
}

template <typename T>
bool supports(const Matmul<T>& p) {
  const bool plain = p.batches == 1 && p.alpha == 1 && !p.wide_out && !p.accumulate;
  if (!plain || !(p.pre_gelu || p.dgelu_at) || p.a_transposed || p.out_ld != p.columns) return false;
  if (!p.dgelu_at && tiles_across(p.columns) * kColumns > kMaxBias) return false;
  return supports(operands(p)) && all_aligned(p.out, p.pre_gelu, p.dgelu_at) && built<T>();
}

// Our kernel is faster for GELU, and for GELU's gradient if it also makes a separate pass for the column sums
// unnecessary (docs/notes/mlp.md). With only a few large tiles, some SMs are idle at the end, and cuBLASLt is faster.
template <typename T>
bool is_faster(const Matmul<T>& p) {
  constexpr double kBusy = 0.85;
  return (p.pre_gelu || p.column_sums) && busy(tiles_down(p.rows) * tiles_across(p.columns)) >= kBusy;
}

}  // namespace

template <typename T>
bool matmul_sm90_supports(const Matmul<T>& p) {
  if constexpr (sizeof(T) != 2) {
    return false;
  } else {
    const GemmBackend requested = gemm_backend();
    return requested != GemmBackend::kCublas && supports(p) && (requested == GemmBackend::kOwn || is_faster(p));
  }
}

template <typename T>
int64_t matmul_sm90_workspace(const Matmul<T>& p) {
  return p.column_sums ? tiles_down(p.rows) * (kCluster * kRows / 64) * p.columns * int64_t(sizeof(float)) : 0;
}

template <typename T>
cudaError_t matmul_sm90(const Matmul<T>& p, void* workspace, Stream stream) {
  if constexpr (sizeof(T) != 2) {
    return cudaErrorNotSupported;
  } else {
    if (p.pre_gelu) return launch_gelu<T, Function::kGelu>(p, nullptr, stream);
    float* const partials = static_cast<float*>(p.column_sums ? workspace : nullptr);
    const cudaError_t error = launch_gelu<T, Function::kDgelu>(p, partials, stream);
    if (error != cudaSuccess || !partials) return error;
    launch_partial_sums<T, float>({.first = p.column_sums,
                                   .second = nullptr,
                                   .partials = partials,
                                   .count = tiles_down(p.rows) * (kCluster * kRows / 64),
                                   .width = p.columns,
                                   .split = p.columns},
                                  stream);
    return cudaGetLastError();
  }
}

#define GPTKERNELS_INSTANTIATE(T)                              \
  template bool matmul_sm90_supports<T>(const Matmul<T>&);     \
  template int64_t matmul_sm90_workspace<T>(const Matmul<T>&); \
  template cudaError_t matmul_sm90<T>(const Matmul<T>&, void*, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
