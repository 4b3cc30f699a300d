// 16-byte memory accesses: Packed<T, N> is N neighbouring elements that move in one instruction; and what is to be done
// where a row does not begin or end with one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../device.h"

namespace gptkernels::cuda {

template <typename T, int N>
struct alignas(sizeof(T) * N) Packed {
  T v[N];
};

// Elements in 16 bytes: 8 of bfloat16, 4 of float32, 2 of float64.
template <typename T>
constexpr int kPack = 16 / sizeof(T);

// What many Ts are summed in. Sums of float32 would else be most of its results' error; a bfloat16 or float16 result is
// rounded to far less.
template <typename T>
using sum_t = std::conditional_t<sizeof(T) == 2, float, double>;

template <typename T>
__host__ __device__ accumulate_t<T> widen(T value) {
  return static_cast<accumulate_t<T>>(value);
}

template <typename T>
__host__ __device__ T narrow(accumulate_t<T> value) {
  return static_cast<T>(value);
}

// N elements as accumulators, and back. A bfloat16 is the upper half of a float32: one instruction each way, where two
// at a time are taken from their word.
template <typename T, int N>
__device__ void widen(accumulate_t<T> (&out)[N], const Packed<T, N>& packed) {
  if constexpr (std::is_same_v<T, bfloat16> && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t word = reinterpret_cast<const uint32_t&>(packed.v[i]);
      out[i] = __uint_as_float(word << 16);
      out[i + 1] = __uint_as_float(word & 0xFFFF0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = widen(packed.v[i]);
  }
}

// sum += the pack's elements.
template <typename T, int N>
__device__ void add_pack(accumulate_t<T> (&sum)[N], const Packed<T, N>& packed) {
  accumulate_t<T> values[N];
  widen(values, packed);
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] += values[i];
}

template <typename T, int N>
__device__ Packed<T, N> narrow(const accumulate_t<T> (&values)[N]) {
  Packed<T, N> packed;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    if constexpr (std::is_same_v<T, bfloat16> && N % 2 == 0)
      reinterpret_cast<__nv_bfloat162&>(packed.v[i]) = __floats2bfloat162_rn(values[i], values[i + 1]);
    else if constexpr (std::is_same_v<T, float16> && N % 2 == 0)
      reinterpret_cast<__half2&>(packed.v[i]) = __floats2half2_rn(values[i], values[i + 1]);
    else
      for (int j = i; j < i + 2 && j < N; ++j) packed.v[j] = narrow<T>(values[j]);
  }
  return packed;
}

template <int N, typename T>
__device__ Packed<T, N> load(const T* p) {
  return *reinterpret_cast<const Packed<T, N>*>(p);
}

// To global memory. 16 bytes go out by an intrinsic: a struct's members are stores of their own until the compiler
// finds that they are neighbours, and in unrolled loops it does not.
template <int N, typename T>
__device__ void store(T* p, const Packed<T, N>& value) {
  if constexpr (sizeof(value) == sizeof(uint4))
    __stwb(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&value));
  else
    *reinterpret_cast<Packed<T, N>*>(p) = value;
}

// N neighbouring elements as accumulators.
template <int N, typename T>
__device__ void load_wide(accumulate_t<T> (&out)[N], const T* p) {
  widen(out, load<N>(p));
}

template <int N, typename T>
__device__ void store_narrow(T* p, const accumulate_t<T> (&values)[N]) {
  store<N>(p, narrow<T>(values));
}

// Whether rows of `width` elements that start at these pointers can all be moved 16 bytes at a time. Null is aligned.
template <typename T, typename... Pointers>
bool packs(int64_t width, const Pointers*... pointers) {
  return width % kPack<T> == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// Whether rows of all these arrays begin at the same place of a 16-byte pack.
template <typename First, typename... Pointers>
bool in_step(const First* first, const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(first) % 16 == reinterpret_cast<uintptr_t>(pointers) % 16) && ...);
}

// How many elements before a row the 16-byte pack begins in which the row begins.
template <typename Pack, typename T>
__device__ int elements_before(const T* row) {
  return reinterpret_cast<uintptr_t>(row) % sizeof(Pack) / sizeof(T);
}

// Stores what of a pack lies within its row: all at once where it may, else element by element.
template <int kVec, typename Column, typename T>
__device__ void store_within(T* row, Column column, Column width, const Packed<T, kVec>& pack) {
  const bool whole = column >= 0 && column + kVec <= width;
  if (whole && elements_before<Packed<T, kVec>>(row + column) == 0) return store(row + column, pack);
#pragma unroll
  for (int k = 0; k < kVec; ++k)
    if (column + k >= 0 && column + k < width) row[column + k] = pack.v[k];
}

// Loads what of a pack at a multiple of 16 bytes lies within its row; the rest is 0.
template <int kVec, typename Column, typename T>
__device__ Packed<T, kVec> load_within(const T* row, Column column, Column width) {
  if (column >= 0 && column + kVec <= width) return load<kVec>(row + column);
  Packed<T, kVec> pack = {};
#pragma unroll
  for (int k = 0; k < kVec; ++k)
    if (column + k >= 0 && column + k < width) pack.v[k] = row[column + k];
  return pack;
}

}  // namespace gptkernels::cuda
