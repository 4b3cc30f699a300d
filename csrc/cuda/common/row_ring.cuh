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

constexpr int kMaxRingStages = 4;

// Under way beside the rows in hand. More would only put off the first of them.
constexpr int64_t kRingBytes = 40 << 10;

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
  const int64_t most = threads == kWarp ? max_threads / kWarp : std::min(max_threads / threads, kMaxParts);
  const int64_t height = std::min({fitting, most, ceil_div(rows, multiprocessors())});
  if (height == 0) return {};
  const int64_t grid = std::min<int64_t>(ceil_div(rows, height), multiprocessors());
  const int64_t steps = std::max<int64_t>(ceil_div(rows, height * grid), 2);  // no more stages than a block takes steps
  const int64_t wanted = std::max<int64_t>(1 + ceil_div(kRingBytes, height * row_bytes), 2);
  const int64_t stages = std::min({max_shared_bytes / (height * row_bytes), int64_t(kMaxRingStages), wanted, steps});
  return {.block = dim3(threads, static_cast<unsigned>(height)),
          .grid = grid_size(grid),
          .stages = static_cast<int>(stages),
          .shared_bytes = stages * height * row_bytes};
}

// The ring's bytes for one row of kArrays arrays. Every row begins at 16 bytes.
template <typename T, int kArrays>
int64_t ring_row_bytes(int64_t width) {
  return kArrays * ceil_div(width * int64_t(sizeof(T)), 16) * 16;
}

// The same row of kArrays arrays travels together.
template <typename R, int kArrays>
class RowRing {
  using T = typename R::T;
  static constexpr int kVec = R::kVec;
  static constexpr int kItems = R::kItems;

 public:
  // Of the arrays that are given the first kArrays travel.
  template <int kGiven>
  __device__ RowRing(void* shared, const T* const (&arrays)[kGiven], int64_t rows, int width, int stages)
      : width_(width),
        stages_(stages),
        left_(static_cast<int>(rows > first() ? (rows - first() - 1) / step() + 1 : 0)) {
    static_assert(kGiven >= kArrays);
    constexpr int kAlign = 16 / sizeof(T);
    pitch_ = (width + kAlign - 1) / kAlign * kAlign;
    stage_step_ = static_cast<int>(blockDim.y) * kArrays * pitch_;
    read_ = write_ = begin_ = static_cast<T*>(shared) + threadIdx.y * kArrays * pitch_;
#pragma unroll
    for (int a = 0; a < kArrays; ++a) from_[a] = arrays[a] + first() * width;
    row_step_ = step() * width;
    for (int i = 0; i < stages - 1; ++i) copy();
  }

  // The rows that this thread has a part in are first(), first() + step(), ...
  static __device__ int64_t first() { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }
  static __device__ int64_t step() { return int64_t(gridDim.x) * blockDim.y; }

  // The next of these rows in the first array; array a's follows a * pitch() elements behind. The place of the row
  // asked for before is used again from here on.
  __device__ const T* next() {
    copy();
    if (stages_ == 4)
      __pipeline_wait_prior(3);
    else if (stages_ == 3)
      __pipeline_wait_prior(2);
    else
      __pipeline_wait_prior(1);
    const T* row = read_;
    read_ = after(read_);
    return row;
  }

  __device__ int pitch() const { return pitch_; }

 private:
  __device__ T* after(T* place) const {
    place += stage_step_;
    return place == begin_ + stages_ * stage_step_ ? begin_ : place;
  }

  // Puts one more row on its way. Beyond the last the copies are empty: what is waited for is counted in copies.
  __device__ void copy() {
    if (left_ > 0) {
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
#pragma unroll
        for (int i = 0; i < kItems; ++i)
          if (R::has(i, width_)) copy_pack(write_ + a * pitch_ + R::column(i), from_[a] + R::column(i));
        from_[a] += row_step_;
      }
      --left_;
    }
    write_ = after(write_);
    __pipeline_commit();
  }

  // What is smaller than the 4 bytes that can be copied past the registers goes through them.
  static __device__ void copy_pack(T* shared, const T* global) {
    if constexpr (kVec * sizeof(T) >= 4)
      __pipeline_memcpy_async(shared, global, kVec * sizeof(T));
    else
      *shared = *global;
  }

  const T* from_[kArrays];
  int64_t row_step_;
  T* begin_;
  T* read_;
  T* write_;
  int width_;
  int pitch_;
  int stage_step_;
  int stages_;
  int left_;  // rows not yet on their way
};

}  // namespace gptkernels::cuda
