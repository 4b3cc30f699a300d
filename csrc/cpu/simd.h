// One source, several instruction sets: vectorised(body) runs `body` in a copy compiled for the widest vectors that
// this processor has. The compiler inlines the body into each copy (flatten) and vectorises it there, so kernels are
// plain loops; `#pragma omp simd reduction(...)` marks the sums that it may split over lanes.
#pragma once

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GPTKERNELS_X86 1
#endif

namespace gptkernels::cpu {

#ifdef GPTKERNELS_X86

namespace simd {

enum class Isa { kBaseline, kAvx2, kAvx512 };

inline Isa detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kBaseline;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::kAvx512 : Isa::kAvx2;
}

inline Isa isa() {
  static const Isa found = detect();
  return found;
}

template <typename Body>
[[gnu::flatten, gnu::noinline]] void run_baseline(const Body& body) {
  body();
}

template <typename Body>
[[gnu::flatten, gnu::noinline, gnu::target("avx2,fma")]] void run_avx2(const Body& body) {
  body();
}

template <typename Body>
[[gnu::flatten, gnu::noinline, gnu::target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]] void run_avx512(
    const Body& body) {
  body();
}

}  // namespace simd

template <typename Body>
void vectorised(const Body& body) {
  switch (simd::isa()) {
    case simd::Isa::kAvx512: return simd::run_avx512(body);
    case simd::Isa::kAvx2: return simd::run_avx2(body);
    case simd::Isa::kBaseline: return simd::run_baseline(body);
  }
}

#else

template <typename Body>
void vectorised(const Body& body) {
  body();
}

#endif

}  // namespace gptkernels::cpu
