// The part of a row that one thread of its team (common/teams.cuh) works on, at any width and any alignment: which
// columns these are, their loads, and their stores.
//
// Packs are 16 bytes at multiples of 16 bytes, wherever the row starts. Fewer than kVec elements are left before the
// first pack (the head) and after the last (the tail); each of the row's first 2 * kVec threads takes at most one of
// them. A row of 21 bfloat16 that starts 10 bytes after a multiple of 16:
//
//   address      0                16               32               48
//                |. . . . . x x x |x x x x x x x x |x x x x x x x x |x x . . . . . . |
//                           head   pack 0           pack 1           tail
//   thread                  0 1 2  0                1                8 9
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>

#include "common/packed.cuh"

namespace gptkernels::cuda {

// The threads of a block of Lanes teams. Small blocks balance best.
template <int kItems>
constexpr int kLanesThreads = kItems == 1 ? 128 : 64;

// How many columns of a row the softmax is over: all, or under the causal mask those up to the diagonal of its square
// matrix. The others are masked.
template <bool kCausal, typename Index>
__device__ Index columns_of(Index row, Index width) {
  return kCausal ? row % width + 1 : width;
}

// This thread's columns: every threads()-th pack, and at most one edge element (of the head or the tail). Without
// kHasHeadTail rows consist of whole packs. With kOnLines the threads are counted from the start of the first pack's
// 128-byte line, so that each warp writes whole lines; the threads before the first pack then have none there.
template <typename T, typename Team, bool kHasHeadTail, bool kCausal, bool kOnLines>
class RowColumns {
 public:
  static constexpr int kVec = kPack<T>;
  static constexpr int kLine = 128 / sizeof(T);
  static constexpr bool kMasked = kCausal;

  // For this team's row of the (rows, width) matrix at `base`. Beyond the last row there are no columns.
  __device__ RowColumns(const T* base, int64_t rows, int64_t width) : begin_(Team::row() * width) {
    if (Team::row() >= rows) width = 0;
    width_ = static_cast<int>(width);
    columns_ =
        kCausal && width ? columns_of<true>(static_cast<unsigned>(Team::row()), static_cast<unsigned>(width)) : width_;
    const int thread = Team::thread();
    const int head = kHasHeadTail ? min(elements_to(kVec, base + begin_), width_) : 0;
    const int before = kOnLines ? (kLine - elements_to(kLine, base + begin_ + head)) % kLine : 0;
    first_ = head - before + thread * kVec;
    end_ = kHasHeadTail ? head + (width_ - head) / kVec * kVec : width_;
    if (kHasHeadTail) edge_ = thread >= kVec ? end_ + thread - kVec : thread < head ? thread : width_;
  }

  __device__ int64_t begin() const { return begin_; }  // the row's offset in the matrix

  // Pack i: its first column, whether it is within the row, whether any of it is unmasked.
  __device__ int column(int i) const { return first_ + i * Team::threads() * kVec; }
  __device__ bool has(int i) const { return within(column(i), end_); }
  __device__ bool unmasked(int i) const { return within(column(i), kCausal ? min(columns_, end_) : end_); }

  __device__ int edge() const { return edge_; }
  __device__ bool has_edge() const { return kHasHeadTail && edge_ < width_; }
  __device__ bool edge_unmasked() const { return kHasHeadTail && edge_ < (kCausal ? columns_ : width_); }

  // Replaces the masked elements of pack i.
  template <typename Element>
  __device__ void mask(Element (&x)[kVec], int i, Element by) const {
    if constexpr (kCausal) {
      if (column(i) + kVec <= columns_) return;
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        if (column(i) + k >= columns_) x[k] = by;
    }
  }

 private:
  // The number of elements from p to the next address that is a multiple of so many elements.
  static __device__ int elements_to(int multiple, const T* p) {
    return static_cast<int>(-reinterpret_cast<uintptr_t>(p) / sizeof(T) % multiple);
  }

