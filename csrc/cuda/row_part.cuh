// A thread's part of a row whose threads are a team (teams.cuh), at any width and wherever the row begins: which
// columns these are, their loads, and their stores.
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>

#include "common/packed.cuh"

namespace gptkernels::cuda {

// How many of a row's columns take part: all, or under the causal mask those up to the diagonal of its square matrix.
template <bool kCausal, typename Index>
__device__ Index columns_of(Index row, Index width) {
  return kCausal ? row % width + 1 : width;
}

// A thread's columns of its row: every threads()-th pack, and at most one single element. Packs lie at multiples of 16
// bytes wherever the row begins. What is left before the first and behind the last of them, less than a pack each, are
// the singles of the row's first 2 * kVec threads; where there are none (kSingles = false) nobody looks for them. Packs
// may also begin with those before the row that share a 128-byte line with its first one (kLines): no thread has these,
// but the packs of a warp fill whole lines, which no two warps then write parts of.
template <typename T, typename Team, bool kSingles, bool kCausal, bool kLines>
class RowColumns {
 public:
  static constexpr int kVec = kPack<T>;
  static constexpr int kLine = 128 / sizeof(T);
  static constexpr bool kMasked = kCausal;

  // Of a row of one of so many rows that begin at `base`; beyond the last row there are no columns.
  __device__ RowColumns(const T* base, int64_t rows, int64_t width) : begin_(Team::row() * width) {
    if (Team::row() >= rows) width = 0;
    width_ = static_cast<int>(width);
    columns_ =
        kCausal && width ? columns_of<true>(static_cast<unsigned>(Team::row()), static_cast<unsigned>(width)) : width_;
    const int thread = Team::thread();
    const int head = kSingles ? min(elements_to(kVec, base + begin_), width_) : 0;
    const int before = kLines ? (kLine - elements_to(kLine, base + begin_ + head)) % kLine : 0;
    first_ = head - before + thread * kVec;
    end_ = kSingles ? head + (width_ - head) / kVec * kVec : width_;
    if (kSingles) single_ = thread >= kVec ? end_ + thread - kVec : thread < head ? thread : width_;
  }

  __device__ int64_t begin() const { return begin_; }  // of the row

  // Pack i: its first column, whether the row has it, whether any of it takes part.
  __device__ int column(int i) const { return first_ + i * Team::threads() * kVec; }
  __device__ bool has(int i) const { return within(column(i), end_); }
  __device__ bool counts(int i) const { return within(column(i), kCausal ? min(columns_, end_) : end_); }

  __device__ int single() const { return single_; }
  __device__ bool has_single() const { return kSingles && single_ < width_; }
  __device__ bool single_counts() const { return kSingles && single_ < (kCausal ? columns_ : width_); }

  // Replaces what the mask hides of pack i.
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
  // From p to the next multiple of so many.
  static __device__ int elements_to(int multiple, const T* p) {
    return static_cast<int>(-reinterpret_cast<uintptr_t>(p) / sizeof(T) % multiple);
  }

  static __device__ bool within(int column, int end) {
    return kLines ? static_cast<unsigned>(column) < static_cast<unsigned>(end) : column < end;
  }

  int64_t begin_;
  int width_;
  int columns_;  // that take part
  int first_;
  int end_;
  int single_ = 0;
};

// What a thread has loaded of a row, as it is in memory: 16-bit types take half the registers of their accumulators.
// Its first kItems packs are in registers, what may come behind them (kMore) in the thread's own places of shared
// memory.
template <typename T, int kItems, bool kMore>
class RowPart {
 public:
  static constexpr int kVec = kPack<T>;

  // Every load is under way before anything waits for one: bandwidth is bytes in flight. `places` are the block's, one
  // for each thread and pack beyond kItems.
  template <typename Columns>
  __device__ RowPart(const T* base, const Columns& at, void* places) : more_(static_cast<Packed<T, kVec>*>(places)) {
    const T* row = base + at.begin();
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (at.counts(i)) packs_[i] = load<kVec>(row + at.column(i));
    if constexpr (kMore) {
      for (int i = kItems; at.counts(i); ++i) __pipeline_memcpy_async(place(i), row + at.column(i), sizeof(*more_));
      __pipeline_commit();
    }
    if (at.single_counts()) single_ = row[at.single()];
  }

  // Before the first look at what is not in registers.
  __device__ void wait_for_more() const {
    if constexpr (kMore) __pipeline_wait_prior(0);
  }

  __device__ float single() const { return widen(single_); }
  __device__ const Packed<T, kVec>& pack(int i) const { return packs_[i]; }

  // Pack i as accumulators. The compiler must not know that it has widened this pack before: it would keep the result
  // from pass to pass, twice the registers to save an instruction.
  __device__ void widened(float (&x)[kVec], int i) {
    if constexpr (sizeof(T) == 2) {
      auto& words = reinterpret_cast<uint4&>(packs_[i]);
      asm("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    }
    widen(x, packs_[i]);
  }

  // Replaces what the mask hides of pack i.
  template <typename Columns>
  __device__ void mask(const Columns& at, int i, float by) {
    at.mask(packs_[i].v, i, narrow<T>(by));
  }
  template <typename Columns>
  __device__ void mask_more(const Columns& at, int i, float by) const {
    at.mask(place(i)->v, i, narrow<T>(by));
  }

  // A pack beyond kItems.
  __device__ Packed<T, kVec>* place(int i) const { return more_ + (i - kItems) * blockDim.x + threadIdx.x; }

 private:
  Packed<T, kVec> packs_[kItems];
  Packed<T, kVec>* more_;
  T single_;
};

// Writes a thread's part of a row: of pack(y, i) the y, of more(y, i) that of packs beyond kItems, of single() the
// result, and zeros where the mask hides all.
template <int kItems, bool kMore, typename T, typename Columns, typename Pack, typename More, typename Single>
__device__ void store_part(T* base, const Columns& at, const Pack& pack, const More& more, const Single& single) {
  constexpr int kVec = kPack<T>;
  T* row = base + at.begin();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.has(i)) continue;
    float y[kVec] = {};
    if (at.counts(i)) {
      pack(y, i);
      at.mask(y, i, 0.f);
    }
    store_narrow<kVec>(row + at.column(i), y);
  }
  if constexpr (kMore)
    for (int i = kItems; at.has(i); ++i) {
      float y[kVec] = {};
      if (!Columns::kMasked || at.counts(i)) more(y, i);
      at.mask(y, i, 0.f);
      store_narrow<kVec>(row + at.column(i), y);
    }
  if (at.has_single()) row[at.single()] = narrow<T>(at.single_counts() ? single() : 0.f);
}

}  // namespace gptkernels::cuda
