// The encoder's grids process all rows of one slab of columns before the next slab. Data that is read more than once
// (the row of a frequent token; dout, which is part of two sums) is then read from memory only once. About half of an
// H200's L2, some 30 MB, is available for data that all SMs read. This is enough for 256 bytes of each of 64K rows.
#pragma once

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"

namespace gptkernels::cuda {

template <int kVec, int kLanes>
int64_t slabs(int64_t width) {
  return ceil_div(width, int64_t(kVec) * kLanes);
}

// kLanes neighbouring lanes share a row. Lanes beyond the width repeat the work of the last lane within the width:
// storing the same bytes twice costs no time, unlike a bounds check for every access. Code that adds to memory must
// skip lanes with `repeats`.
template <int kVec, int kLanes>
struct SlabColumns {
  int64_t slab;
  int64_t column;
  bool repeats;

  __device__ SlabColumns(int64_t slab, int64_t width) : slab(slab) {
    const int64_t own = (slab * kLanes + threadIdx.x % kLanes) * kVec;
    column = min(own, width - kVec);
    repeats = own > column;
  }
};

template <int kVec, typename T, typename LoadWords>
__device__ Packed<T, kVec> load_with(const T* p, const LoadWords& load_words) {
  if constexpr (sizeof(Packed<T, kVec>) == sizeof(uint4)) {
    const uint4 words = load_words(reinterpret_cast<const uint4*>(p));
    return reinterpret_cast<const Packed<T, kVec>&>(words);
  } else {
    return load<kVec>(p);
  }
}

template <int kVec, typename T>
__device__ Packed<T, kVec> load_from_l2(const T* p) {
  return load_with<kVec>(p, [](const uint4* words) { return __ldcg(words); });
}

template <int kVec, typename T>
__device__ Packed<T, kVec> load_evict_first(const T* p) {
  return load_with<kVec>(p, [](const uint4* words) { return __ldcs(words); });
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
