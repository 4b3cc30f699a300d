// 16-byte memory accesses: Packed<T, N> is N neighbouring elements that move in one instruction.
#pragma once

#include <cstdint>

#include "device.h"

namespace gptkernels::cuda {

template <typename T, int N>
struct alignas(sizeof(T) * N) Packed {
  T v[N];
};

// Elements in 16 bytes: 8 of bfloat16, 4 of float32, 2 of float64.
template <typename T>
constexpr int kPack = 16 / sizeof(T);

template <typename T>
__host__ __device__ accumulate_t<T> widen(T value) {
  return static_cast<accumulate_t<T>>(value);
}

template <typename T>
__host__ __device__ T narrow(accumulate_t<T> value) {
  return static_cast<T>(value);
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
  const Packed<T, N> packed = load<N>(p);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = widen(packed.v[i]);
}

template <int N, typename T>
__device__ void store_narrow(T* p, const accumulate_t<T> (&values)[N]) {
  Packed<T, N> packed;
#pragma unroll
  for (int i = 0; i < N; ++i) packed.v[i] = narrow<T>(values[i]);
  store<N>(p, packed);
}

// Whether rows of `width` elements that start at these pointers can all be moved 16 bytes at a time. Null is aligned.
template <typename T, typename... Pointers>
bool packs(int64_t width, const Pointers*... pointers) {
  return width % kPack<T> == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace gptkernels::cuda
