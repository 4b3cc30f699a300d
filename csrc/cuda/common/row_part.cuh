// The columns of a row that one thread of a team (teams.cuh) processes, for rows of any width and alignment.
//
// A pack is 16 bytes at a multiple of 16 bytes. Fewer than kVec elements are left before the first pack (the head) and
// after the last pack (the tail). Element i of the head is processed by the team's thread i, and element i of the tail
// by thread kVec + i. The drawing shows a row of 21 bfloat16 that starts 10 bytes after a multiple of 16:
//
//   address      0                16               32               48
//                |. . . . . x x x |x x x x x x x x |x x x x x x x x |x x . . . . . . |
//                           head   pack 0           pack 1           tail
//   thread                  0 1 2  0                1                8 9
//
// A kernel constructs a RowColumns (the thread's columns), and one RowPart per array (the thread's elements):
//
//   RowColumns at(base, rows, width);
//   RowPart x(p.x, at, slots);                                   starts the loads
//   at.each([&](auto place) { sum += f(x[place]); });            `place` is InRegisters, InShared or AtEdge
//   at.store(p.out, [&](auto place) { return g(x[place]); });
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>
#include <type_traits>

#include "packed.cuh"

namespace gptkernels::cuda {

// The places of a thread's elements. Each kind of place is a type, so that a generic lambda is compiled for each kind.
struct PackAt {
  int i;  // this thread's pack i
};
struct InRegisters : PackAt {};  // i < kItems
struct InShared : PackAt {};     // i >= kItems
struct AtEdge {};

template <int N>
struct Values {
  float v[N];
};

template <int kItems, int kVec>
struct RowValues {
  Values<kVec> packs[kItems];
  Values<1> edge;
  __device__ auto& operator[](InRegisters at) { return packs[at.i]; }
  __device__ auto& operator[](AtEdge) { return edge; }
};

// This thread's columns of its team's row: every threads()-th pack, and at most one edge element.
//
//   kHasHeadTail   rows may have a head and a tail; otherwise rows consist of whole packs
//   kMasked        only the first `columns` columns of a row are read; all further columns are masked, and written as 0
//   kOverflow      a thread may have more than kItems packs; the packs beyond kItems are in shared memory
//
// If kOverflow is true, thread 0 of the team is at the start of the 128-byte line that contains the first pack, so that
// no two warps of the team write packs to the same line. Threads in front of the first pack have no pack 0.
template <typename T_, typename Team, int kItems_, bool kHasHeadTail, bool kMasked, bool kOverflow_>
class RowColumns {
 public:
  using T = T_;
  static constexpr int kVec = kPack<T>;
  static constexpr int kItems = kItems_;
  static constexpr bool kOverflow = kOverflow_;

  // A team beyond the last row has no columns.
  __device__ RowColumns(const T* base, int64_t rows, int64_t width, int columns = 0) : begin_(Team::row() * width) {
    if (Team::row() >= rows) width = 0;
    width_ = static_cast<int>(width);
    columns_ = kMasked ? min(columns, width_) : width_;
    const int thread = Team::thread();
    const int head = kHasHeadTail ? min(elements_to(kVec, base + begin_), width_) : 0;
    const int before = kOverflow ? (kLine - elements_to(kLine, base + begin_ + head)) % kLine : 0;
    first_ = head - before + thread * kVec;
    end_ = kHasHeadTail ? head + (width_ - head) / kVec * kVec : width_;
    if (kHasHeadTail) edge_ = thread >= kVec ? end_ + thread - kVec : thread < head ? thread : width_;
  }

  __device__ int64_t begin() const { return begin_; }

  __device__ int column(PackAt at) const { return first_ + at.i * Team::threads() * kVec; }
  __device__ int column(AtEdge) const { return edge_; }

  template <typename Fn>
  __device__ void each(const Fn& fn) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (unmasked({i})) fn(InRegisters{i});
    if constexpr (kOverflow) {
      wait_for_copies();
      for (int i = kItems; unmasked({i}); ++i) fn(InShared{i});
    }
    if (unmasked(AtEdge{})) fn(AtEdge{});
  }

