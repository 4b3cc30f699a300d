// Vectorized memory accesses. A Packed<T, N> (a pack) is N neighbouring elements that one instruction loads or stores,
// usually 16 bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device.h"

namespace gptkernels::cuda {

template <typename T, int N>
struct alignas(sizeof(T) * N) Packed {
  T v[N];
};

// Number of elements of a 16-byte pack: 8 for bfloat16 and float16, 4 for float32, 2 for float64.
template <typename T>
constexpr int kPack = 16 / sizeof(T);

// The dtype for a sum over many elements of T. A sum in float32 would cause most of the error of a float32 result, so
// float32 is summed in float64. For 16-bit results float32 is enough, because rounding to 16 bits is much coarser.
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

// Converts a pack to accumulators: float32, or float64 for float64. A bfloat16 is the upper half of a float32, so the
// conversion of either half of a 32-bit word takes one instruction (a shift or a mask).
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

// Adds a pack to `sum`, element by element.
template <typename T, int N>
__device__ void add_pack(accumulate_t<T> (&sum)[N], const Packed<T, N>& packed) {
  accumulate_t<T> values[N];
  widen(values, packed);
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] += values[i];
}

// Rounds accumulators to T. The 16-bit types are converted in pairs, with one instruction for two elements.
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

// Stores a pack to global memory. The intrinsic guarantees one 16-byte store; an assignment of the struct may compile
// to one store per element, which the compiler does not always merge in unrolled loops.
template <int N, typename T>
__device__ void store(T* p, const Packed<T, N>& value) {
  if constexpr (sizeof(value) == sizeof(uint4))
    __stwb(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&value));
  else
    *reinterpret_cast<Packed<T, N>*>(p) = value;
}

// Loads N neighbouring elements and converts them to accumulators.
template <int N, typename T>
__device__ void load_wide(accumulate_t<T> (&out)[N], const T* p) {
  widen(out, load<N>(p));
}

// Rounds N accumulators to T and stores them.
template <int N, typename T>
__device__ void store_narrow(T* p, const accumulate_t<T> (&values)[N]) {
  store<N>(p, narrow<T>(values));
}

// Returns whether all these pointers are multiples of 16 bytes. A null pointer counts as aligned.
template <typename... Pointers>
bool all_aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// Returns whether the rows of these (N, width) arrays can all be accessed 16 bytes at a time.
template <typename T, typename... Pointers>
bool can_vectorize(int64_t width, const Pointers*... pointers) {
  return width % kPack<T> == 0 && all_aligned(pointers...);
}

// Returns whether all these pointers have the same offset from a multiple of 16 bytes.
template <typename First, typename... Pointers>
bool same_misalignment(const First* first, const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(first) % 16 == reinterpret_cast<uintptr_t>(pointers) % 16) && ...);
}

}  // namespace gptkernels::cuda
