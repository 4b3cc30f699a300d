// A program that calls layernorm's forward for the CPU without torch or Python, first in one thread, then in two.
#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

#include "../csrc/layernorm.h"

using namespace gptkernels::cpu;

// Calls the body for each half of the range, in two threads.
static void two_threads(int64_t begin, int64_t end, int64_t, Stream::Body body, void* context) {
  const int64_t middle = begin + (end - begin) / 2;
  std::thread first([&] { body(begin, middle, context); });
  body(middle, end, context);
  first.join();
}

int main() {
  constexpr int64_t rows = 300, width = 257;
  std::vector<float> x(rows * width), out(rows * width), mean(rows), rstd(rows);
  for (int64_t i = 0; i < rows * width; ++i) x[i] = std::sin(0.1f * static_cast<float>(i)) + 2.0f;
  for (const Stream stream : {serial_stream(), Stream{two_threads}}) {
    const Status status = layernorm_forward<float, float>({.out = out.data(),
                                                           .mean = mean.data(),
                                                           .rstd = rstd.data(),
                                                           .x = x.data(),
                                                           .weight = nullptr,
                                                           .bias = nullptr,
                                                           .rows = rows,
                                                           .width = width,
                                                           .eps = 1e-5},
                                                          {}, stream);
    if (!status.ok()) return std::puts(status.error.c_str()), 1;
    for (int64_t row = 0; row < rows; ++row) {
      double sum = 0, squares = 0;
      for (int64_t i = 0; i < width; ++i) sum += out[row * width + i];
      for (int64_t i = 0; i < width; ++i) squares += double(out[row * width + i]) * out[row * width + i];
      if (std::abs(sum / width) > 1e-5 || std::abs(squares / width - 1) > 1e-3) return std::puts("wrong moments"), 1;
    }
  }
  std::puts("ok");
}