  static __device__ bool within(int column, int end) {
    return kOnLines ? static_cast<unsigned>(column) < static_cast<unsigned>(end) : column < end;
  }

  int64_t begin_;
  int width_;
  int columns_;  // that are not masked
  int first_;
  int end_;
  int edge_ = 0;
};

// The values of these columns, in the dtype of memory: for 16-bit types half the registers of float32. The first kItems
// packs are in registers. With kOverflow there may be more, which are in shared memory, in slots that only this thread
// accesses.
template <typename T, int kItems, bool kOverflow>
class RowPart {
 public:
  static constexpr int kVec = kPack<T>;

  // Issues every load before the first value is used, to have as many bytes in flight as possible. `slots` is the
  // block's shared memory: one pack for each thread and pack beyond kItems.
  template <typename Columns>
  __device__ RowPart(const T* base, const Columns& at, void* slots) : slots_(static_cast<Packed<T, kVec>*>(slots)) {
    const T* row = base + at.begin();
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (at.unmasked(i)) packs_[i] = load<kVec>(row + at.column(i));
    if constexpr (kOverflow) {
      for (int i = kItems; at.unmasked(i); ++i) __pipeline_memcpy_async(slot(i), row + at.column(i), sizeof(*slots_));
      __pipeline_commit();
    }
    if (at.edge_unmasked()) edge_ = row[at.edge()];
  }

  // To be called before the first use of a pack in shared memory.
  __device__ void wait_for_overflow() const {
    if constexpr (kOverflow) __pipeline_wait_prior(0);
  }

  __device__ float edge() const { return widen(edge_); }
  __device__ const Packed<T, kVec>& pack(int i) const { return packs_[i]; }

  // Pack i as accumulators. The asm statement hides from the compiler that an earlier pass converted the same pack;
  // otherwise it keeps the float32 values, in twice as many registers, to save the conversion.
  __device__ void widened(float (&x)[kVec], int i) {
    if constexpr (sizeof(T) == 2) {
      auto& words = reinterpret_cast<uint4&>(packs_[i]);
      asm("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    }
    widen(x, packs_[i]);
  }

  // Replaces the masked elements of pack i.
  template <typename Columns>
  __device__ void mask(const Columns& at, int i, float by) {
    at.mask(packs_[i].v, i, narrow<T>(by));
  }
  template <typename Columns>
  __device__ void mask_overflow(const Columns& at, int i, float by) const {
    at.mask(slot(i)->v, i, narrow<T>(by));
  }

  // Pack i of those in shared memory (i >= kItems).
  __device__ Packed<T, kVec>* slot(int i) const { return slots_ + (i - kItems) * blockDim.x + threadIdx.x; }

 private:
  Packed<T, kVec> packs_[kItems];
  Packed<T, kVec>* slots_;
  T edge_;
};

// Writes this thread's part of a row: pack(y, i) computes the elements of a pack in registers, overflow(y, i) those of
// one in shared memory, edge() the edge element. Masked elements become 0.
template <int kItems, bool kOverflow, typename T, typename Columns, typename Pack, typename Overflow, typename Edge>
__device__ void store_part(T* base, const Columns& at, const Pack& pack, const Overflow& overflow, const Edge& edge) {
  constexpr int kVec = kPack<T>;
  T* row = base + at.begin();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.has(i)) continue;
    float y[kVec] = {};
    if (at.unmasked(i)) {
      pack(y, i);
      at.mask(y, i, 0.f);
    }
    store_narrow<kVec>(row + at.column(i), y);
  }
  if constexpr (kOverflow)
    for (int i = kItems; at.has(i); ++i) {
      float y[kVec] = {};
      if (!Columns::kMasked || at.unmasked(i)) overflow(y, i);
      at.mask(y, i, 0.f);
      store_narrow<kVec>(row + at.column(i), y);
    }
  if (at.has_edge()) row[at.edge()] = narrow<T>(at.edge_unmasked() ? edge() : 0.f);
}

}  // namespace gptkernels::cuda
