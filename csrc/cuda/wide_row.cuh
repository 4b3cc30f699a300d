// Rows too wide for registers, read from memory once: they pass through a ring in shared memory.
//
// A row is divided over all warps of a thread-block cluster (before sm_90: of one block). The grid is persistent: a
// cluster works on the rows row0, row0 + clusters, ... Each warp owns the same part of every row and a ring of stages
// for it in shared memory. Loads never stop, because a warp starts the next load into a stage as soon as it has
// finished with it itself; warps synchronise only when they reduce.
//
//            stage 0            stage 1            stage 2
//   warp 0   row r, in use      row r + 1          row r + 2        columns of part 0
//   warp 1   row r, in use      row r + 1          row r + 2        columns of part 1
//   warp 2   free: loads        row r + 1, in use  row r + 2        columns of part 2; this warp is ahead of the others
//            row r + 3
//
//   WideRows<T> rows(shape, p.x, p.rows, p.width, wanted);
//   for (; rows.more(); rows.next(wanted_next)) {
//     rows.wait();
//     SoftmaxSum<T> sum;
//     rows.each(-infinity, {p.width, -1}, [&](int column, auto& x, auto boundary) { sum.add(x); });
//     rows.reduce(sum);
//     rows.write(p.out, {p.width, -1}, [&](int column, auto& x, auto boundary) { ... x[k] becomes an output ... });
//   }
//
// Packs are 16 bytes at multiples of 16 bytes, also where a row does not start or end at one. The first and the last
// pack of a row may then hold elements of the neighbouring rows (but never lie outside the allocation). These elements
// are replaced when they are read, and never written; so it does not matter if, in place, another cluster overwrites
// them at that moment. The output may have another alignment, and is then written element by element.
//
// wide_row_launch.cuh chooses the shape.
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>
#include <type_traits>

#include "common/hopper.cuh"
#include "common/packed.cuh"
#include "common/reduce.cuh"

namespace gptkernels::cuda {

// Threads on an SM, over all its blocks. They have 80 registers each, enough for two packs in flight; float64 needs
// more.
template <typename T>
constexpr int kWideThreads = sizeof(T) < 8 ? 768 : 512;

struct WideShape {
  int cluster;    // blocks that share a row
  int warps;      // of a block
  int stages;     // of a ring
  int64_t part;   // packs of a stage, a multiple of 32
  unsigned grid;  // blocks
  unsigned shared_bytes;
};

template <typename T>
class WideRows {
 public:
  using A = accumulate_t<T>;
  static constexpr int kVec = kPack<T>;

  // Starts the loads of the first rows. wanted(row) says whether a row has to be read at all.
  template <typename Wanted>
  __device__ WideRows(const WideShape& shape, const T* x, int64_t rows, int64_t width, const Wanted& wanted)
      : x_(x),
        rows_(rows),
        width_(static_cast<int>(width)),
        part_(shape.part),
        stages_(shape.stages),
        warps_(blockDim.x / kWarp) {
#if GPTKERNELS_HOPPER
    cluster_ = shape.cluster;
    rank_ = cluster_rank();
#endif
    row_ = blockIdx.x / cluster_;
    stride_ = gridDim.x / cluster_;
    ring_ = shared() + int64_t(warp()) * stages_ * part_;
    initialise_barriers();
    for (int i = 0; i < stages_; ++i) load(i, row_ + int64_t(i) * stride_, wanted(row_ + int64_t(i) * stride_));
    join();
  }

  __device__ bool more() {
    if (row_ < rows_) return true;
    join();  // other blocks may still write to this block's shared memory
    return false;
  }

  __device__ int64_t row() const { return row_; }
  __device__ int64_t next_row() const { return row_ + stride_; }
  // The row whose load next() starts.
  __device__ int64_t loaded_next() const { return row_ + int64_t(stages_) * stride_; }
  __device__ bool first_thread() const { return rank_ == 0 && threadIdx.x == 0; }

  __device__ void next(bool wanted) {
    load(stage_, loaded_next(), wanted);
    if (++stage_ == stages_) {
      stage_ = 0;
      parity_ ^= 1;
    }
    row_ += stride_;
  }

