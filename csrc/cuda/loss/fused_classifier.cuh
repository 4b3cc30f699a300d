// The cross-entropy loss and the gradient dlogits of every row of logits (N, Vp), in one pass.
//
//   loss = log(sum(exp(x - max))) - (x[target] - max)              sums over the columns 0..V-1
//   dlogits = dloss * (exp(x - max) / sum(exp(x - max)) - onehot(target))
//
// dlogits is 0 in the padded columns V..Vp-1, and in all columns of a row without a loss. The kernels sum exponentials
// without the target's column: if the target's probability is nearly 1, the loss and the gradient depend on this small
// sum, whose digits would be lost beside the target's exponential of 1.
//
// dlogits may overwrite the logits: a thread writes only columns that no other thread reads, apart from the target's
// column. All threads read the target's logit before the reduction, and write after it.
#pragma once

#include "../../fused_classifier.h"
#include "cuda/common/assert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/row_part_launch.cuh"
#include "cuda/common/simple_row.cuh"
#include "cuda/common/softmax_sum.cuh"

namespace gptkernels::cuda {

template <typename P>
__device__ int64_t read_target(const P& p, int64_t row) {
  if (row >= p.rows) return p.ignore_index;
  return p.targets_are_int64 ? static_cast<const int64_t*>(p.targets)[row]
                             : static_cast<const int32_t*>(p.targets)[row];
}

// Whether the row has a loss. A target outside the vocabulary must not be used as an index.
template <typename P>
__device__ bool counts(const P& p, int64_t target) {
  return target != p.ignore_index && target >= 0 && target < p.vocab_size;
}

template <typename P>
__device__ void check_target(const P& p, int64_t row, int64_t target, const char* op = "fused_classifier_forward") {
  if (target == p.ignore_index || counts(p, target)) return;
  device_fail(op, "a target is outside the vocabulary", "target %lld at row %lld is outside the vocabulary of %lld\n",
              static_cast<long long>(target), static_cast<long long>(p.first_row + row),
              static_cast<long long>(p.vocab_size));
  __builtin_unreachable();  // so that no registers are kept for code after the call
}

template <typename T>
struct Classifier {
  using A = accumulate_t<T>;

  A logit;  // 0 in a row without a loss
  A dloss;
  // Set by set_sum():
  A max = 0;
  A rest = 0;  // without the target's column
  A scale = 0;
  A at_target = 0;

  __device__ Classifier(A logit, A dloss) : logit(logit), dloss(dloss) {}

  template <typename P>
  __device__ Classifier(const P& p, int64_t row, int64_t target, bool has_loss)
      : logit(has_loss ? widen(p.logits[row * p.width + target]) : A(0)),
        dloss(has_loss && p.dlosses ? p.dlosses[p.dlosses_per_row ? row : 0] : A(1)) {}

  __device__ void set_sum(A max_logit, A sum_of_others) {
    max = max_logit;
    rest = sum_of_others;
    const A total = exp(logit - max) + rest;
    scale = dloss / total;
    at_target = -(rest / total) * dloss;
  }

  __device__ A loss() const {
    const A shifted = logit - max;
    return shifted == A(0) ? log1p(rest) : log(exp(shifted) + rest) - shifted;
  }

  __device__ A gradient(A x) const { return exp_for<T>(x - max) * scale; }
};

// ---- any row: one thread block per row reads the row from memory in both passes ----

template <int kVec, typename T, typename Out>
__device__ void classify_row(const FusedClassifierForward<T, Out>& p, int64_t row) {
  using A = accumulate_t<T>;
  const int64_t target = read_target(p, row);
  if (threadIdx.x == 0) check_target(p, row, target);
  const bool has_loss = counts(p, target);
  const int64_t columns = has_loss ? p.vocab_size : 0;
  Classifier<T> classifier(p, row, target, has_loss);
  A x[kVec];
  SoftmaxSum<T> sum;
  for_each_pack<kVec>(columns, [&](int64_t column) {
    load_wide<kVec>(x, p.logits + row * p.width + column);
    for (int k = 0; k < kVec; ++k)
      if (column + k >= columns || column + k == target) x[k] = -A(INFINITY);
    sum.add(x);
  });
  sum.include_max(classifier.logit);
  sum.block_reduce();
  classifier.set_sum(sum.max, sum.total);
  for_each_pack<kVec>(p.width, [&](int64_t column) {
    if (column < columns) load_wide<kVec>(x, p.logits + row * p.width + column);
    for (int k = 0; k < kVec; ++k)
      x[k] = column + k >= columns ? A(0) : column + k == target ? classifier.at_target : classifier.gradient(x[k]);
    store_narrow<kVec>(p.dlogits + row * p.width + column, x);
  });
  if (threadIdx.x == 0) p.losses[row] = has_loss ? classifier.loss() : A(0);
}

template <typename T, typename Out, int kVec>
__global__ void __launch_bounds__(kSimpleThreads)
    fused_classifier_forward_simple_kernel(const FusedClassifierForward<T, Out> p) {
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) classify_row<kVec>(p, row);
}