  template <typename Out, typename Fn>
  __device__ void store(Out* base, const Fn& fn) const {
    Out* row = base + begin_;
    const auto store_pack = [&](auto at) {
      Values<kVec> y = {};
      if (!kMasked || unmasked(at)) y = fn(at);
      mask(y.v, at, 0.f);
      store_narrow<kVec>(row + column(at), y.v);
    };
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (has({i})) store_pack(InRegisters{i});
    if constexpr (kOverflow) {
      wait_for_copies();
      for (int i = kItems; has({i}); ++i) store_pack(InShared{i});
    }
    if (kHasHeadTail && edge_ < width_) {
      Values<1> y = {};
      if (unmasked(AtEdge{})) y = fn(AtEdge{});
      store_narrow<1>(row + edge_, y.v);
    }
  }

  __device__ bool unmasked(PackAt at) const { return within(column(at), kMasked ? min(columns_, end_) : end_); }
  __device__ bool unmasked(AtEdge) const { return kHasHeadTail && edge_ < columns_; }

  template <typename Element, int N>
  __device__ void mask(Element (&x)[N], auto at, Element by) const {
    if constexpr (kMasked) {
      if (column(at) + N <= columns_) return;
#pragma unroll
      for (int k = 0; k < N; ++k)
        if (column(at) + k >= columns_) x[k] = by;
    }
  }

  template <typename Element, int N>
  __device__ void replace(Element (&x)[N], auto at, int column, Element by) const {
    const int k_there = column - this->column(at);
    if (static_cast<unsigned>(k_there) >= N) return;
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (k == k_there) x[k] = by;
  }

 private:
  static constexpr int kLine = 128 / sizeof(T);

  static __device__ int elements_to(int multiple, const T* p) {
    return static_cast<int>(-reinterpret_cast<uintptr_t>(p) / sizeof(T) % multiple);
  }

  static __device__ void wait_for_copies() { __pipeline_wait_prior(0); }

  __device__ bool has(PackAt at) const { return within(column(at), end_); }
  static __device__ bool within(int column, int end) {
    return kOverflow ? static_cast<unsigned>(column) < static_cast<unsigned>(end) : column < end;
  }

  int64_t begin_;
  int width_;
  int columns_;  // unmasked columns
  int first_;    // column of this thread's pack 0; negative or beyond end_ if there is none
  int end_;
  int edge_ = 0;  // with kHasHeadTail: the column of the edge element; width_ or more if the thread has none
};

// A thread's elements of one array, in the array's dtype. A thread accesses only shared memory that it has written
// itself, so no barrier is needed.
template <typename Columns>
class RowPart {
  using T = typename Columns::T;
  static constexpr int kVec = Columns::kVec;

 public:
  // `slots`, in shared memory, has room for the packs beyond kItems of every thread of the thread block.
  __device__ RowPart(const T* base, const Columns& columns, void* slots) : slots_(static_cast<Slot*>(slots)) {
    const T* row = base + columns.begin();
#pragma unroll
    for (int i = 0; i < Columns::kItems; ++i)
      if (columns.unmasked({i})) packs_[i] = load<kVec>(row + columns.column({i}));
    if constexpr (Columns::kOverflow) {
      for (int i = Columns::kItems; columns.unmasked({i}); ++i)
        __pipeline_memcpy_async(&raw(InShared{i}), row + columns.column({i}), sizeof(Slot));
      __pipeline_commit();
    }
    if (columns.unmasked(AtEdge{})) edge_.v[0] = row[columns.column(AtEdge{})];
  }

  __device__ auto& raw(InRegisters at) { return packs_[at.i]; }
  __device__ auto& raw(InShared at) { return slots_[(at.i - Columns::kItems) * blockDim.x + threadIdx.x]; }
  __device__ auto& raw(AtEdge) { return edge_; }

  // The asm statement hides from the compiler that an earlier pass converted the same pack. The compiler would
  // otherwise keep the float32 values, in twice as many registers.
  template <typename Place>
  __device__ auto operator[](Place at) {
    auto& packed = raw(at);
    if constexpr (sizeof(T) == 2 && std::is_same_v<Place, InRegisters>) {
      auto& words = reinterpret_cast<uint4&>(packed);
      asm("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    }
    Values<sizeof(packed) / sizeof(T)> x;
    widen(x.v, packed);
    return x;
  }

  template <typename Place, int N>
  __device__ void set(Place at, const Values<N>& x) {
    raw(at) = narrow<T>(x.v);
  }

 private:
  using Slot = Packed<T, kVec>;
  Slot packs_[Columns::kItems];
  Slot* slots_;
  Packed<T, 1> edge_;
};

}  // namespace gptkernels::cuda
