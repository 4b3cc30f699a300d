// A thread block transposes a tile of 128 x 128 bytes. Eight thread blocks are resident per SM, so that some load while
// others store. Consecutive thread blocks process tiles below each other, and therefore write neighbouring lines.

#include "../../fp8.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "transpose_tile.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreadColumns = 16;
using Tile = TransposedTile<kThreadColumns>;

__global__ void __launch_bounds__(Tile::kThreads, 8) fp8_transpose_kernel(const Fp8Transpose p) {
  __shared__ Tile tile;
  wait_for_previous_kernel();
  const int64_t bands = ceil_div(p.rows, Tile::kRows);
  const int64_t row = blockIdx.x % bands * Tile::kRows, column = blockIdx.x / bands * Tile::kColumns;
  const int64_t first = row + Tile::band() * Tile::kThreadRows, mine = column + Tile::group() * kThreadColumns;
  uint4 rows[Tile::kThreadRows];
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; ++i) {
    const bool exists = first + i < p.rows && mine < p.width;
    rows[i] = exists ? *reinterpret_cast<const uint4*>(p.x + (first + i) * p.width + mine) : uint4{};
  }
  tile.put([&](int i, int word) {
    return word == 0 ? rows[i].x : word == 1 ? rows[i].y : word == 2 ? rows[i].z : rows[i].w;
  });
  __syncthreads();
  tile.store(p.out, p.out_stride, row, column, fp8_padded(p.rows), p.width);
}

}  // namespace

Status fp8_transpose(const Fp8Transpose& p, Stream stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  const int64_t tiles = ceil_div(p.rows, Tile::kRows) * ceil_div(p.width, Tile::kColumns);
  launch_early<fp8_transpose_kernel>(dim3(grid_size(tiles)), dim3(Tile::kThreads), 0, stream, p);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
