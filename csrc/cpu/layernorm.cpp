#include "../layernorm.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "dropout.h"
#include "simd.h"

namespace gptkernels::cpu {
namespace {

// The row to normalise: x, or dropout(x + x_bias) + residual, which is written to p.sum first.
template <typename T, typename X>
const T* input_row(const LayernormForward<T, X>& p, const Dropout& dropout, int64_t row) {
  using A = accumulate_t<T>;
  const X* x = p.x + row * p.width;
  if constexpr (std::is_same_v<T, X>)
    if (p.residual == nullptr) return x;
  const T* residual = p.residual + row * p.width;
  T* sum = p.sum + row * p.width;
  const auto add = [&](const auto& value) {
    if (dropout.on) {
      for_each_dropout_factor<A>(dropout, row * p.width, p.width,
                                 [&](int64_t i, A factor) { store(sum[i], value(i) * factor + A(residual[i])); });
    } else {
#pragma omp simd
      for (int64_t i = 0; i < p.width; ++i) store(sum[i], value(i) + A(residual[i]));
    }
  };
  if (const T* bias = p.x_bias)
    add([&](int64_t i) { return A(x[i]) + A(bias[i]); });
  else
    add([&](int64_t i) { return A(x[i]); });
  return sum;
}

// Two passes over the row; the second one reads it from the L1 cache. The first pass computes the mean, the second the
// variance about it. The mean has a rounding error of up to |mean| * 2^-24. The second pass also computes the mean of
// x - mean, which is that error (`rest`), and corrects for it, so that a large offset in x costs no accuracy.
template <typename T, typename X>
void forward_row(const LayernormForward<T, X>& p, const Dropout& dropout, int64_t row) {
  using A = accumulate_t<T>;
  const T* x = input_row(p, dropout, row);
  X* out = p.out + row * p.width;

  const A mean = sum<A>(p.width, [&](int64_t i) { return A(x[i]); }) / A(p.width);
  prefetch(x + p.width, p.width);  // load the next row while this one is processed
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

// dweight, dbias and dx_bias are sums over rows. The rows are divided into groups, as many as the number of rows asks
// for, and the groups' sums are added in order. The bits of the result therefore do not depend on the number of
// threads.
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

// A gradient of the residual that is not dx: with dropout of x, or where x has another dtype.
template <typename T>
struct Dropped {
  T* dresidual = nullptr;  // null: dx is the residual's gradient too
  Dropout dropout = {};
};

// With g = dout * weight and c = x - mean:  dx = rstd * (g - avg(g) - c * rstd^2 * avg(g * c)). The first pass over the
// row computes the sums of g and g * c. Those of c rather than of c * rstd, whose roundings do not cancel: the gradient
// of a constant dout would not be 0. The pass also adds the row's terms to dweight and dbias, since it has read x and
// dout.
template <bool kSums, typename T, typename X, typename Weight>
void backward_row(const LayernormBackward<T, X>& p, const Dropped<T>& dropped, int64_t row,
                  Partial<accumulate_t<T>> sums, const Weight& weight) {
  using A = accumulate_t<T>;
  const T* x = p.x + row * p.width;
  const X* dout = p.dout + row * p.width;
  const A mean = p.mean[row];
  const A rstd = p.rstd[row];
  const auto [sum_g, sum_gc] = sum_two<A>(p.width, [&](int64_t i, A& sum_g, A& sum_gc) {
    const A d = A(dout[i]);
    const A c = A(x[i]) - mean;
    const A g = d * weight(i);
    sum_g += g;
    sum_gc += g * c;
    if constexpr (kSums) {
      sums.dweight[i] += d * (c * rstd);
      sums.dbias[i] += d;
    }
  });
  if (!p.dx) return;
  X* dx = p.dx + row * p.width;
  const A avg_g = sum_g / A(p.width);
  const A slope = sum_gc / A(p.width) * rstd * rstd;
  const auto gradient = [&](int64_t i) { return (A(dout[i]) * weight(i) - avg_g - (A(x[i]) - mean) * slope) * rstd; };
  const auto write = [&](const auto& value) {
    if (dropped.dresidual) {
      T* dresidual = dropped.dresidual + row * p.width;
      const auto write_both = [&](int64_t i, A factor) {
        const A found = value(i);
        store(dresidual[i], found);
        store(dx[i], found * factor);
        if constexpr (kSums) sums.dx_bias[i] += found * factor;
      };
      if (dropped.dropout.on) {
        for_each_dropout_factor<A>(dropped.dropout, row * p.width, p.width, write_both);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < p.width; ++i) write_both(i, A(1));
      }
    } else if (p.dx_bias) {
#pragma omp simd
      for (int64_t i = 0; i < p.width; ++i) {
        const A found = value(i);
        store(dx[i], found);
        sums.dx_bias[i] += found;
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < p.width; ++i) store(dx[i], value(i));
    }
  };
  if (const T* dsum = p.dsum ? p.dsum + row * p.width : nullptr)
    write([&](int64_t i) { return gradient(i) + A(dsum[i]); });
  else
    write(gradient);
}

template <typename T, typename X>
void backward_group(const LayernormBackward<T, X>& p, const Dropped<T>& dropped, int64_t group, int64_t groups) {
  const int64_t begin = p.rows * group / groups;
  const int64_t end = p.rows * (group + 1) / groups;
  const bool sums_wanted = p.dweight || p.dbias || p.dx_bias;
  const auto sums = partial(p, group);
  if (sums_wanted) std::fill_n(sums.dweight, 3 * p.width, accumulate_t<T>(0));
  const auto rows = [&](const auto& weight) {
    for (int64_t row = begin; row < end; ++row) {
      if (sums_wanted)
        backward_row<true>(p, dropped, row, sums, weight);
      else
        backward_row<false>(p, dropped, row, sums, weight);
    }
  };
  if (p.weight)
    rows([&](int64_t i) { return accumulate_t<T>(p.weight[i]); });
  else
    rows([](int64_t) { return accumulate_t<T>(1); });
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
void forward(const LayernormForward<T, X>& p, const Dropout& dropout, Stream stream) {
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) forward_row(p, dropout, row);
    });
  });
}

