#include <cstdio>
#include <cstdlib>

#include "harness.h"

namespace {

constexpr int kRuns = 30;
constexpr size_t kFlushBytes = size_t(256) << 20;  // more than four times the L2 cache

__global__ void random_numbers_kernel(bfloat16* numbers, size_t size, uint32_t seed, float range) {
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += size_t(gridDim.x) * blockDim.x) {
    uint64_t bits = (i + 1) * 0x9E3779B97F4A7C15u + seed;
    bits = (bits ^ bits >> 29) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 32) * 0x94D049BB133111EBu;
    numbers[i] = __float2bfloat16((float(bits >> 40) / (1 << 23) - 1) * range);
  }
}

// Flushes the L2 cache by reads. Writes would leave lines that must be written back during the next kernel.
__global__ void flush_kernel(const uint4* words, size_t count, unsigned* sink) {
  unsigned all = 0;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
    all |= words[i].x | words[i].w;
  if (all != 0) *sink = all;
}

}  // namespace

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", kStep, cudaGetErrorString(status));
  std::exit(1);
}

bfloat16* random_numbers(size_t size, uint32_t seed, float range) {
  bfloat16* numbers = allocate<bfloat16>(size);
  random_numbers_kernel<<<1024, 256>>>(numbers, size, seed, range);
  check(cudaGetLastError());
  return numbers;
}

double median_seconds(const std::function<void()>& launch) {
  static uint4* words = nullptr;
  static unsigned* sink = nullptr;
  if (words == nullptr) {
    check(cudaMalloc(&words, kFlushBytes));
    check(cudaMalloc(&sink, sizeof(unsigned)));
    check(cudaMemset(words, 0, kFlushBytes));
  }
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int run = 0; run < kRuns; ++run) {
    flush_kernel<<<1024, 256>>>(words, kFlushBytes / sizeof(uint4), sink);
    check(cudaEventRecord(begin));
    launch();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    times.push_back(milliseconds);
  }
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2] * 1e-3;
}

int report(double seconds, double work, double unit, double error, double bound) {
  std::printf("%s\t%.1f\t%.0f\t%.1e\n", kStep, seconds * 1e6, work / seconds / unit, error);
  if (error < bound) return 0;
  std::fprintf(stderr, "%s: the error is %.1e, and must be below %.1e\n", kStep, error, bound);
  return 1;
}
