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

#define GPTKERNELS_INSTANTIATE(T) template Status global_norm_squares<T>(const GlobalNormSquares<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
