#include "../fused_classifier_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "fp8_dlogit.h"
#include "math.h"
#include "simd.h"
#include "targets.h"

namespace gptkernels::cpu {
namespace {

struct LocalRow {
  int64_t columns;  // columns that take part in the softmax
  int64_t target;   // the target's column, or `columns` if it is in another shard

  LocalRow(const ClassifierShard& p, int64_t row) {
    const int64_t of_all = target_of(p, row), here = of_all - p.first_column;
    columns = of_all == p.ignore_index ? 0 : std::clamp<int64_t>(p.vocab_size - p.first_column, 0, p.width);
    target = here >= 0 && here < columns ? here : columns;
  }
  bool has_target() const { return target < columns; }
};

// The additions of a row have the order of fused_classifier_forward's, so that one shard gives its bits.
template <typename T>
void statistics_row(const ClassifierStatistics<T>& p, int64_t row) {
  using A = accumulate_t<T>;
  const T* x = p.logits + row * p.width;
  const LocalRow at(p, row);
  // If the maximum were -inf, the exponentials would be NaN.
  const A largest =
      std::max(std::numeric_limits<A>::lowest(), maximum<A>(at.columns, [&](int64_t i) { return A(x[i]); }));
  const auto exponential = [&](int64_t i) { return exp(A(x[i]) - largest); };
  A others = sum<A>(at.target, exponential);
  if (at.has_target())
    others +=
        sum<A>(at.columns - at.target - 1, [&, after = at.target + 1](int64_t i) { return exponential(after + i); });
  p.statistics[row] = largest;
  p.statistics[p.rows + row] = others;
  p.statistics[2 * p.rows + row] = at.has_target() ? A(x[at.target]) : A(0);
}

template <typename T, typename Out>
void from_statistics_row(const ClassifierFromStatistics<T, Out>& p, int64_t row) {
  using A = accumulate_t<T>;
  const T* x = p.logits + row * p.width;
  Out* dlogits = p.dlogits + row * p.width;
  if (target_of(p, row) == p.ignore_index) {
    p.losses[row] = 0;
    std::fill_n(dlogits, p.width, Out{});
    return;
  }

  const auto statistic = [&](int64_t shard, int which) { return p.statistics[(shard * 3 + which) * p.rows + row]; };
  A largest = std::numeric_limits<A>::lowest();
  for (int64_t shard = 0; shard < p.shards; ++shard) largest = std::max(largest, statistic(shard, 0));
  A rest = 0, logit = 0;
  for (int64_t shard = 0; shard < p.shards; ++shard) {
    rest += statistic(shard, 1) * exp(statistic(shard, 0) - largest);
    logit += statistic(shard, 2);
  }

  const LocalRow at(p, row);
  const A at_target = logit - largest;
  const A total = exp(at_target) + rest;
  const A dloss = p.dlosses ? p.dlosses[p.dlosses_per_row ? row : 0] : A(1);
  const A scale = dloss / total;
#pragma omp simd
  for (int64_t i = 0; i < at.columns; ++i) store(dlogits[i], exp(A(x[i]) - largest) * scale);
  if (at.has_target()) store(dlogits[at.target], -(rest / total) * dloss);
  std::fill(dlogits + at.columns, dlogits + p.width, Out{});
  p.losses[row] = at_target == A(0) ? std::log1p(rest) : std::log(total) - at_target;
}

}  // namespace

template <typename T>
Status fused_classifier_statistics(const ClassifierStatistics<T>& p, Stream stream) {
  if (Status status = check_targets(p); !status.ok()) return status;
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) statistics_row(p, row);
    });
  });
  return {};
}

template <typename T, typename Out>
Status fused_classifier_from_statistics(const ClassifierFromStatistics<T, Out>& p, Stream stream) {
  parallel_for(stream, p.rows, p.width, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t row = begin; row < end; ++row) from_statistics_row(p, row);
    });
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                                                         \
  template Status fused_classifier_statistics<T>(const ClassifierStatistics<T>&, Stream); \
  template Status fused_classifier_from_statistics<T>(const ClassifierFromStatistics<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)
template Status fused_classifier_from_statistics(const ClassifierFromStatistics<float, Fp8Dlogit>&, Stream);
template Status fused_classifier_from_statistics(const ClassifierFromStatistics<bfloat16, Fp8Dlogit>&, Stream);
template Status fused_classifier_from_statistics(const ClassifierFromStatistics<float16, Fp8Dlogit>&, Stream);

}  // namespace gptkernels::cpu
