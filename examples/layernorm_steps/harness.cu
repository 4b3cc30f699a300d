// Checks a step against the formula in double and prints its time and rate:
//
//   step                          us    GB/s   error
//
// The time is the median of kRuns runs, each with a cold L2 cache. GB/s counts x and out once, as docs/benchmarks.md
// does. The error is the largest difference from the formula, relative to the largest output. An error above 2^-8, the
// rounding of a bfloat16, makes the program fail.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "harness.h"

namespace {

constexpr int kRows = 65536;
constexpr int kRuns = 30;
constexpr size_t kFlushBytes = size_t(256) << 20;  // more than four times the L2 cache

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", kStep, cudaGetErrorString(status));
  std::exit(1);
}

template <typename T>
T* device_copy(const std::vector<T>& host) {
  T* device = nullptr;
  check(cudaMalloc(&device, host.size() * sizeof(T)));
  check(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

// The same numbers every time, about uniform in -1..1.
std::vector<bfloat16> numbers(size_t size, uint32_t seed) {
  std::vector<bfloat16> values(size);
  for (bfloat16& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = __float2bfloat16(static_cast<float>(seed >> 8) / (1 << 23) - 1);
  }
  return values;
}

// Reads `words`, so that the L2 cache holds nothing else. (A flush by writes would leave lines to write back.)
__global__ void flush_kernel(const uint4* words, size_t count, unsigned* sink) {
  unsigned all = 0;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
    all |= words[i].x | words[i].w;
  if (all != 0) *sink = all;
}

double largest_error(const Layernorm& p, const std::vector<bfloat16>& x, const std::vector<bfloat16>& weight,
                     const std::vector<bfloat16>& bias) {
  std::vector<bfloat16> out(x.size());
  check(cudaMemcpy(out.data(), p.out, out.size() * sizeof(bfloat16), cudaMemcpyDeviceToHost));
  double error = 0, largest = 0;
  for (int row = 0; row < p.rows; row += 61) {
    const size_t begin = size_t(row) * p.width;
    double mean = 0, variance = 0;
    for (int i = 0; i < p.width; ++i) mean += double(float(x[begin + i])) / p.width;
    for (int i = 0; i < p.width; ++i) variance += std::pow(double(float(x[begin + i])) - mean, 2) / p.width;
    for (int i = 0; i < p.width; ++i) {
      const double exact =
          (double(float(x[begin + i])) - mean) / std::sqrt(variance + double(p.eps)) * double(float(weight[i])) +
          double(float(bias[i]));
      const double difference = std::abs(double(float(out[begin + i])) - exact);
      error = std::isfinite(difference) ? std::max(error, difference) : INFINITY;
      largest = std::max(largest, std::abs(exact));
    }
  }
  return error / largest;
}

}  // namespace

int main() {
  const std::vector<bfloat16> x = numbers(size_t(kRows) * kWidth, 1), weight = numbers(kWidth, 2),
                              bias = numbers(kWidth, 3);
  const std::vector<bfloat16> nans(x.size(), __float2bfloat16(NAN));
  const std::vector<float> statistics(kRows);
  const Layernorm p = {.out = device_copy(nans),
                       .mean = device_copy(statistics),
                       .rstd = device_copy(statistics),
                       .x = device_copy(x),
                       .weight = device_copy(weight),
                       .bias = device_copy(bias),
                       .rows = kRows,
                       .width = kWidth,
                       .eps = 1e-5f};
  uint4* words = nullptr;
  unsigned* sink = nullptr;
  check(cudaMalloc(&words, kFlushBytes));
  check(cudaMalloc(&sink, sizeof(unsigned)));
  check(cudaMemset(words, 0, kFlushBytes));

  layernorm(p);
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
  const double error = largest_error(p, x, weight, bias);

  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int run = 0; run < kRuns; ++run) {
    flush_kernel<<<1024, 256>>>(words, kFlushBytes / sizeof(uint4), sink);
    check(cudaEventRecord(begin));
    layernorm(p);
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    times.push_back(milliseconds);
  }
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  const double seconds = times[kRuns / 2] * 1e-3;
  const double gigabytes = 2.0 * double(x.size()) * sizeof(bfloat16) * 1e-9;
  std::printf("%-24s %8.1f %7.0f   %.1e\n", kStep, seconds * 1e6, gigabytes / seconds, error);
  return error < 1.0 / 256 ? 0 : 1;
}
