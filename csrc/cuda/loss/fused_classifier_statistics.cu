// Both kernels read the logits once, in packs of 16 bytes, of which each thread has several in flight. Rows may start
// anywhere: fewer elements than a pack has are left before the first pack and after the last pack, the edges.
#include <limits>

#include "../../fused_classifier_statistics.h"
#include "fp8_dlogit.cuh"
#include "fused_classifier.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStatisticsPacks = 4, kStatisticsBlocks = 5;  // packs in flight per thread; thread blocks per SM
constexpr int kGradientPacks = 8, kGradientBlocks = 4;

// A row is divided into `count` tiles of kPacks packs per thread. Of the few counts with nearly the fewest tiles, the
// one with the fewest idle threads is used.
template <int kPacks>
struct Tiles {
  int64_t count = 1;
  unsigned threads = kWarp;

  explicit Tiles(int64_t packs) {
    constexpr int64_t kPerWarp = kPacks * kWarp;
    const int64_t fewest = max(ceil_div(packs, kThreads * kPacks), int64_t{1});
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int64_t tried = fewest; tried <= fewest + fewest / 2; ++tried) {
      const int64_t warps = max(ceil_div(ceil_div(packs, tried), kPerWarp), int64_t{1});
      if (tried * warps >= least) continue;
      least = tried * warps;
      count = tried;
      threads = static_cast<unsigned>(warps * kWarp);
    }
  }
};

// The columns of a shard's row that take part in the softmax, or those of another range from 0 on.
template <typename T>
struct PackedRow {
  int columns;
  int head;   // the column of the first pack
  int packs;  // whole packs

  __device__ PackedRow(const T* row, int columns)
      : columns(columns),
        head(min(columns, static_cast<int>(-reinterpret_cast<uintptr_t>(row) / sizeof(T) % kPack<T>))),
        packs((columns - head) / kPack<T>) {}

  __device__ int column(int pack) const { return head + pack * kPack<T>; }

  // The column of this thread's edge element, or `columns` or more if it has none. There are fewer than a warp.
  __device__ int edge() const {
    const int thread = static_cast<int>(threadIdx.x);
    return thread < head ? thread : column(packs) + thread - head;
  }
};

struct LocalTarget {
  bool has_loss;
  bool here;
  int column;  // -1 in another shard

  __device__ LocalTarget(const ClassifierShard& p, int64_t target) : has_loss(counts(p, target)) {
    const int64_t local = target - p.first_column;
    here = has_loss && local >= 0 && local < p.width;
    column = here ? static_cast<int>(local) : -1;
  }
};

__device__ int softmax_columns(const ClassifierShard& p) {
  return static_cast<int>(min(max(p.vocab_size - p.first_column, int64_t(0)), p.width));
}

// Sets element k of x to `by` if its column is `column`.
template <int kVec, typename Value>
__device__ void replace(Value (&x)[kVec], int first_column, int column, Value by) {
  if (static_cast<unsigned>(column - first_column) >= kVec) return;
#pragma unroll
  for (int k = 0; k < kVec; ++k)
    if (first_column + k == column) x[k] = by;
}

// ---- statistics: one thread block per row ---------------------------------------------------------------------------

// The loads of logits do not wait for the target.
template <typename T>
__global__ void __launch_bounds__(kThreads, kStatisticsBlocks)
    fused_classifier_statistics_kernel(const ClassifierStatistics<T> p) {
  using A = accumulate_t<T>;
  constexpr int kVec = kPack<T>;
  const T none = narrow<T>(-A(INFINITY));
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t read = read_target(p, row);
    const LocalTarget target(p, read);
    const T* x = p.logits + row * p.width;
    const PackedRow<T> at(x, softmax_columns(p));
    SoftmaxSum<T, sum_t<T>> sum;
    for (int first = threadIdx.x; first < at.packs; first += blockDim.x * kStatisticsPacks) {
      Packed<T, kVec> packs[kStatisticsPacks];
      const auto pack_at = [&](int j) { return first + j * static_cast<int>(blockDim.x); };
#pragma unroll
      for (int j = 0; j < kStatisticsPacks; ++j) {
#pragma unroll
        for (T& value : packs[j].v) value = none;
        if (pack_at(j) < at.packs) packs[j] = load<kVec>(x + at.column(pack_at(j)));
      }
#pragma unroll
      for (int j = 0; j < kStatisticsPacks; ++j) replace(packs[j].v, at.column(pack_at(j)), target.column, none);
      sum.add(packs);
    }
    if (const int edge = at.edge(); edge < at.columns) {
      const Packed<T, 1> one[] = {edge == target.column ? none : x[edge]};
      sum.add(one);
    }
    const A logit = target.here ? widen(x[target.column]) : A(0);
    if (target.here) sum.include_max(logit);
    sum.block_reduce();
    if (threadIdx.x > 0) continue;
    check_target(p, row, read, "fused_classifier_statistics");
    if (!target.has_loss) sum = {};
    p.statistics[row] = sum.max;
    p.statistics[p.rows + row] = static_cast<A>(sum.total);
    p.statistics[2 * p.rows + row] = logit;
  }
}

