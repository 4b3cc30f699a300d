// The backward computes partial sums of dweight, dbias and dx_bias for groups of rows, and then adds the groups' sums.
#include "../layernorm.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "dropout.h"
#include "simd.h"

namespace gptkernels::cpu {
namespace {

// Returns the row that replaces a null weight or bias. The vector is empty if `row` is not null.
template <typename T>
std::vector<T> replacement_row(const T* row, int64_t width, accumulate_t<T> value) {
  return std::vector<T>(row ? 0 : static_cast<size_t>(width), T(value));
}

// Returns the row of x. With a residual, writes dropout(x + x_bias) + residual to the row of p.sum, and returns that
// row.
template <typename T, typename X>
const T* input_row(const LayernormForward<T, X>& p, const Dropout& dropout, int64_t row) {
  using A = accumulate_t<T>;
  const X* x = p.x + row * p.width;
  if constexpr (std::is_same_v<T, X>)
    if (p.residual == nullptr) return x;
  const T* residual = p.residual + row * p.width;
  T* sum = p.sum + row * p.width;
  const T* bias = p.x_bias;
  const auto add = [&](int64_t begin, int64_t end, const auto& factor) {
    if (bias) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) store(sum[i], (A(x[i]) + A(bias[i])) * factor(i) + A(residual[i]));
    } else {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) store(sum[i], A(x[i]) * factor(i) + A(residual[i]));
    }
  };
  for_each_dropout_factor<A>(dropout, row * p.width, p.width, add);
  return sum;
}

// The mean is rounded, in float32 with an error of about |mean| * 2^-24. The second pass computes the variance about
// the rounded mean, and `rest`, the mean of x - mean. The third pass subtracts mean and rest, so that a large offset in
// x costs no accuracy. The second and third pass read the row from the cache.
template <typename T, typename X>
void forward_row(const LayernormForward<T, X>& p, const Dropout& dropout, int64_t row) {
  using A = accumulate_t<T>;
  const T* x = input_row(p, dropout, row);
  X* out = p.out + row * p.width;

  const A mean = sum<A>(p.width, [&](int64_t i) { return A(x[i]); }) / A(p.width);
  prefetch(x + p.width, p.width);
  const auto [rests, squares] = sum_two<A>(p.width, [&](int64_t i, A& rest, A& square) {
    const A d = A(x[i]) - mean;
    rest += d;
    square += d * d;
  });
  const A rest = rests / A(p.width);
  const A variance = squares / A(p.width) - rest * rest;
  const A rstd = A(1) / std::sqrt(variance + A(p.eps));

  p.mean[row] = mean + rest;
  p.rstd[row] = rstd;
#pragma omp simd
  for (int64_t i = 0; i < p.width; ++i) store(out[i], (A(x[i]) - mean - rest) * rstd * A(p.weight[i]) + A(p.bias[i]));
}

// The groups depend on the number of rows only, and their sums are added in order, so the bits do not depend on the
// number of threads.
constexpr int64_t kMaxGroups = 64;
constexpr int64_t kMinGroupRows = 16;

int64_t row_groups(int64_t rows) {
  return std::clamp<int64_t>((rows + kMinGroupRows - 1) / kMinGroupRows, 1, kMaxGroups);
}

template <typename A>
struct Partial {
  A* dweight;  // (C)
  A* dbias;    // (C)
  A* dx_bias;  // (C)
};

template <typename T, typename X>
Partial<accumulate_t<T>> partial(const LayernormBackward<T, X>& p, int64_t group) {
  auto* base = static_cast<accumulate_t<T>*>(p.workspace) + group * 3 * p.width;
  return {base, base + p.width, base + 2 * p.width};
}

// Means (avg) over a row, where g = dout * weight and c = x - mean:
//   dx = rstd * (g - avg(g) - c * rstd^2 * avg(g * c)).
template <typename A>
struct Means {
  A g, gc;
};

// gc is the mean of g * c, without rstd. The rounding errors of g * c * rstd would not cancel, so that dx could differ
// from 0 for a constant dout. This function reads x and dout anyway, so it also adds the row's terms to the sums of
// dweight and dbias.
template <bool kSums, typename T, typename X>
Means<accumulate_t<T>> gradient_means(const LayernormBackward<T, X>& p, int64_t row, Partial<accumulate_t<T>> sums) {
  using A = accumulate_t<T>;
  const T* x = p.x + row * p.width;
  const X* dout = p.dout + row * p.width;
  const T* weight = p.weight;
  const A mean = p.mean[row];
  const A rstd = p.rstd[row];
  const auto [sum_g, sum_gc] = sum_two<A>(p.width, [&](int64_t i, A& sum_g, A& sum_gc) {
    const A d = A(dout[i]);
    const A c = A(x[i]) - mean;
    const A g = d * A(weight[i]);
    sum_g += g;
    sum_gc += g * c;
    if constexpr (kSums) {
      sums.dweight[i] += d * (c * rstd);
      sums.dbias[i] += d;
    }
  });
  return {sum_g / A(p.width), sum_gc / A(p.width)};
}

