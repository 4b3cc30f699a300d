// Rows too wide for registers, read from memory once: they stream through shared memory, warp by warp.
//
// A row lies over all the warps of a thread-block cluster (before sm_90: of one block), which has the rows row0,
// row0 + clusters, ... of a persistent grid. Each warp owns the same part of every row and a ring of slots for it in
// shared memory: while it works on a row, its parts of the next ones are on their way into the other slots, and a slot
// is loaded anew as soon as this warp is done with it. So loads never stop, and warps meet in sums and maxima alone:
//
//   WideRows<T, 1, kVec, kKept> rows(shape, p.rows, p.width, {p.x});
//   for (; rows.more(); rows.next()) {
//     rows.wait();
//     SoftmaxSum<T> sum;
//     rows.each(-infinity, {p.width, -1}, [&](auto column, auto& x, auto exceptional) { sum.add(x[0]); });
//     rows.reduce(sum);
//     rows.write(p.out, {p.width, -1}, [&](auto column, auto& x, auto exceptional) { ... x[0][k] becomes an output ...
//     });
//   }
//
// Packs are 16 bytes at multiples of 16 bytes, also where a row does not begin or end at one: the first and the last
// pack then hold elements of neighbouring rows, or lie beyond the last row, but never beyond the allocation. These are
// replaced as they are read and never written, so it does not matter that nobody may have written them yet, or that in
// place somebody else may just be doing it. All arrays that are read must lie alike (in_step), else
// kVec is 1; the one that is written may lie otherwise, and is then written element by element.
//
// Where not even one row fits (kKept = false), the same interface reads it from memory in each pass, and no byte beyond
// the row. wide_row_launch.cuh says what fits where.
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>
#include <type_traits>

#include "hopper.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {

// The threads of all blocks on a multiprocessor: 80 registers for each, which is what two packs in flight take; more
// for four packs that come from memory, and for float64.
template <typename T, bool kKept>
constexpr int kWideThreads = kKept && sizeof(T) < 8 ? 768 : 512;

struct WideShape {
  int cluster;    // blocks that share a row
  int warps;      // of a block
  int stages;     // slots of a ring
  int64_t part;   // packs of a slot, a multiple of 32
  unsigned grid;  // blocks
  unsigned shared_bytes;
};

// What WideRows::reduce makes of all threads' values: `merge` takes another's in, `warp_reduce` a whole warp's. The
// default value is that of no elements.
template <typename A>
struct WideSum {
  A total = 0;

  __device__ void merge(const WideSum& other) { total += other.total; }
  __device__ void warp_reduce() { total = cuda::warp_reduce<Sum>(total); }
};

template <typename T, int kArrays, int kVec, bool kKept>
class WideRows {
 public:
  using A = accumulate_t<T>;
  using Column = std::conditional_t<kKept, int, int64_t>;  // a row that is kept is no wider than shared memory

  // The rows' first loads begin here. `wanted(row)` says whether a row is read at all.
  template <typename Wanted>
  __device__ WideRows(const WideShape& shape, int64_t rows, int64_t width, const T* const (&arrays)[kArrays],
                      const Wanted& wanted)
      : rows_(rows),
        width_(static_cast<Column>(width)),
        part_(shape.part),
        stages_(shape.stages),
        warps_(blockDim.x / kWarp) {
    for (int a = 0; a < kArrays; ++a) arrays_[a] = arrays[a];
#if GPTKERNELS_HOPPER
    cluster_ = shape.cluster;
    rank_ = cluster_rank();
#endif
    row_ = blockIdx.x / cluster_;
    stride_ = gridDim.x / cluster_;
    if constexpr (kKept) ring_ = shared() + int64_t(warp()) * stages_ * kArrays * part_;
    initialise_barriers();
    if constexpr (kKept)
      for (int i = 0; i < stages_; ++i) load(i, row_ + int64_t(i) * stride_, wanted(row_ + int64_t(i) * stride_));
    join();
  }

  __device__ WideRows(const WideShape& shape, int64_t rows, int64_t width, const T* const (&arrays)[kArrays])
      : WideRows(shape, rows, width, arrays, [](int64_t) { return true; }) {}

  __device__ bool more() {
    if (row_ < rows_) return true;
    join();  // others may still write to this block's shared memory
    return false;
  }

  __device__ int64_t row() const { return row_; }
  __device__ int64_t next_row() const { return row_ + stride_; }
  __device__ int64_t loaded_next() const {
    return row_ + int64_t(stages_) * stride_;
  }  // the row that next() begins to load
  __device__ bool first_thread() const { return rank_ == 0 && threadIdx.x == 0; }

