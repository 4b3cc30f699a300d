// The rate counts the logits' read and the gradients' write once each, as docs/benchmarks.md does. The error is the
// largest relative error of a loss or a gradient against the formula in double. It must be below 1.01 * 2^-8:
// bfloat16's rounding error, plus a hundredth of it for the float32 arithmetic.
#include "problem.h"

namespace {

constexpr int kRows = 8192;
constexpr int kRowsBetweenChecks = 61;

// x has the row's logits, which classifier() has overwritten by the gradient.
double row_error(const Classifier& p, int64_t row, const std::vector<bfloat16>& x) {
  const auto dlogits = host_copy(p.logits + row * p.width, p.width);
  const int target = host_copy(p.targets + row, 1)[0];
  double sum = 0, error = 0;  // the logits are small, so the maximum need not be subtracted
  for (int i = 0; i < p.vocab; ++i) sum += std::exp(double(float(x[i])));
  for (int i = 0; i < p.vocab; ++i) {
    const double exact = std::exp(double(float(x[i]))) / sum - (i == target);
    error = larger_error(error, (double(float(dlogits[i])) - exact) / exact);
  }
  for (int i = p.vocab; i < p.width; ++i)
    if (float(dlogits[i]) != 0) error = INFINITY;
  const double loss = std::log(sum) - double(float(x[target]));
  return larger_error(error, (double(host_copy(p.losses + row, 1)[0]) - loss) / loss);
}

__global__ void targets_kernel(int* targets, int rows, int vocab) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows) targets[row] = uint32_t(row) * 2654435761u % vocab;
}

}  // namespace

int main() {
  const size_t size = size_t(kRows) * kWidth;
  int* targets = allocate<int>(kRows);
  targets_kernel<<<(kRows + 255) / 256, 256>>>(targets, kRows, kVocab);
  const Classifier p = {.losses = allocate<float>(kRows),
                        .logits = random_numbers(size, 1, 8),
                        .targets = targets,
                        .rows = kRows,
                        .width = kWidth,
                        .vocab = kVocab};
  std::vector<std::vector<bfloat16>> rows;
  for (int64_t row = 0; row < kRows; row += kRowsBetweenChecks)
    rows.push_back(host_copy(p.logits + row * kWidth, kWidth));
  classifier(p);
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
  double error = 0;
  for (size_t i = 0; i < rows.size(); ++i)
    error = larger_error(error, row_error(p, int64_t(i) * kRowsBetweenChecks, rows[i]));
  // The logits of each run are the gradients that the previous run has written. This does not change the time.
  const double seconds = median_seconds([&] { classifier(p); });
  return report(seconds, 2.0 * size * sizeof(bfloat16), 1e9, error, 1.01 / 256);
}
