// The rate counts the bytes of x and of out once, as docs/benchmarks.md does. The error is the largest difference from
// the formula in double, relative to the largest output. It must be below 2^-8, the largest relative rounding error of
// bfloat16.
#include "problem.h"

namespace {

constexpr int kRows = 65536;

double largest_error(const Layernorm& p) {
  const auto weight = host_copy(p.weight, kWidth), bias = host_copy(p.bias, kWidth);
  double error = 0, largest = 0;
  for (int64_t row = 0; row < p.rows; row += 61) {
    const auto x = host_copy(p.x + row * p.width, p.width), out = host_copy(p.out + row * p.width, p.width);
    double mean = 0, variance = 0;
    for (int i = 0; i < p.width; ++i) mean += double(float(x[i])) / p.width;
    for (int i = 0; i < p.width; ++i) variance += std::pow(double(float(x[i])) - mean, 2) / p.width;
    const double rstd = 1 / std::sqrt(variance + double(p.eps));
    for (int i = 0; i < p.width; ++i) {
      const double exact = (double(float(x[i])) - mean) * rstd * double(float(weight[i])) + double(float(bias[i]));
      error = larger_error(error, double(float(out[i])) - exact);
      largest = std::max(largest, std::abs(exact));
    }
  }
  return error / largest;
}

}  // namespace

int main() {
  const size_t size = size_t(kRows) * kWidth;
  const Layernorm p = {.out = allocate<bfloat16>(size),
                       .mean = allocate<float>(kRows),
                       .rstd = allocate<float>(kRows),
                       .x = random_numbers(size, 1),
                       .weight = random_numbers(kWidth, 2),
                       .bias = random_numbers(kWidth, 3),
                       .rows = kRows,
                       .width = kWidth,
                       .eps = 1e-5f};
  layernorm(p);
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
  const double error = largest_error(p);
  const double seconds = median_seconds([&] { layernorm(p); });
  return report(seconds, 2.0 * size * sizeof(bfloat16), 1e9, error, 1.0 / 256);
}