  // Waits for this warp's part of the row. To be called once per row, before `each` and `write`.
  __device__ void wait() {
#if GPTKERNELS_HOPPER
    mbarrier_wait(full(stage_), parity_);
#else
    __pipeline_wait_prior(stages_ - 1);
#endif
  }

  // Columns that a kernel treats differently from the others: one column, and all columns from `end` on.
  struct BoundaryColumns {
    int end;
    int column;
  };

  // Calls fn(column, x, boundary) with the accumulators x of the pack that starts at `column`; elements outside the row
  // are `outside`. `boundary` is a constant: false in warps whose part has no boundary column, so that these do not
  // check each pack.
  template <typename Fn>
  __device__ void each(A outside, BoundaryColumns columns, const Fn& fn) const {
    packs(columns, [&](int column, A(&x)[kVec], auto boundary) {
      if (boundary.value && !whole(column)) {
#pragma unroll
        for (int k = 0; k < kVec; ++k)
          if (column + k < 0 || column + k >= width_) x[k] = outside;
      }
      fn(column, x, boundary);
    });
  }

  // The same, and writes the x that fn leaves to the row of `out`.
  template <typename Fn>
  __device__ void write(T* out, BoundaryColumns columns, const Fn& fn) const {
    T* row = out + row_ * width_;
    if (elements_before<Pack>(row) != elements_before<Pack>(x_ + row_ * width_)) columns.end = 0;
    packs(columns, [&](int column, A(&x)[kVec], auto boundary) {
      fn(column, x, boundary);
      if (boundary.value)
        store_within(row, column, width_, narrow<T>(x));
      else
        store_narrow<kVec>(row + column, x);
    });
  }

  // Sets every element of the row of `out` to `value`; reads nothing.
  __device__ void fill(T* out, A value) const {
    Pack values;
#pragma unroll
    for (int k = 0; k < kVec; ++k) values.v[k] = narrow<T>(value);
    const Part part = part_of(row_);
    for (int i = lane(); i < part.count; i += kWarp)
      store_within<kVec, int>(out + row_ * width_, part.first + i * kVec, width_, values);
  }

  // Combines the values of all threads, with V's merge and warp_reduce (V() is neutral), and gives every thread the
  // result. Each warp sends its value to all blocks of the cluster and waits for the values of all warps. Two sets of
  // slots take turns: a warp that writes to a set has received the other set's values of all warps, and these had read
  // this one.
  template <typename V>
  __device__ void reduce(V& value) {
    value.warp_reduce();
    const int parts = cluster_ * warps_;
    if (parts == 1) return;
    V* slots = reinterpret_cast<V*>(shared() + ring_packs() + (reductions_ & 1) * parts * kSlot);
    if (cluster_ == 1) {
      if (lane() == 0) slots[warp()] = value;
      __syncthreads();
    } else {
#if GPTKERNELS_HOPPER
      uint64_t* met = barriers() + (reductions_ & 1);
      if (threadIdx.x == 0) mbarrier_expect(met, parts * sizeof(V));
      if (lane() < cluster_) store_in_block(slots + rank_ * warps_ + warp(), value, met, lane());
      mbarrier_wait(met, reductions_ / 2 & 1);
#endif
    }
    ++reductions_;
    value = lane() < parts ? slots[lane()] : V();
    for (int i = lane() + kWarp; i < parts; i += kWarp) value.merge(slots[i]);
    value.warp_reduce();
  }

  // Dynamic shared memory: the rings, the slots of two reductions, the barriers.
  static int64_t shared_bytes(const WideShape& shape) {
    const int64_t meetings = 2 * (shape.cluster * shape.warps * kSlot * 16 + sizeof(uint64_t));
    return shape.stages * stage_bytes(shape) + meetings;
  }

  // One stage and its barrier, for all warps.
  static int64_t stage_bytes(const WideShape& shape) { return shape.warps * (shape.part * 16 + sizeof(uint64_t)); }

 private:
  using Pack = Packed<T, kVec>;
  static constexpr int kSlot = sizeof(A) / 4;  // in units of 16 bytes: at least two accumulators
  static constexpr int kInFlight = 2;

