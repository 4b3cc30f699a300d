#pragma once

#include <cstdint>

#include "convert.cuh"

namespace gptkernels::cuda {

// A tile of 128 rows and 8 * kThreadColumns columns of bytes, which 256 threads transpose. Thread t holds 4 rows (band
// t / 8) and kThreadColumns columns (group t % 8). In shared memory, the 4 rows of a column are one 32-bit word, and a
// column of group g has band b's word at index b ^ (4 * g), so that the lanes of a warp (four bands, all eight groups)
// write to different banks. Columns are written to global memory as whole lines of 128 bytes.
template <int kThreadColumns>
struct TransposedTile {
  static constexpr int kRows = 128;
  static constexpr int kThreadRows = 4;
  static constexpr int kBands = kRows / kThreadRows;
  static constexpr int kGroups = 8;
  static constexpr int kColumns = kGroups * kThreadColumns;
  static constexpr int kThreads = kGroups * kBands;
  static_assert(kThreads / 32 * kThreadRows == kBands && 4 * kGroups == kBands);

  static __device__ int group() { return threadIdx.x % kGroups; }
  static __device__ int band() { return threadIdx.x / kGroups; }

  // words(row, i) returns bytes 4 * i to 4 * i + 3 of the thread's row `row` (0 to 3).
  template <typename Words>
  __device__ void put(const Words& words) {
#pragma unroll
    for (int i = 0; i < kThreadColumns / 4; ++i) {
      uint32_t some[kThreadRows];
#pragma unroll
      for (int row = 0; row < kThreadRows; ++row) some[row] = words(row, i);
      transpose_bytes(some);
#pragma unroll
      for (int k = 0; k < 4; ++k) columns[group() * kThreadColumns + 4 * i + k][band() ^ (4 * group())] = some[k];
    }
  }

  // Writes the tile to the transposed matrix `out`, whose rows are `stride` bytes apart. The tile begins at (row,
  // column) of the matrix (rows, width); parts beyond the matrix are skipped. `rows` is a multiple of 16.
  __device__ void store(uint8_t* out, int64_t stride, int64_t row, int64_t column, int64_t rows, int64_t width) const {
    constexpr int kChunks = kRows / 16;
#pragma unroll
    for (int i = 0; i < kColumns * kChunks / kThreads; ++i) {
      const int chunk = i * kThreads + threadIdx.x;
      const int mine = chunk / kChunks, place = chunk % kChunks, its_group = mine / kThreadColumns;
      if (column + mine >= width || row + 16 * place >= rows) continue;
      const uint4 bytes = *reinterpret_cast<const uint4*>(&columns[mine][(4 * place) ^ (4 * its_group)]);
      __stwb(reinterpret_cast<uint4*>(out + (column + mine) * stride + row + 16 * place), bytes);
    }
  }

  alignas(16) uint32_t columns[kColumns][kBands];
};

}  // namespace gptkernels::cuda