template <typename T, typename X>
void backward(const LayernormBackward<T, X>& p, const Dropped<T>& dropped, Stream stream) {
  const int64_t groups = row_groups(p.rows);
  parallel_for(stream, groups, p.width * (p.rows / groups + 1), [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t group = begin; group < end; ++group) backward_group(p, dropped, group, groups);
    });
  });
  if (p.dweight || p.dbias || p.dx_bias)
    parallel_for(stream, p.width, groups,
                 [&](int64_t begin, int64_t end) { vectorised([&] { add_groups(p, groups, begin, end); }); });
}

}  // namespace

template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, Stream stream) {
  forward(p, {}, stream);
  return {};
}

template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, const DropoutArguments& dropout, Stream stream) {
  forward(p, read(dropout), stream);
  return {};
}

template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width) {
  return row_groups(rows) * 3 * width * int64_t(sizeof(accumulate_t<T>));
}

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, Stream stream) {
  backward(p, {}, stream);
  return {};
}

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, const LayernormDropoutBackward<T>& dropout, Stream stream) {
  backward(p, {dropout.dresidual, read(dropout.arguments)}, stream);
  return {};
}

template <typename X>
Status layernorm_forward_mixed(const LayernormForward<float, X>& p, const DropoutArguments& dropout, Stream stream) {
  forward(p, read(dropout), stream);
  return {};
}

template <typename X>
Status layernorm_backward_mixed(const LayernormBackward<float, X>& p, const LayernormDropoutBackward<float>& dropout,
                                Stream stream) {
  backward(p, {dropout.dresidual, read(dropout.arguments)}, stream);
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                                                                    \
  template Status layernorm_forward<T>(const LayernormForward<T>&, Stream);                          \
  template Status layernorm_forward<T>(const LayernormForward<T>&, const DropoutArguments&, Stream); \
  template int64_t layernorm_backward_workspace<T>(int64_t, int64_t);                                \
  template Status layernorm_backward<T>(const LayernormBackward<T>&, Stream);                        \
  template Status layernorm_backward<T>(const LayernormBackward<T>&, const LayernormDropoutBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

#define GPTKERNELS_INSTANTIATE_MIXED(X)                                                                           \
  template Status layernorm_forward_mixed<X>(const LayernormForward<float, X>&, const DropoutArguments&, Stream); \
  template Status layernorm_backward_mixed<X>(const LayernormBackward<float, X>&,                                 \
                                              const LayernormDropoutBackward<float>&, Stream);
GPTKERNELS_INSTANTIATE_MIXED(bfloat16)
GPTKERNELS_INSTANTIATE_MIXED(float16)

}  // namespace gptkernels::cpu