  static __device__ uint4* shared() {
    extern __shared__ uint4 wide_row_shared[];
    return wide_row_shared;
  }
  static __device__ int lane() { return threadIdx.x % kWarp; }
  static __device__ int warp() { return threadIdx.x / kWarp; }
  __device__ int ring_packs() const { return warps_ * stages_ * static_cast<int>(part_); }
  __device__ uint64_t* barriers() const {
    return reinterpret_cast<uint64_t*>(shared() + ring_packs() + 2 * cluster_ * warps_ * kSlot);
  }
  __device__ uint64_t* full(int stage) const { return barriers() + 2 + warp() * stages_ + stage; }
  __device__ Pack* stage(int stage) const { return reinterpret_cast<Pack*>(ring_ + stage * part_); }
  __device__ bool whole(int column) const { return column >= 0 && column + kVec <= width_; }

  // This warp's packs of a row. `first` is negative if the row's first pack starts in the previous row.
  struct Part {
    int first;
    int count;
  };

  __device__ Part part_of(int64_t row) const {
    const int head = elements_before<Pack>(x_ + row * width_);
    const int64_t packs = (head + width_ + kVec - 1) / kVec;
    const int64_t before = (int64_t(rank_) * warps_ + warp()) * part_;
    const int64_t left = packs - before;
    return {static_cast<int>(before * kVec - head), static_cast<int>(left < 0 ? 0 : left < part_ ? left : part_)};
  }

  // Starts the load of this warp's part of a row, or an empty one, which completes at once. All lanes have read the
  // stage before the copy starts.
  __device__ void load(int stage, int64_t row, bool wanted) {
    wanted = wanted && row < rows_;
    const Part part = part_of(row);
#if GPTKERNELS_HOPPER
    __syncwarp();
    if (lane() == 0) {
      const unsigned bytes = wanted ? part.count * sizeof(Pack) : 0;
      mbarrier_expect(full(stage), bytes);
      if (bytes) bulk_load(this->stage(stage), x_ + row * width_ + part.first, bytes, full(stage));
    }
#else
    if (wanted)
      for (int i = lane(); i < part.count; i += kWarp)
        __pipeline_memcpy_async(this->stage(stage) + i, x_ + row * width_ + part.first + i * kVec, sizeof(Pack));
    __pipeline_commit();
#endif
  }

  template <typename Fn>
  __device__ void packs(BoundaryColumns columns, const Fn& fn) const {
    const Part part = part_of(row_);
    const int end = part.first + part.count * kVec;
    const bool plain = part.first >= 0 && end <= columns.end && (columns.column < part.first || columns.column >= end);
    if (plain)
      packs(part, std::false_type(), fn);
    else
      packs(part, std::true_type(), fn);
  }

  // Loads kInFlight packs from shared memory before it uses the first.
  template <typename Boundary, typename Fn>
  __device__ void packs(const Part& part, Boundary boundary, const Fn& fn) const {
    const auto [first, count] = part;
    for (int start = lane(); start < count; start += kWarp * kInFlight) {
      Pack raw[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u)
        if (start + u * kWarp < count) raw[u] = stage(stage_)[start + u * kWarp];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (start + u * kWarp >= count) break;
        A x[kVec];
        widen(x, raw[u]);
        fn(first + (start + u * kWarp) * kVec, x, boundary);
      }
    }
  }

  __device__ void initialise_barriers() {
#if GPTKERNELS_HOPPER
    if (threadIdx.x == 0)
      for (int i = 0; i < 2; ++i) mbarrier_init(barriers() + i);
    if (lane() == 0)
      for (int i = 0; i < stages_; ++i) mbarrier_init(full(i));
    mbarrier_init_fence();
#endif
  }

  __device__ void join() {
#if GPTKERNELS_HOPPER
    cluster_barrier();
#endif
  }

  const T* x_;
  int64_t rows_;
  int width_;
  int64_t part_;
  int stages_;
  int warps_;
  int cluster_ = 1;
  int rank_ = 0;
  int64_t row_;
  int stride_;
  uint4* ring_ = nullptr;
  int stage_ = 0;
  unsigned parity_ = 0;
  unsigned reductions_ = 0;
};

}  // namespace gptkernels::cuda