  __device__ void next(bool wanted = true) {
    if constexpr (kKept) {
      load(slot_, loaded_next(), wanted);
      if (++slot_ == stages_) {
        slot_ = 0;
        parity_ ^= 1;
      }
    }
    row_ += stride_;
  }

  // Waits until this warp's part of the row has come. Once a row, before the first `each` or `write`.
  __device__ void wait() {
    if constexpr (kKept) {
#if GPTKERNELS_HOPPER
      mbarrier_wait(full(slot_), parity_);
#else
      __pipeline_wait_prior(stages_ - 1);
#endif
    }
  }

  // Columns that a kernel treats unlike the others: `column`, and all from `end` on.
  struct Exceptions {
    Column end;
    Column column;
  };

  // fn(column, x, exceptional) with x the accumulators of the pack of every array that begins at `column`; what lies
  // outside of the row is `outside`. A warp whose part has no exceptions is spared the look at each pack:
  // `exceptional` is a constant.
  template <typename Fn>
  __device__ void each(A outside, Exceptions exceptions, const Fn& fn) const {
    packs(exceptions, [&](Column column, A(&x)[kArrays][kVec], auto exceptional) {
      if (exceptional.value && !whole(column)) {
#pragma unroll
        for (int k = 0; k < kVec; ++k)
          if (column + k < 0 || column + k >= width_)
#pragma unroll
            for (int a = 0; a < kArrays; ++a) x[a][k] = outside;
      }
      fn(column, x, exceptional);
    });
  }

  // The same, and what fn leaves in x[0] goes to the row of `out`; a pack at a time where that is in step.
  template <typename Fn>
  __device__ void write(T* out, Exceptions exceptions, const Fn& fn) const {
    T* row = out + row_ * width_;
    if (elements_before<Pack>(row) != elements_before<Pack>(arrays_[0] + row_ * width_)) exceptions.end = 0;
    packs(exceptions, [&](Column column, A(&x)[kArrays][kVec], auto exceptional) {
      fn(column, x, exceptional);
      if (exceptional.value)
        store_within(row, column, width_, narrow<T>(x[0]));
      else
        store_narrow<kVec>(row + column, x[0]);
    });
  }

  // Every element of the row of `out` becomes `value`; nothing is read.
  __device__ void fill(T* out, A value) const {
    Pack values;
#pragma unroll
    for (int k = 0; k < kVec; ++k) values.v[k] = narrow<T>(value);
    const Part part = part_of(row_);
    for (Column i = lane(); i < part.count; i += kWarp)
      store_within<kVec, Column>(out + row_ * width_, part.first + i * kVec, width_, values);
  }

  // Every thread gets what all threads' values together make. One meeting a row is all it takes: a warp sends its value
  // to all blocks of the cluster and waits for those of all warps. Two sets of places, in turn, so that nobody writes
  // to one that is still being read: who is at the reduction after the next has met all others in the next.
  template <typename V>
  __device__ void reduce(V& value) {
    value.warp_reduce();
    const int parts = cluster_ * warps_;
    if (parts == 1) return;
    V* places = reinterpret_cast<V*>(shared() + ring_packs() + (reductions_ & 1) * parts * kPlace);
    if (cluster_ == 1) {
      if (lane() == 0) places[warp()] = value;
      __syncthreads();
    } else {
#if GPTKERNELS_HOPPER
      uint64_t* met = barriers() + (reductions_ & 1);
      if (threadIdx.x == 0) mbarrier_expect(met, parts * sizeof(V));
      if (lane() < cluster_) store_in_block(places + rank_ * warps_ + warp(), value, met, lane());
      mbarrier_wait(met, reductions_ / 2 & 1);
#endif
    }
    ++reductions_;
    value = lane() < parts ? places[lane()] : V();
    for (int i = lane() + kWarp; i < parts; i += kWarp) value.merge(places[i]);
    value.warp_reduce();
  }

  // Of dynamic shared memory: the rings, the places of two reductions, the barriers.
  static int64_t shared_bytes(const WideShape& shape) {
    const int64_t meetings = 2 * (shape.cluster * shape.warps * kPlace * 16 + sizeof(uint64_t));
    return (kKept ? shape.stages * stage_bytes(shape) : 0) + meetings;
  }

  // A slot and its barrier, for all warps.
  static int64_t stage_bytes(const WideShape& shape) {
    return shape.warps * (kArrays * shape.part * 16 + sizeof(uint64_t));
  }

 private:
  using Pack = Packed<T, kVec>;
  static constexpr int kPlace = sizeof(A) / 4;  // of 16 bytes: room for two accumulators, and more
  static constexpr int kInFlight = kKept || kArrays > 1 ? 2 : 4;

