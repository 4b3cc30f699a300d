#include "dropout.h"

#include "simd.h"

namespace gptkernels::cpu {

namespace {
constexpr int64_t kCost = 4;  // a copy costs 1
}  // namespace

template <typename T>
Status dropout_forward(const DropoutForward<T>& p, Stream stream) {
  using A = accumulate_t<T>;
  const Dropout dropout = read(p.arguments);
  parallel_for(stream, p.size, kCost, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      const T* x = p.x + begin;
      T* out = p.out + begin;
      for_each_dropout_factor<A>(dropout, begin, end - begin, [&](int64_t from, int64_t to, const auto& factor) {
#pragma omp simd
        for (int64_t i = from; i < to; ++i) store(out[i], A(x[i]) * factor(i));
      });
    });
  });
  return {};
}

Status dropout_mask(bool* mask, int64_t size, const DropoutArguments& arguments, Stream stream) {
  const Dropout dropout = read(arguments);
  parallel_for(stream, size, kCost, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for_each_dropout_run(dropout, begin, end, [&](int64_t from, int64_t to, const uint16_t* bits) {
        for (int64_t i = 0; i < to - from; ++i) mask[from + i] = bits[i] >= dropout.threshold;
      });
    });
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T) template Status dropout_forward<T>(const DropoutForward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
