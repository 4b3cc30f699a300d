// One source, several instruction sets: vectorised(body) runs `body` in a copy compiled for the widest vectors that
// this processor has. The compiler inlines the body into each copy (flatten) and vectorises it there, so kernels are
// plain loops; `#pragma omp simd reduction(...)` marks the sums that it may split over lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

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

// Sums of fn(i) over [0, n). One running vector would wait for the adder's latency at every step: four quarters of the
// range are summed side by side, in an order that depends on n and the instruction set alone. Long ranges are summed in
// blocks: the rounding error of a running sum grows with the length of a block and the number of blocks, not with n.
constexpr int64_t kSumBlock = 4096;

template <typename A, typename Fn>
inline A sum(int64_t n, const Fn& fn) {
  A total = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = begin + kSumBlock < n ? begin + kSumBlock : n;
    const int64_t q = (end - begin) / 4;
    A s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = begin; i < begin + q; ++i) {
      s0 += fn(i);
      s1 += fn(i + q);
      s2 += fn(i + 2 * q);
      s3 += fn(i + 3 * q);
    }
    for (int64_t i = begin + 4 * q; i < end; ++i) s0 += fn(i);
    total += (s0 + s1) + (s2 + s3);
  }
  return total;
}

// Two sums in one walk: fn(i, a, b) adds to both of its references.
template <typename A>
struct Sums {
  A first, second;
};

template <typename A, typename Fn>
inline Sums<A> sum_two(int64_t n, const Fn& fn) {
  Sums<A> total{0, 0};
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = begin + kSumBlock < n ? begin + kSumBlock : n;
    const int64_t h = (end - begin) / 2;
    A a0 = 0, a1 = 0, b0 = 0, b1 = 0;
#pragma omp simd reduction(+ : a0, a1, b0, b1)
    for (int64_t i = begin; i < begin + h; ++i) {
      fn(i, a0, b0);
      fn(i + h, a1, b1);
    }
    if ((end - begin) % 2) fn(end - 1, a0, b0);
    total.first += a0 + a1;
    total.second += b0 + b1;
  }
  return total;
}

// The largest fn(i) over [0, n), -inf for n = 0. NaNs are passed over.
template <typename A, typename Fn>
inline A maximum(int64_t n, const Fn& fn) {
  const int64_t q = n / 4;
  A m0 = -std::numeric_limits<A>::infinity(), m1 = m0, m2 = m0, m3 = m0;
#pragma omp simd reduction(max : m0, m1, m2, m3)
  for (int64_t i = 0; i < q; ++i) {
    m0 = std::max(m0, fn(i));
    m1 = std::max(m1, fn(i + q));
    m2 = std::max(m2, fn(i + 2 * q));
    m3 = std::max(m3, fn(i + 3 * q));
  }
  for (int64_t i = 4 * q; i < n; ++i) m0 = std::max(m0, fn(i));
  return std::max(std::max(m0, m1), std::max(m2, m3));
}

}  // namespace gptkernels::cpu
