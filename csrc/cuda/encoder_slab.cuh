// What the encoder's kernels share: slabs of columns, and loads and stores with a say in what the caches keep.
//
// The rows of the tables and of dout are cut into slabs of columns, and every grid is done with all rows of one slab
// before it comes to the next. What is read more than once (the row of a token that occurs often; dout, which goes into
// two sums) then comes from memory once and from the L2 afterwards. Of that only half is room for what all
// multiprocessors read, some 30 MB: a slab of 64K rows fits with 256 bytes of each, and whole rows do not.
#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "common/packed.cuh"

namespace gptkernels::cuda {

template <int kVec, int kLanes>
int64_t slabs(int64_t width) {
  return ceil_div(width, int64_t(kVec) * kLanes);
}

// A lane's part of a slab, where kLanes neighbours share a row. Lanes beyond the width do again what the last one
// within does: the same bytes to the same place cost nothing, and a test for every access would.
template <int kVec, int kLanes>
struct Place {
  int64_t slab;
  int64_t column;  // of its pack

  __device__ Place(int64_t slab, int64_t width)
      : slab(slab), column(min((slab * kLanes + threadIdx.x % kLanes) * kVec, width - kVec)) {}
};

// A whole pack by load_words, which has a say in what the caches keep.
template <int kVec, typename T, typename LoadWords>
__device__ Packed<T, kVec> load_by(const T* p, const LoadWords& load_words) {
  if constexpr (sizeof(Packed<T, kVec>) == sizeof(uint4)) {
    const uint4 words = load_words(reinterpret_cast<const uint4*>(p));
    return reinterpret_cast<const Packed<T, kVec>&>(words);
  } else {
    return load<kVec>(p);
  }
}

// Past the L1, which has no use for it: a row that other multiprocessors read too.
template <int kVec, typename T>
__device__ Packed<T, kVec> load_from_l2(const T* p) {
  return load_by<kVec>(p, [](const uint4* words) { return __ldcg(words); });
}

// Evict-first, for what is not read again, or not written and read: the L2 is left to what is.
template <int kVec, typename T>
__device__ Packed<T, kVec> load_last(const T* p) {
  return load_by<kVec>(p, [](const uint4* words) { return __ldcs(words); });
}

template <int kVec, typename T>
__device__ void stream(T* p, const Packed<T, kVec>& value) {
  if constexpr (sizeof(value) == sizeof(uint4))
    __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&value));
  else
    store<kVec>(p, value);
}

template <int kVec, typename T>
__device__ void stream_narrow(T* p, const accumulate_t<T> (&values)[kVec]) {
  stream<kVec>(p, narrow<T>(values));
}

}  // namespace gptkernels::cuda