// ---- rows that fit into registers and shared memory ----

// load the row with -inf in the padded columns and the target's column; find the maximum of the warp's part
// compute the exponentials relative to the warp's maximum, and their sum
// combine maximum and sum over the team's warps
// store the gradients and the loss
template <typename T_, typename Out>
struct ClassifierForwardRow {
  using T = T_;
  using Arguments = FusedClassifierForward<T, Out>;
  static constexpr RowShapes kShapes = {.cluster_packs = 4096, .cluster_items = 16};
  template <bool kHasHeadTail, bool kOverflow>
  static constexpr int kThreads = kOverflow ? 640 : 768;

  // Float32 exponentials replace the logits in place. A 16-bit type would round the exponentials, so for such types the
  // kernels compute them again for the gradients.
  static constexpr bool kInPlace = sizeof(T) == 4;

  template <typename Team, int kItems, bool kHasHeadTail, bool kOverflow>
  static __device__ void run(const Arguments& p, uint4* slots, int) {
    typename Team::template Combine<MaxSum<T>> combine;
    const int64_t row = Team::row();
    const int64_t read = read_target(p, row);
    if (Team::thread() == 0) check_target(p, row, read);
    const bool has_loss = counts(p, read);
    const int target = static_cast<int>(read);
    const int columns = has_loss ? static_cast<int>(p.vocab_size) : 0;
    Classifier<T> classifier(p, row, read, has_loss);
    const RowColumns<T, Team, kItems, kHasHeadTail, true, kOverflow> at(p.logits, p.rows, p.width, columns);
    RowPart x(p.logits, at, slots);

    MaxSum<T> own;
    own.max = fmaxf(own.max, classifier.logit);
    at.each([&](auto place) {
      at.mask(x.raw(place).v, place, narrow<T>(-INFINITY));
      at.replace(x.raw(place).v, place, target, narrow<T>(-INFINITY));
      own.max = fmaxf(own.max, largest_of(x.raw(place)));
    });
    own.max = warp_reduce<FiniteMax, Team::kLanes>(own.max);
    at.each([&](auto place) {
      auto e = x[place];
#pragma unroll
      for (float& value : e.v) {
        value = exp_for<T>(value - own.max);
        own.total += value;
      }
      if constexpr (kInPlace) x.set(place, e);
    });
    own.total = warp_reduce<Sum, Team::kLanes>(own.total);
    const MaxSum<T> all = own.reduce_over_team(combine, ScaledExp<T>(1));

    classifier.set_sum(all.max, static_cast<float>(all.total));
    const float factor = classifier.gradient(own.max);
    at.store(p.dlogits, [&](auto place) {
      auto y = x[place];
#pragma unroll
      for (float& value : y.v) value = kInPlace ? value * factor : classifier.gradient(value);
      at.replace(y.v, place, target, classifier.at_target);
      return y;
    });
    if (Team::thread() == 0 && row < p.rows) p.losses[row] = has_loss ? classifier.loss() : 0.f;
  }
};

// launch_rows() supports logits and dlogits with the same misalignment, but is used only if both are 16-byte aligned.
// dlogits is logits itself in the in-place operator, and a new, aligned tensor in the out-of-place operator. For the
// same logits, both operators must run the same kernel, because their results must have the same bits.
template <typename T, typename Out>
void launch_forward(const FusedClassifierForward<T, Out>& p, Stream stream) {
  const bool aligned = can_vectorize<T>(p.width, p.logits, p.dlogits);
  if constexpr (!std::is_same_v<T, double>)
    if (all_aligned(p.logits, p.dlogits) && launch_rows<ClassifierForwardRow<T, Out>>(p, p.logits, aligned, stream))
      return;
  with_packs<T>(aligned, [&](auto vec) {
    fused_classifier_forward_simple_kernel<T, Out, vec.value>
        <<<grid_size(p.rows), simple_threads<vec.value>(p.width), 0, stream>>>(p);
  });
}

template <typename T, typename Out>
Status fused_classifier_forward(const FusedClassifierForward<T, Out>& p, Stream stream) {
  if (p.rows == 0) return cudaSuccess;
  launch_forward(p, stream);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
