// Loops of the simple kernels of softmax, fused_classifier and layernorm, in which a thread block reads a row from
// memory in each pass. These kernels are the fallback for widths, alignments and dtypes that the op's fast kernels do
// not support.
#pragma once

#include <cstdint>

#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {

constexpr int kSimpleThreads = 512;

template <int kVec>
unsigned simple_threads(int64_t width) {
  return static_cast<unsigned>(clamp(ceil_div(width, kVec * kWarp), 1, kSimpleThreads / kWarp) * kWarp);
}

template <typename T, typename Fn>
void with_packs(bool can_vectorize, const Fn& fn) {
  can_vectorize ? fn(Constant<kPack<T>>{}) : fn(Constant<1>{});
}

// Sums every kRun terms separately, because in one long sum of similar numbers all rounding errors could have the same
// sign.
template <typename A>
class LongSum {
 public:
  __device__ void add(A term) {
    run += term;
    if (++terms % kRun != 0) return;
    total += run;
    run = 0;
  }
  __device__ A value() const { return total + run; }

 private:
  static constexpr unsigned kRun = 16;
  A total = 0, run = 0;
  unsigned terms = 0;
};

template <int kVec, typename Fn>
__device__ void for_each_pack(int64_t width, const Fn& fn) {
  for (int64_t column = int64_t(threadIdx.x) * kVec; column < width; column += int64_t(blockDim.x) * kVec) fn(column);
}

}  // namespace gptkernels::cuda
