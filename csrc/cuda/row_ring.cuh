// Rows on their way through shared memory, for kernels in which each block walks over many rows.
//
// Bandwidth is bytes in flight: at 4.2 TB/s and a microsecond's latency an H200's multiprocessor needs some 60 KB of
// loads under way at all times. Registers have no room for that beside the row in hand. So a thread copies its packs of
// the rows to come into a ring in shared memory (cp.async, past the registers), and takes the row whose turn it is from
// there. It reads only what it copied itself: no barrier.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "row.cuh"

namespace gptkernels::cuda {

constexpr int kMaxRingStages = 8;

// How a block works on rows: block.x threads a row, block.y rows at a time, `stages` times as many in shared memory.
struct RingShape {
  dim3 block;
  unsigned grid;
  int stages;  // 0: not even two stages of one row fit
  int64_t shared_bytes;
};

// One block a multiprocessor, with as many rows as its threads allow and as many stages as fit.
inline RingShape ring_shape(int64_t rows, int64_t row_bytes, int threads, int max_threads, int64_t max_shared_bytes) {
  const int64_t fitting = max_shared_bytes / (2 * row_bytes);
  const int64_t most = threads == kWarp ? max_threads / kWarp : std::min(max_threads / threads, kMaxBlockRows);
  const int64_t height = std::min({fitting, most, ceil_div(rows, multiprocessors())});
  if (height == 0) return {};
  const int64_t stages = std::min<int64_t>(max_shared_bytes / (height * row_bytes), kMaxRingStages);
  return {.block = dim3(threads, static_cast<unsigned>(height)),
          .grid = grid_size(std::min<int64_t>(ceil_div(rows, height), multiprocessors())),
          .stages = static_cast<int>(stages),
          .shared_bytes = stages * height * row_bytes};
}

// The ring's bytes for one row of kArrays arrays. Every row begins at 16 bytes.
template <typename T, int kArrays>
int64_t ring_row_bytes(int64_t width) {
  return kArrays * ceil_div(width * int64_t(sizeof(T)), 16) * 16;
}

// The same row of kArrays arrays travels together.
template <typename T, int kVec, int kItems, int kArrays>
class RowRing {
  using R = Row<T, kVec, kItems>;

 public:
  __device__ RowRing(void* shared, const T* const (&arrays)[kArrays], int64_t rows, int64_t width, int stages)
      : rows_(rows), width_(width), pitch_(static_cast<int>((width * sizeof(T) + 15) / 16 * 16 / sizeof(T))) {
#pragma unroll
    for (int a = 0; a < kArrays; ++a) arrays_[a] = arrays[a];
    stages_ = stages;
    begin_ = static_cast<T*>(shared) + threadIdx.y * kArrays * pitch_;
    for (int i = 0; i < stages - 1; ++i) copy(i, first() + i * step());
  }

  // The rows that this thread has a part in are first(), first() + step(), ...
  static __device__ int64_t first() { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }
  static __device__ int64_t step() { return int64_t(gridDim.x) * blockDim.y; }

  // Row `row` of the first array; array a's follows a * pitch() elements behind. The call puts the last row but one's
  // place to use again, so rows must be asked for in order.
  __device__ const T* next(int64_t row) {
    copy(stage_ > 0 ? stage_ - 1 : stages_ - 1, row + (stages_ - 1) * step());
    __pipeline_wait_prior(stages_ - 1);
    const T* slot = place(stage_);
    stage_ = stage_ + 1 < stages_ ? stage_ + 1 : 0;
    return slot;
  }

  __device__ int pitch() const { return pitch_; }

 private:
  __device__ T* place(int stage) const { return begin_ + stage * static_cast<int>(blockDim.y) * kArrays * pitch_; }

  // Rows beyond the last are empty copies: what is waited for is counted in copies.
  __device__ void copy(int stage, int64_t row) const {
    if (row < rows_) {
      T* to = place(stage);
#pragma unroll
      for (int a = 0; a < kArrays; ++a)
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int column = static_cast<int>(R::column(i));
          if (column < width_) copy_pack(to + a * pitch_ + column, arrays_[a] + row * width_ + column);
        }
    }
    __pipeline_commit();
  }

  // What is smaller than the 4 bytes that can be copied past the registers goes through them.
  static __device__ void copy_pack(T* shared, const T* global) {
    if constexpr (kVec * sizeof(T) >= 4)
      __pipeline_memcpy_async(shared, global, kVec * sizeof(T));
    else
      *shared = *global;
  }

  const T* arrays_[kArrays];
  int64_t rows_;
  int64_t width_;
  int pitch_;
  int stages_;
  T* begin_;
  int stage_ = 0;
};

}  // namespace gptkernels::cuda
