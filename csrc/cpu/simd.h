// vectorised(body) runs the copy of `body` for the chosen instruction set (capability.h). `#pragma omp simd
// reduction(...)` marks the reductions that the compiler may split over lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "capability.h"

namespace gptkernels::cpu {

#ifdef GPTKERNELS_X86

namespace simd {

template <typename Body>
[[gnu::flatten, gnu::noinline]] void run_default(const Body& body) {
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
  switch (capability_choice().capability) {
    case Capability::kAvx512: return simd::run_avx512(body);
    case Capability::kAvx2: return simd::run_avx2(body);
    case Capability::kDefault: return simd::run_default(body);
  }
}

#else

template <typename Body>
void vectorised(const Body& body) {
  body();
}

#endif

// Reductions add element i to partial result i % kLanes. 32 lanes are four AVX2 vectors of float, whose additions
// overlap. The order of the additions depends on n only, so every instruction set gives the same bits.
constexpr int kLanes = 32;

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

template <typename A>
inline A add_lanes(A (&lanes)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// A long sum is computed in blocks, so that its rounding error grows with the length of a block plus the number of
// blocks, not with n.
constexpr int64_t kSumBlock = 4096;

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

// Returns -inf if n is 0. Ignores NaNs.
template <typename A, typename Fn>
inline A maximum(int64_t n, const Fn& fn) {
  A lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<A>::infinity());
  for_each_lane(0, n, [&](int lane, int64_t i) { lanes[lane] = std::max(lanes[lane], fn(i)); });
  return *std::max_element(lanes, lanes + kLanes);
}

// Kernels prefetch the next row. It may be past the end of a tensor, but a prefetch never faults.
template <typename T>
inline void prefetch(const T* p, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(p + i);
}

}  // namespace gptkernels::cpu
