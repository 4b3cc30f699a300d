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

// Sums and maxima are taken over kLanes side by side: element i belongs to lane i % kLanes. That is four vectors of
// AVX2, so that no addition waits for the one before; the range is walked once from end to end, as memory likes it; and
// the order of the additions depends on n alone, not on the instruction set.
constexpr int kLanes = 32;

// step(lane, i) for all i of [begin, end).
template <typename Step>
inline void for_each_lane(int64_t begin, int64_t end, const Step& step) {
  for (; begin + kLanes <= end; begin += kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) step(lane, begin + lane);
  }
  const int rest = static_cast<int>(end - begin);
#pragma omp simd
  for (int lane = 0; lane < rest; ++lane) step(lane, begin + lane);
}

// Adds the lanes in pairs, then the pairs in pairs.
template <typename A>
inline A add_lanes(A (&lanes)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// Long ranges are summed in blocks: the rounding error of a running sum grows with the length of a block and the number
// of blocks, not with n.
constexpr int64_t kSumBlock = 4096;

// The sum of fn(i) over [0, n).
template <typename A, typename Fn>
inline A sum(int64_t n, const Fn& fn) {
  A total = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    A lanes[kLanes] = {};
    for_each_lane(begin, std::min(begin + kSumBlock, n), [&](int lane, int64_t i) { lanes[lane] += fn(i); });
    total += add_lanes(lanes);
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
    A first[kLanes] = {};
    A second[kLanes] = {};
    for_each_lane(begin, std::min(begin + kSumBlock, n),
                  [&](int lane, int64_t i) { fn(i, first[lane], second[lane]); });
    total.first += add_lanes(first);
    total.second += add_lanes(second);
  }
  return total;
}

// The largest fn(i) over [0, n), -inf for n = 0. NaNs are passed over.
template <typename A, typename Fn>
inline A maximum(int64_t n, const Fn& fn) {
  A lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<A>::infinity());
  for_each_lane(0, n, [&](int lane, int64_t i) { lanes[lane] = std::max(lanes[lane], fn(i)); });
  return *std::max_element(lanes, lanes + kLanes);
}

// Asks for n elements that are needed soon, such as the next row while this one is worked on; past the end of a tensor
// it does nothing.
template <typename T>
inline void prefetch(const T* p, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(p + i);
}

}  // namespace gptkernels::cpu