// ---- losses and gradient: one thread block per tile of a row --------------------------------------------------------

// Each warp combines the statistics of all shards, so that the thread block needs no barrier.
template <typename T, typename Out>
__device__ Classifier<T> combine(const ClassifierFromStatistics<T, Out>& p, int64_t row, accumulate_t<T> dloss) {
  using A = accumulate_t<T>;
  SoftmaxSum<T> sum;
  A logit = 0;
  for (int64_t shard = threadIdx.x % kWarp; shard < p.shards; shard += kWarp) {
    const A* statistics = p.statistics + shard * 3 * p.rows + row;
    sum.merge({statistics[0], statistics[p.rows]});
    logit += statistics[2 * p.rows];
  }
  sum.warp_reduce();
  Classifier<T> classifier(warp_reduce<Sum>(logit), dloss);
  classifier.set_sum(sum.max, sum.total);
  return classifier;
}

template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads, kGradientBlocks)
    fused_classifier_from_statistics_kernel(const ClassifierFromStatistics<T, Out> p) {
  using A = accumulate_t<T>;
  constexpr int kVec = kPack<T>;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x = p.logits + row * p.width;
    Out* dlogits = p.dlogits + row * p.width;
    const LocalTarget target(p, read_target(p, row));
    const PackedRow<T> at(x, static_cast<int>(p.width));
    const int first = (blockIdx.y * kGradientPacks) * blockDim.x + threadIdx.x;
    const auto pack_at = [&](int j) { return first + j * static_cast<int>(blockDim.x); };
    Packed<T, kVec> packs[kGradientPacks];
#pragma unroll
    for (int j = 0; j < kGradientPacks; ++j)
      if (pack_at(j) < at.packs) packs[j] = load<kVec>(x + at.column(pack_at(j)));
    const int columns = target.has_loss ? softmax_columns(p) : 0;
    const A dloss = target.has_loss && p.dlosses ? p.dlosses[p.dlosses_per_row ? row : 0] : A(1);
    const Classifier<T> classifier = combine(p, row, dloss);
#pragma unroll
    for (int j = 0; j < kGradientPacks; ++j) {
      if (pack_at(j) >= at.packs) break;
      const int column = at.column(pack_at(j));
      A values[kVec];
      widen(values, packs[j]);
#pragma unroll
      for (A& value : values) value = classifier.gradient(value);
      if (column + kVec > columns)
#pragma unroll
        for (int k = 0; k < kVec; ++k)
          if (column + k >= columns) values[k] = 0;
      if (target.here) replace(values, column, target.column, classifier.at_target);
      store_narrow<kVec>(dlogits + column, values);
    }
    if (blockIdx.y > 0) continue;
    if (const int edge = at.edge(); edge < at.columns) {
      const A value[] = {edge >= columns                        ? A(0)
                         : target.here && edge == target.column ? classifier.at_target
                                                                : classifier.gradient(widen(x[edge]))};
      store_narrow<1>(dlogits + edge, value);
    }
    if (threadIdx.x == 0) p.losses[row] = target.has_loss ? classifier.loss() : A(0);
  }
}

}  // namespace

template <typename T>
Status fused_classifier_statistics(const ClassifierStatistics<T>& p, Stream stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.width > std::numeric_limits<int>::max()) return cudaErrorInvalidValue;
  const unsigned threads = Tiles<kStatisticsPacks>(p.width / kPack<T>).threads;
  fused_classifier_statistics_kernel<T><<<grid_size(p.rows), threads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, typename Out>
Status fused_classifier_from_statistics(const ClassifierFromStatistics<T, Out>& p, Stream stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.width > std::numeric_limits<int>::max()) return cudaErrorInvalidValue;
  const Tiles<kGradientPacks> tiles(p.width / kPack<T>);
  const dim3 grid(grid_size(p.rows), static_cast<unsigned>(tiles.count));
  fused_classifier_from_statistics_kernel<T, Out><<<grid, tiles.threads, 0, stream>>>(p);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                                         \
  template Status fused_classifier_statistics<T>(const ClassifierStatistics<T>&, Stream); \
  template Status fused_classifier_from_statistics<T>(const ClassifierFromStatistics<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)
template Status fused_classifier_from_statistics(const ClassifierFromStatistics<float, Fp8Dlogit>&, Stream);
template Status fused_classifier_from_statistics(const ClassifierFromStatistics<bfloat16, Fp8Dlogit>&, Stream);
template Status fused_classifier_from_statistics(const ClassifierFromStatistics<float16, Fp8Dlogit>&, Stream);

}  // namespace gptkernels::cuda
