// A ring buffer in shared memory, for kernels whose thread blocks loop over rows. At 4.2 TB/s and 1 us of latency, each
// of an H200's 132 SMs needs 32 KB of loads in flight, for which registers have no space beside the current row. Every
// thread copies its packs of the next rows to shared memory by cp.async, and reads only what it has copied itself, so
// the ring needs no barrier. With 4 stages, while a team uses its row r:
//
//     stage 0         stage 1         stage 2         stage 3
//   +-------------+ +-------------+ +-------------+ +-------------+
//   | row r       | | row r + 1   | | row r + 2   | | row r + 3   |
//   | in use      | | in flight   | | in flight   | | in flight   |
//   +-------------+ +-------------+ +-------------+ +-------------+
//
// next() starts the copy of row r + 4 into stage 0, waits for row r + 1, and returns it. A stage holds one row for each
// of the blockDim.y teams of a thread block: its x, dout and dsum, one after another.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "cuda/common/launch.cuh"
#include "cuda/common/row.cuh"

namespace gptkernels::cuda {

struct RingShape {
  dim3 block;
  unsigned grid;
  int stages;  // 0 if two stages of a row, or a team's sums, do not fit
  int64_t shared_bytes;
};

// One thread block per SM, with as many teams as the rows, the threads, the named barriers and the shared memory allow.
// The ring has enough stages for kBytesInFlight, unless the shared memory, kMaxStages or the rows of a team allow
// fewer. `row_bytes` is the size of a row of x, dout and dsum together. After the last row, the same memory holds
// `sums_bytes` per team.
inline RingShape ring_shape(int64_t rows, int64_t row_bytes, int64_t sums_bytes, int threads, int max_threads,
                            int64_t max_shared_bytes) {
  constexpr int kMaxStages = 4;
  constexpr int64_t kBytesInFlight = 40 << 10;  // in addition to the current rows; more would delay the first row
  const int64_t fitting = max_shared_bytes / max(2 * row_bytes, sums_bytes);
  const int64_t most = threads == kWarp ? max_threads / kWarp : min(max_threads / threads, BlockPart::kMaxRows);
  const int64_t height = min(min(fitting, most), ceil_div(rows, multiprocessors()));
  if (height == 0) return {};
  const int64_t grid = min(ceil_div(rows, height), int64_t{multiprocessors()});
  // Rows per team; more stages would stay empty.
  const int64_t steps = max(ceil_div(rows, height * grid), int64_t{2});
  const int64_t wanted = max(1 + ceil_div(kBytesInFlight, height * row_bytes), int64_t{2});
  const int64_t stages = min(min(max_shared_bytes / (height * row_bytes), int64_t{kMaxStages}), min(wanted, steps));
  return {.block = dim3(threads, static_cast<unsigned>(height)),
          .grid = grid_size(grid),
          .stages = static_cast<int>(stages),
          .shared_bytes = height * max(stages * row_bytes, sums_bytes)};
}

// R is the Row that a team loads from the ring. dsum may be null. Rows consist of whole 16-byte packs of every array.
template <typename R, typename X>
class RowRing {
  using T = typename R::T;

 public:
  __device__ RowRing(void* shared, const T* x, const X* dout, const T* dsum, int64_t rows, int width, int stages)
      : x_(x + R::Team::row() * width),
        end_(x + rows * width),
        dout_(dout + R::Team::row() * width),
        dsum_(dsum ? dsum + R::Team::row() * width : nullptr),
        row_step_(step() * width),
        width_(width),
        stages_(stages) {
    const int row_elements = ((dsum ? 2 : 1) * kWide + 1) * width;
    stage_step_ = static_cast<int>(blockDim.y) * row_elements;
    read_ = write_ = begin_ = static_cast<X*>(shared) + threadIdx.y * row_elements;
#pragma unroll 1
    for (int i = 0; i < stages - 1; ++i) copy();
  }

  static __device__ int64_t step() { return int64_t(gridDim.x) * blockDim.y; }

  // Returns the team's next row of x in shared memory. From its address, dout() and dsum() compute the addresses of the
  // rows of dout and dsum. The call overwrites the previous row.
  __device__ const T* next() {
    copy();
    if (stages_ == 4)
      __pipeline_wait_prior(3);
    else if (stages_ == 3)
      __pipeline_wait_prior(2);
    else
      __pipeline_wait_prior(1);
    const X* row = read_;
    read_ = after(read_);
    return reinterpret_cast<const T*>(row);
  }

  static __device__ const X* dout(const T* x_row, int width) { return reinterpret_cast<const X*>(x_row + width); }
  static __device__ const T* dsum(const T* x_row, int width) {
    return reinterpret_cast<const T*>(dout(x_row, width) + width);
  }

 private:
  // Positions in shared memory count elements of X, which is not wider than T.
  static constexpr int kWide = sizeof(T) / sizeof(X);

  __device__ X* after(X* stage) const {
    stage += stage_step_;
    return stage == begin_ + stages_ * stage_step_ ? begin_ : stage;
  }

  // Beyond the last row, commits an empty group, because next() counts groups.
  __device__ void copy() {
    if (x_ < end_) {
      copy(write_, x_);
      copy(write_ + kWide * width_, dout_);
      if (dsum_) copy(write_ + (kWide + 1) * width_, dsum_);
    }
    write_ = after(write_);
    __pipeline_commit();
  }

  template <typename U>
  __device__ void copy(X* to, const U*& from) {
    for (int i = 0; i < R::kItems; ++i)
      if (R::has(i, width_))
        __pipeline_memcpy_async(reinterpret_cast<U*>(to) + R::column(i), from + R::column(i), R::kVec * sizeof(U));
    from += row_step_;
  }

  const T* x_;
  const T* end_;
  const X* dout_;
  const T* dsum_;
  int64_t row_step_;
  X* begin_;
  X* read_;
  X* write_;
  int width_;
  int stage_step_;
  int stages_;
};

}  // namespace gptkernels::cuda