  static __device__ uint4* shared() {
    extern __shared__ uint4 wide_row_shared[];
    return wide_row_shared;
  }
  static __device__ int lane() { return threadIdx.x % kWarp; }
  static __device__ int warp() { return threadIdx.x / kWarp; }
  __device__ int ring_packs() const { return kKept ? warps_ * stages_ * kArrays * static_cast<int>(part_) : 0; }
  __device__ uint64_t* barriers() const {
    return reinterpret_cast<uint64_t*>(shared() + ring_packs() + 2 * cluster_ * warps_ * kPlace);
  }
  __device__ uint64_t* full(int slot) const { return barriers() + 2 + warp() * stages_ + slot; }
  __device__ Pack* slot(int slot, int array) const {
    return reinterpret_cast<Pack*>(ring_ + (slot * kArrays + array) * part_);
  }
  __device__ bool whole(Column column) const { return column >= 0 && column + kVec <= width_; }

  // This warp's packs of a row. Where the row's first pack begins in another row, its column is negative.
  struct Part {
    Column first;
    Column count;
  };

  __device__ Part part_of(int64_t row) const {
    const int head = elements_before<Pack>(arrays_[0] + row * width_);
    const int64_t packs = (head + width_ + kVec - 1) / kVec;
    const int64_t before = (int64_t(rank_) * warps_ + warp()) * part_;
    const int64_t left = packs - before;
    return {static_cast<Column>(before * kVec - head), static_cast<Column>(left < 0 ? 0 : left < part_ ? left : part_)};
  }

  // Begins to load this warp's part of a row, or nothing, which arrives at once. The lanes read the slot before they
  // meet here, and the copy is begun after.
  __device__ void load(int slot, int64_t row, bool wanted) {
    wanted = wanted && row < rows_;
    const Part part = part_of(row);
#if GPTKERNELS_HOPPER
    __syncwarp();
    if (lane() == 0) {
      const unsigned bytes = wanted ? part.count * sizeof(Pack) : 0;
      mbarrier_expect(full(slot), bytes * kArrays);
      if (bytes)
#pragma unroll
        for (int a = 0; a < kArrays; ++a)
          bulk_load(this->slot(slot, a), arrays_[a] + row * width_ + part.first, bytes, full(slot));
    }
#else
    if (wanted)
#pragma unroll
      for (int a = 0; a < kArrays; ++a)
        for (Column i = lane(); i < part.count; i += kWarp)
          __pipeline_memcpy_async(this->slot(slot, a) + i, arrays_[a] + row * width_ + part.first + i * kVec,
                                  sizeof(Pack));
    __pipeline_commit();
#endif
  }

  template <typename Fn>
  __device__ void packs(Exceptions exceptions, const Fn& fn) const {
    const Part part = part_of(row_);
    const Column end = part.first + part.count * kVec;
    const bool plain =
        part.first >= 0 && end <= exceptions.end && (exceptions.column < part.first || exceptions.column >= end);
    if (plain)
      packs(part, std::false_type(), fn);
    else
      packs(part, std::true_type(), fn);
  }

  // Several packs are on their way from shared or global memory before the first is used.
  template <typename Exceptional, typename Fn>
  __device__ void packs(const Part& part, Exceptional exceptional, const Fn& fn) const {
    const auto [first, count] = part;
    for (Column start = lane(); start < count; start += kWarp * kInFlight) {
      Pack raw[kInFlight][kArrays];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u)
        if (start + u * kWarp < count)
#pragma unroll
          for (int a = 0; a < kArrays; ++a) raw[u][a] = pack(a, first, start + u * kWarp, exceptional);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (start + u * kWarp >= count) break;
        A x[kArrays][kVec];
#pragma unroll
        for (int a = 0; a < kArrays; ++a) widen(x[a], raw[u][a]);
        fn(first + (start + u * kWarp) * kVec, x, exceptional);
      }
    }
  }

  template <typename Exceptional>
  __device__ Pack pack(int array, Column first, Column i, Exceptional) const {
    const T* row = arrays_[array] + row_ * width_;
    if constexpr (kKept)
      return slot(slot_, array)[i];
    else if constexpr (kVec > 1 && Exceptional::value)
      return load_within<kVec>(row, first + i * kVec, width_);
    else
      return cuda::load<kVec>(row + first + i * kVec);
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

  const T* arrays_[kArrays];
  int64_t rows_;
  Column width_;
  int64_t part_;
  int stages_;
  int warps_;
  int cluster_ = 1;
  int rank_ = 0;
  int64_t row_;
  int stride_;
  uint4* ring_ = nullptr;
  int slot_ = 0;
  unsigned parity_ = 0;
  unsigned reductions_ = 0;
};

}  // namespace gptkernels::cuda
