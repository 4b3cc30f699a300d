#include "../global_norm.h"

#include <cmath>

#include "multi_tensor.h"
#include "simd.h"

namespace gptkernels::cpu {
namespace {

template <typename T>
double chunk_squares(const T* x, int64_t size) {
  return sum<double>(size, [&](int64_t i) {
    const double value = accumulate_t<T>(x[i]);
    return value * value;
  });
}

}  // namespace

int64_t global_norm_partials(int64_t size) {
  return list_chunks(size);
}

template <typename T>
Status global_norm_squares(const GlobalNormSquares<T>& p, Stream stream) {
  parallel_for_chunks(stream, p.count, p.sizes, [&](int64_t chunk, int64_t t, int64_t begin, int64_t end) {
    vectorised([&] { p.partials[chunk] = chunk_squares(p.tensors[t] + begin, end - begin); });
  });
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
