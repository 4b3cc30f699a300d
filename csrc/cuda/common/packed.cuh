// A Packed<T, N> holds N neighbouring elements, which a thread loads or stores at once. With N = kPack<T> these are 16
// bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device.h"

namespace gptkernels::cuda {

template <typename T, int N>
struct alignas(sizeof(T) * N) Packed {
  T v[N];
};

template <typename T>
constexpr int kPack = 16 / sizeof(T);

// The dtype of a sum over many elements of T. It is float64 for float32, because the rounding errors of a float32 sum
// would be most of the result's error.
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

// The intrinsic guarantees one store. In unrolled loops, the compiler may split an assignment of the struct into one
// store per element.
template <int N, typename T>
__device__ void store(T* p, const Packed<T, N>& value) {
  if constexpr (sizeof(value) == sizeof(uint4))
    __stwb(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&value));
  else
    *reinterpret_cast<Packed<T, N>*>(p) = value;
}

template <int N, typename T>
__device__ void load_wide(accumulate_t<T> (&out)[N], const T* p) {
  widen(out, load<N>(p));
}

template <int N, typename T>
__device__ void store_narrow(T* p, const accumulate_t<T> (&values)[N]) {
  store<N>(p, narrow<T>(values));
}

template <typename... Pointers>
bool all_aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

template <typename T, typename... Pointers>
bool can_vectorize(int64_t width, const Pointers*... pointers) {
  return width % kPack<T> == 0 && all_aligned(pointers...);
}

template <typename First, typename... Pointers>
bool same_misalignment(const First* first, const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(first) % 16 == reinterpret_cast<uintptr_t>(pointers) % 16) && ...);
}

}  // namespace gptkernels::cuda
