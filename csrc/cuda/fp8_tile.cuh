// A tile of bytes, transposed through shared memory.
#pragma once

#include <cstdint>

#include "fp8_bytes.cuh"

namespace gptkernels::cuda {

// 128 rows and 8 * kSide columns, by 256 threads: thread t has the kSide neighbouring columns of group t % 8 in the 4
// neighbouring rows of band t / 8. Those 4 rows are 4 bytes of a column, and of band b they are at place b ^ 4 * group,
// so that the lanes of a store, which have four bands and all groups, write to different banks. The columns are then
// stored in whole lines of 128 bytes.
template <int kSide>
struct TransposedTile {
  static constexpr int kRows = 128;
  static constexpr int kDown = 4;
  static constexpr int kBands = kRows / kDown;
  static constexpr int kGroups = 8;
  static constexpr int kColumns = kGroups * kSide;
  static constexpr int kThreads = kGroups * kBands;
  static_assert(kThreads / 32 * kDown == kBands && 4 * kGroups == kBands);

  static __device__ int group() { return threadIdx.x % kGroups; }
  static __device__ int band() { return threadIdx.x / kGroups; }

  // Puts the thread's part into the tile. words(row, i) are bytes 4 i to 4 i + 3 of one of its rows.
  template <typename Words>
  __device__ void put(const Words& words) {
#pragma unroll
    for (int i = 0; i < kSide / 4; ++i) {
      uint32_t some[kDown];
#pragma unroll
      for (int row = 0; row < kDown; ++row) some[row] = words(row, i);
      transpose_bytes(some);
#pragma unroll
      for (int k = 0; k < 4; ++k) columns[group() * kSide + 4 * i + k][band() ^ (4 * group())] = some[k];
    }
  }

  // Writes the columns to out, where one is `stride` bytes after the other, 16 rows at a time: of the matrix's `width`
  // columns those from `column` on, of its `rows`, a multiple of 16, those from `row` on.
  __device__ void store(uint8_t* out, int64_t stride, int64_t row, int64_t column, int64_t rows, int64_t width) const {
    constexpr int kChunks = kRows / 16;  // of a column
#pragma unroll
    for (int i = 0; i < kColumns * kChunks / kThreads; ++i) {
      const int chunk = i * kThreads + threadIdx.x;
      const int mine = chunk / kChunks, place = chunk % kChunks, its_group = mine / kSide;
      if (column + mine >= width || row + 16 * place >= rows) continue;
      const uint4 bytes = *reinterpret_cast<const uint4*>(&columns[mine][(4 * place) ^ (4 * its_group)]);
      __stwb(reinterpret_cast<uint4*>(out + (column + mine) * stride + row + 16 * place), bytes);
    }
  }

  alignas(16) uint32_t columns[kColumns][kBands];
};

}  // namespace gptkernels::cuda