template <typename T, typename X>
void write_dx(const LayernormBackward<T, X>& p, const Dropout& dropout, int64_t row, Means<accumulate_t<T>> means,
              accumulate_t<T>* dx_bias) {
  using A = accumulate_t<T>;
  const T* x = p.x + row * p.width;
  const X* dout = p.dout + row * p.width;
  const T* weight = p.weight;
  X* dx = p.dx + row * p.width;
  const A mean = p.mean[row];
  const A rstd = p.rstd[row];
  const A avg_g = means.g;
  const A slope = means.gc * rstd * rstd;
  const auto gradient = [&](int64_t i) {
    return (A(dout[i]) * A(weight[i]) - avg_g - (A(x[i]) - mean) * slope) * rstd;
  };
  // `write` stores dx[i] and returns its value before rounding.
  const auto write_run = [&](int64_t begin, int64_t end, const auto& write) {
    const auto with = [&](const auto& value) {
      if (p.dx_bias) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) dx_bias[i] += write(i, value(i));
      } else {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) write(i, value(i));
      }
    };
    if (const T* dsum = p.dsum ? p.dsum + row * p.width : nullptr)
      with([&](int64_t i) { return gradient(i) + A(dsum[i]); });
    else
      with(gradient);
  };
  if (p.dresidual) {
    T* dresidual = p.dresidual + row * p.width;
    const auto write_both = [&](int64_t begin, int64_t end, const auto& factor) {
      write_run(begin, end, [&](int64_t i, A found) {
        store(dresidual[i], found);
        store(dx[i], found * factor(i));
        return found * factor(i);
      });
    };
    for_each_dropout_factor<A>(dropout, row * p.width, p.width, write_both);
  } else {
    write_run(0, p.width, [&](int64_t i, A found) {
      store(dx[i], found);
      return found;
    });
  }
}

template <typename T, typename X>
void backward_group(const LayernormBackward<T, X>& p, const Dropout& dropout, int64_t group, int64_t groups) {
  const int64_t begin = p.rows * group / groups;
  const int64_t end = p.rows * (group + 1) / groups;
  const bool sums_wanted = p.dweight || p.dbias || p.dx_bias;
  const auto sums = partial(p, group);
  if (sums_wanted) std::fill_n(sums.dweight, 3 * p.width, accumulate_t<T>(0));
  for (int64_t row = begin; row < end; ++row) {
    const auto means = sums_wanted ? gradient_means<true>(p, row, sums) : gradient_means<false>(p, row, sums);
    if (p.dx) write_dx(p, dropout, row, means, sums.dx_bias);
  }
}

template <typename T, typename X>
void add_groups(const LayernormBackward<T, X>& p, int64_t groups, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  for (int64_t i = begin; i < end; ++i) {
    A dweight = 0;
    A dbias = 0;
    A dx_bias = 0;
    for (int64_t group = 0; group < groups; ++group) {
      dweight += partial(p, group).dweight[i];
      dbias += partial(p, group).dbias[i];
      dx_bias += partial(p, group).dx_bias[i];
    }
    if (p.dweight) store(p.dweight[i], dweight);
    if (p.dbias) store(p.dbias[i], dbias);
    if (p.dx_bias) store(p.dx_bias[i], dx_bias);
  }
}

template <typename T, typename X>
void forward(LayernormForward<T, X> p, const Dropout& dropout, Stream stream) {
  const auto ones = replacement_row(p.weight, p.width, 1);
  const auto zeros = replacement_row(p.bias, p.width, 0);
  if (p.weight == nullptr) p.weight = ones.data();
  if (p.bias == nullptr) p.bias = zeros.data();
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) forward_row(p, dropout, row);
    });
  });
}

template <typename T, typename X>
void backward(LayernormBackward<T, X> p, const Dropout& dropout, Stream stream) {
  const auto ones = replacement_row(p.weight, p.width, 1);
  if (p.weight == nullptr) p.weight = ones.data();
  const int64_t groups = row_groups(p.rows);
  parallel_for(stream, groups, p.width * (p.rows / groups + 1), [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t group = begin; group < end; ++group) backward_group(p, dropout, group, groups);
    });
  });
  if (p.dweight || p.dbias || p.dx_bias)
    parallel_for(stream, p.width, groups,
                 [&](int64_t begin, int64_t end) { vectorised([&] { add_groups(p, groups, begin, end); }); });
}

}  // namespace

template <typename T, typename X>
Status layernorm_forward(const LayernormForward<T, X>& p, const DropoutArguments& dropout, Stream stream) {
  forward(p, read(dropout), stream);
  return {};
}

template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width) {
  return row_groups(rows) * 3 * width * int64_t(sizeof(accumulate_t<T>));
}

template <typename T, typename X>
Status layernorm_backward(const LayernormBackward<T, X>& p, const DropoutArguments& dropout, Stream stream) {
  backward(p, read(dropout), stream);
  return {};
}

#define GPTKERNELS_INSTANTIATE(T, X)                                                                       \
  template Status layernorm_forward<T, X>(const LayernormForward<T, X>&, const DropoutArguments&, Stream); \
  template Status layernorm_backward<T, X>(const LayernormBackward<T, X>&, const DropoutArguments&, Stream);
#define GPTKERNELS_INSTANTIATE_SAME(T) \
  GPTKERNELS_INSTANTIATE(T, T)         \
  template int64_t layernorm_backward_workspace<T>(int64_t, int64_t);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE_SAME)
GPTKERNELS_INSTANTIATE(float, bfloat16)
GPTKERNELS_INSTANTIATE(float, float16)

}  // namespace gptkernels::cpu
