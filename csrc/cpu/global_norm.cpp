#include "../global_norm.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace gptkernels::cpu {
namespace {

constexpr int64_t kChunk = 32768;

template <typename T>
double chunk_squares(const T* x, int64_t size) {
  return sum<double>(size, [&](int64_t i) {
    const double value = accumulate_t<T>(x[i]);
    return value * value;
  });
}

}  // namespace

int64_t global_norm_partials(int64_t size) {
  return (size + kChunk - 1) / kChunk;
}

template <typename T>
Status global_norm_squares(const GlobalNormSquares<T>& p, Stream stream) {
  double* partials = p.partials;
  for (int64_t t = 0; t < p.count; ++t) {
    const int64_t chunks = global_norm_partials(p.sizes[t]);
    parallel_for(stream, chunks, kChunk, [&](int64_t begin, int64_t end) {
      vectorised([&] {
        for (int64_t c = begin; c < end; ++c)
          partials[c] = chunk_squares(p.tensors[t] + c * kChunk, std::min(kChunk, p.sizes[t] - c * kChunk));
      });
    });
    partials += chunks;
  }
  return {};
}

Status global_norm_sum(float* norm, const double* partials, int64_t count, Stream) {
  double squares = 0;
  for (int64_t i = 0; i < count; ++i) squares += partials[i];
  *norm = static_cast<float>(std::sqrt(squares));
  return {};
}

template Status global_norm_squares<double>(const GlobalNormSquares<double>&, Stream);
template Status global_norm_squares<float>(const GlobalNormSquares<float>&, Stream);
template Status global_norm_squares<bfloat16>(const GlobalNormSquares<bfloat16>&, Stream);
template Status global_norm_squares<float16>(const GlobalNormSquares<float16>&, Stream);

}  // namespace gptkernels::cpu
