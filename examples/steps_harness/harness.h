// The kernels in *_steps share this code, which creates the data, measures the time and prints a row of the table. A
// folder's problem.h declares the function that each step defines. Its problem.cu has a main() that checks the result
// against a formula in double precision.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

using bfloat16 = __nv_bfloat16;

// The name of the step, which its file defines.
extern const char* const kStep;

// Ends the program with a message if a call of the CUDA runtime has failed.
void check(cudaError_t status);

// Allocates an array on the device. All its bytes are 0xFF, so floating-point elements are NaN.
template <typename T>
T* allocate(size_t size) {
  T* device = nullptr;
  check(cudaMalloc(&device, size * sizeof(T)));
  check(cudaMemset(device, 0xFF, size * sizeof(T)));
  return device;
}

// Allocates an array of numbers that are about uniform in -range..range and are the same in every run.
bfloat16* random_numbers(size_t size, uint32_t seed, float range = 1);

// Copies an array from the device.
template <typename T>
std::vector<T> host_copy(const T* device, size_t size) {
  std::vector<T> host(size);
  check(cudaMemcpy(host.data(), device, size * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

// Returns the larger of an error and the magnitude of a difference, or infinity if the difference is not finite.
inline double larger_error(double error, double difference) {
  return std::isfinite(difference) ? std::max(error, std::abs(difference)) : INFINITY;
}

// Returns the median of the seconds that `launch` takes, each time with a cold L2 cache.
double median_seconds(const std::function<void()>& launch);

// Prints the step's line: its name, microseconds, `work` (bytes or flops) per second divided by `unit`, and error.
// Returns the exit status of the program: 0 if the error is below `bound`.
int report(double seconds, double work, double unit, double error, double bound);
