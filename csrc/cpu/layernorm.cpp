#include "../layernorm.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace gptkernels::cpu {
namespace {

// Two passes over a row that the first one has brought into the L1 cache: mean, then the variance about it. A float32
// mean is off by a rounding, as large as |mean| * 2^-24; the second pass measures that rest too, so that an offset
// in x costs no digits.
template <typename T>
void forward_row(const LayernormForward<T>& p, int64_t row) {
  using A = accumulate_t<T>;
  const T* x = p.x + row * p.width;
  T* out = p.out + row * p.width;

  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < p.width; ++i) sum += A(x[i]);
  const A mean = sum / A(p.width);

  A rests = 0;
  A squares = 0;
#pragma omp simd reduction(+ : rests, squares)
  for (int64_t i = 0; i < p.width; ++i) {
    const A d = A(x[i]) - mean;
    rests += d;
    squares += d * d;
  }
  const A rest = rests / A(p.width);
  const A variance = squares / A(p.width) - rest * rest;
  const A rstd = A(1) / std::sqrt(variance + A(p.eps));

  p.mean[row] = mean + rest;
  p.rstd[row] = rstd;
  if (p.weight && p.bias) {
#pragma omp simd
    for (int64_t i = 0; i < p.width; ++i) store(out[i], (A(x[i]) - mean - rest) * rstd * A(p.weight[i]) + A(p.bias[i]));
  } else {
    for (int64_t i = 0; i < p.width; ++i) {
      const A norm = (A(x[i]) - mean - rest) * rstd;
      store(out[i], norm * (p.weight ? A(p.weight[i]) : A(1)) + (p.bias ? A(p.bias[i]) : A(0)));
    }
  }
}

// With g = dout * weight and n = (x - mean) * rstd:  dx = rstd * (g - avg(g) - n * avg(g * n)).
template <typename T>
void backward_row(const LayernormBackward<T>& p, int64_t row) {
  using A = accumulate_t<T>;
  const T* x = p.x + row * p.width;
  const T* dout = p.dout + row * p.width;
  const T* dresidual = p.dresidual ? p.dresidual + row * p.width : nullptr;
  T* dx = p.dx + row * p.width;
  const A mean = p.mean[row];
  const A rstd = p.rstd[row];
  const auto gradient = [&](int64_t i) { return A(dout[i]) * (p.weight ? A(p.weight[i]) : A(1)); };
  const auto norm = [&](int64_t i) { return (A(x[i]) - mean) * rstd; };

  A sum_g = 0;
  A sum_gn = 0;
#pragma omp simd reduction(+ : sum_g, sum_gn)
  for (int64_t i = 0; i < p.width; ++i) {
    sum_g += gradient(i);
    sum_gn += gradient(i) * norm(i);
  }
  const A avg_g = sum_g / A(p.width);
  const A avg_gn = sum_gn / A(p.width);
#pragma omp simd
  for (int64_t i = 0; i < p.width; ++i) {
    const A d = (gradient(i) - avg_g - norm(i) * avg_gn) * rstd;
    store(dx[i], d + (dresidual ? A(dresidual[i]) : A(0)));
  }
}

// dweight and dbias sum over rows. The rows are cut into groups by their number alone, never by the threads at hand,
// and the groups' sums are added in order: so the bits do not depend on the number of threads.
constexpr int64_t kMaxGroups = 64;
constexpr int64_t kMinGroupRows = 16;

int64_t row_groups(int64_t rows) {
  return std::clamp<int64_t>((rows + kMinGroupRows - 1) / kMinGroupRows, 1, kMaxGroups);
}

template <typename A>
struct Partial {
  A* dweight;  // (C)
  A* dbias;    // (C)
};

template <typename T>
Partial<accumulate_t<T>> partial(const LayernormBackward<T>& p, int64_t group) {
  auto* base = static_cast<accumulate_t<T>*>(p.workspace) + group * 2 * p.width;
  return {base, base + p.width};
}

template <typename T>
void add_row(const LayernormBackward<T>& p, int64_t row, Partial<accumulate_t<T>> sums) {
  using A = accumulate_t<T>;
  const T* x = p.x + row * p.width;
  const T* dout = p.dout + row * p.width;
  const A mean = p.mean[row];
  const A rstd = p.rstd[row];
#pragma omp simd
  for (int64_t i = 0; i < p.width; ++i) {
    sums.dweight[i] += A(dout[i]) * ((A(x[i]) - mean) * rstd);
    sums.dbias[i] += A(dout[i]);
  }
}

template <typename T>
void backward_group(const LayernormBackward<T>& p, int64_t group, int64_t groups) {
  const int64_t begin = p.rows * group / groups;
  const int64_t end = p.rows * (group + 1) / groups;
  const bool sums_wanted = p.dweight || p.dbias;
  const auto sums = partial(p, group);
  if (sums_wanted) std::fill_n(sums.dweight, 2 * p.width, accumulate_t<T>(0));
  for (int64_t row = begin; row < end; ++row) {
    if (p.dx) backward_row(p, row);
    if (sums_wanted) add_row(p, row, sums);
  }
}

template <typename T>
void add_groups(const LayernormBackward<T>& p, int64_t groups, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  for (int64_t i = begin; i < end; ++i) {
    A dweight = 0;
    A dbias = 0;
    for (int64_t group = 0; group < groups; ++group) {
      dweight += partial(p, group).dweight[i];
      dbias += partial(p, group).dbias[i];
    }
    if (p.dweight) store(p.dweight[i], dweight);
    if (p.dbias) store(p.dbias[i], dbias);
  }
}

}  // namespace

template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, Stream stream) {
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) forward_row(p, row);
    });
  });
  return {};
}

template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width) {
  return row_groups(rows) * 2 * width * int64_t(sizeof(accumulate_t<T>));
}

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, Stream stream) {
  const int64_t groups = row_groups(p.rows);
  parallel_for(stream, groups, p.width * (p.rows / groups + 1), [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t group = begin; group < end; ++group) backward_group(p, group, groups);
    });
  });
  if (p.dweight || p.dbias)
    parallel_for(stream, p.width, groups,
                 [&](int64_t begin, int64_t end) { vectorised([&] { add_groups(p, groups, begin, end); }); });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                                           \
  template Status layernorm_forward<T>(const LayernormForward<T>&, Stream); \
  template int64_t layernorm_backward_workspace<T>(int64_t, int64_t);       \
  template Status layernorm_backward<T>(const LayernormBackward<T>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cpu
