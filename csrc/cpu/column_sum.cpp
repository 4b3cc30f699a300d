#include "../column_sum.h"

#include <algorithm>

#include "simd.h"

namespace gptkernels::cpu {
namespace {

// The rows are cut into groups by their number alone, never by the threads at hand, and the groups' sums are added in
// order: so the bits do not depend on the number of threads. Short groups also keep the roundings of a float32 sum few.
constexpr int64_t kMaxGroups = 64;
constexpr int64_t kMinGroupRows = 16;

int64_t row_groups(int64_t rows) {
  return std::clamp<int64_t>((rows + kMinGroupRows - 1) / kMinGroupRows, 1, kMaxGroups);
}

template <typename T>
accumulate_t<T>* partial(const ColumnSum<T>& p, int64_t group) {
  return static_cast<accumulate_t<T>*>(p.workspace) + group * p.width;
}

template <typename T>
void add_rows(const ColumnSum<T>& p, int64_t group, int64_t groups) {
  using A = accumulate_t<T>;
  A* sums = partial(p, group);
  std::fill_n(sums, p.width, A(0));
  for (int64_t row = p.rows * group / groups; row < p.rows * (group + 1) / groups; ++row) {
    const T* x = p.x + row * p.width;
#pragma omp simd
    for (int64_t i = 0; i < p.width; ++i) sums[i] += A(x[i]);
  }
}

// Groups outside, columns inside: the sums stay in the L1 cache, and the inner loop is one over neighbours.
template <typename T>
void add_groups(const ColumnSum<T>& p, int64_t groups, int64_t begin, int64_t end) {
  auto* sums = partial(p, 0);
  for (int64_t group = 1; group < groups; ++group) {
    const auto* more = partial(p, group);
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) sums[i] += more[i];
  }
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) p.out[i] = T(sums[i]);
}

}  // namespace

template <typename T>
int64_t column_sum_workspace(int64_t rows, int64_t width) {
  return row_groups(rows) * width * int64_t(sizeof(accumulate_t<T>));
}

template <typename T>
Status column_sum(const ColumnSum<T>& p, Stream stream) {
  const int64_t groups = row_groups(p.rows);
  parallel_for(stream, groups, p.width * (p.rows / groups + 1), [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t group = begin; group < end; ++group) add_rows(p, group, groups);
    });
  });
  parallel_for(stream, p.width, groups,
               [&](int64_t begin, int64_t end) { vectorised([&] { add_groups(p, groups, begin, end); }); });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                             \
  template int64_t column_sum_workspace<T>(int64_t, int64_t); \
  template Status column_sum<T>(const ColumnSum<T>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cpu
