// A row of a matrix in the registers of its team (drawing in teams.cuh).
//
// Packs stay in the array's dtype, so that 16-bit elements take half the registers of float32. The first kUnguarded
// packs of every thread must be within the row, and are not compared with the row's width. Comparing every pack in
// every pass would take about 10 % more instructions.
#pragma once

#include <cstdint>

#include "packed.cuh"
#include "teams.cuh"

namespace gptkernels::cuda {

// Unlike store(), this also guarantees a single instruction for packs of 8 bytes. Such packs hold 4 elements of a
// 16-bit array whose rows are divided like those of a float32 array.
template <int N, typename T>
__device__ void store_row_pack(T* p, const accumulate_t<T> (&values)[N]) {
  const Packed<T, N> pack = narrow<T>(values);
  if constexpr (sizeof(pack) == sizeof(uint2))
    __stwb(reinterpret_cast<uint2*>(p), *reinterpret_cast<const uint2*>(&pack));
  else
    store<N>(p, pack);
}

template <typename T_, typename Team_, int kItems_, int kUnguarded = 0, int kVec_ = kPack<T_>>
struct Row {
  using T = T_;
  using Team = Team_;
  using A = accumulate_t<T>;
  static constexpr int kVec = kVec_;
  template <typename X>
  using With = Row<X, Team, kItems_, kUnguarded, kVec>;
  static constexpr int kItems = kItems_;  // packs per thread
  Packed<T, kVec> packs[kItems];

  static __device__ int column(int i) { return (i * Team::threads() + Team::thread()) * kVec; }

  static __device__ bool has(int i, int width) { return i < kUnguarded || column(i) < width; }

  __device__ void load(const T* row, int width) {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (has(i, width)) packs[i] = cuda::load<kVec>(row + column(i));
  }

  // Assignments to single elements would make the compiler keep each 16-bit half in its own register.
  __device__ void fill(A value) {
    A values[kVec];
#pragma unroll
    for (int k = 0; k < kVec; ++k) values[k] = value;
    const Packed<T, kVec> pack = narrow<T>(values);
#pragma unroll
    for (int i = 0; i < kItems; ++i) reinterpret_cast<uint4&>(packs[i]) = reinterpret_cast<const uint4&>(pack);
  }

  // Makes the compiler assume that the packs change here, so that it cannot keep their float32 values, in twice as many
  // registers, from one pass to the next.
  __device__ void stay_packed() {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        uint4& words = reinterpret_cast<uint4&>(packs[i]);
        asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
      }
    }
  }

  template <typename Fn>
  __device__ void each(int width, const Fn& fn) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!has(i, width)) continue;
      A x[kVec];
      widen(x, packs[i]);
      fn(i, x);
    }
  }

  template <typename Fn>
  __device__ void update(int width, const Fn& fn) {
    each(width, [&](int i, A(&x)[kVec]) {
      fn(i, x);
      packs[i] = narrow<T>(x);
    });
  }
};

}  // namespace gptkernels::cuda
