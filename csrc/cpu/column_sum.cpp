#include "../column_sum.h"

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace gptkernels::cpu {
namespace {

// Rows are divided into groups, and columns into strips, whose sums fit in the L1 cache. The groups depend on the
// number of rows only, and their sums are added in order, so the bits do not depend on the number of threads.
constexpr int64_t kMaxGroups = 64;
constexpr int64_t kMinGroupRows = 16;
constexpr int64_t kStrip = 1024;

int64_t row_groups(int64_t rows) {
  return std::clamp<int64_t>((rows + kMinGroupRows - 1) / kMinGroupRows, 1, kMaxGroups);
}

// Summing float32 in float64 takes no additional time, because the kernel is bound by memory bandwidth.
template <typename T>
using Sum = std::conditional_t<sizeof(T) == 2, float, double>;

template <typename T>
Sum<T>* partial(const ColumnSum<T>& p, int64_t group) {
  return static_cast<Sum<T>*>(p.workspace) + group * p.width;
}

template <typename T>
void add_rows(const ColumnSum<T>& p, int64_t group, int64_t groups, int64_t strip) {
  Sum<T>* sums = partial(p, group) + strip * kStrip;
  const int64_t columns = std::min(kStrip, p.width - strip * kStrip);
  const int64_t end = p.rows * (group + 1) / groups;
  int64_t row = p.rows * group / groups;
  const auto value = [&](int64_t r, int64_t i) { return Sum<T>(p.x[r * p.width + strip * kStrip + i]); };
  std::fill_n(sums, columns, Sum<T>(0));
  for (; row + 4 <= end; row += 4) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i)
      sums[i] += (value(row, i) + value(row + 1, i)) + (value(row + 2, i) + value(row + 3, i));
  }
  for (; row < end; ++row) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) sums[i] += value(row, i);
  }
}

template <typename T>
void add_groups(const ColumnSum<T>& p, int64_t groups, int64_t begin, int64_t end) {
  Sum<T>* sums = partial(p, 0);
  for (int64_t group = 1; group < groups; ++group) {
    const Sum<T>* more = partial(p, group);
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) sums[i] += more[i];
  }
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) store(p.out[i], accumulate_t<T>(sums[i]));
}

}  // namespace

template <typename T>
int64_t column_sum_workspace(int64_t rows, int64_t width) {
  return row_groups(rows) * width * int64_t(sizeof(Sum<T>));
}

template <typename T>
Status column_sum(const ColumnSum<T>& p, Stream stream) {
  const int64_t groups = row_groups(p.rows);
  const int64_t strips = (p.width + kStrip - 1) / kStrip;
  const int64_t cost = std::min(kStrip, p.width) * (p.rows / groups + 1);
  parallel_for(stream, groups * strips, cost, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t i = begin; i < end; ++i) add_rows(p, i / strips, groups, i % strips);
    });
  });
  parallel_for(stream, p.width, groups,
               [&](int64_t begin, int64_t end) { vectorised([&] { add_groups(p, groups, begin, end); }); });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                             \
  template int64_t column_sum_workspace<T>(int64_t, int64_t); \
  template Status column_sum<T>(const ColumnSum<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
