// The folders examples/*_steps share this file: test data, timing, and the row of the result table that a program
// prints. In each folder, problem.h declares the function that every step's .cu file defines, and problem.cu has a
// main() that checks the function's result against a formula in double.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

using bfloat16 = __nv_bfloat16;

extern const char* const kStep;

void check(cudaError_t status);

// All bytes are 0xFF, so floating-point elements are NaN.
template <typename T>
T* allocate(size_t size) {
  T* device = nullptr;
  check(cudaMalloc(&device, size * sizeof(T)));
  check(cudaMemset(device, 0xFF, size * sizeof(T)));
  return device;
}

bfloat16* random_numbers(size_t size, uint32_t seed, float range = 1);

template <typename T>
std::vector<T> host_copy(const T* device, size_t size) {
  std::vector<T> host(size);
  check(cudaMemcpy(host.data(), device, size * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

inline double larger_error(double error, double difference) {
  return std::isfinite(difference) ? std::max(error, std::abs(difference)) : INFINITY;
}

// Each run has a cold L2 cache.
double median_seconds(const std::function<void()>& launch);

// Prints the step's name, microseconds, `work` (bytes or flops) per second divided by `unit`, and error. Returns the
// exit status of the program: 0 if the error is below `bound`.
int report(double seconds, double work, double unit, double error, double bound);
