#include "../fused_classifier.h"
#include "common/assert.cuh"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "common/row.cuh"
#include "common/softmax_sum.cuh"
#include "common/wide_row.cuh"
#include "common/wide_row_launch.cuh"

namespace gptkernels::cuda {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Forward: reads the logits once, writes dlogits once; 2 * N * Vp * sizeof(T) bytes, and a target and a loss a row.
//
// A thread writes the packs that it has read itself, so dlogits may take the place of the logits; the one logit that
// all threads read, the target's, is in their sums before any of them writes. Columns V..Vp count as -inf and are
// written as 0.
//
// The target's exponential is left out of the sum. That then holds the digits that a confident row's loss and gradient
// consist of, and that the whole sum, a little more than 1, would have rounded away.
//
// A row is kept as it came, in half of what its exponentials would fill, and each of these is taken twice.

// ignore_index beyond the last row.
template <typename T>
__device__ int64_t read_target(const FusedClassifierForward<T>& p, int64_t row) {
  if (row >= p.rows) return p.ignore_index;
  return p.targets_are_int64 ? static_cast<const int64_t*>(p.targets)[row]
                             : static_cast<const int32_t*>(p.targets)[row];
}

// Whether a row with this target has a loss. One outside the vocabulary is never used as an index.
template <typename T>
__device__ bool counts(const FusedClassifierForward<T>& p, int64_t target) {
  return target != p.ignore_index && target >= 0 && target < p.vocab_size;
}

constexpr int kNone = -1;  // the target of a row without a loss

template <typename T>
__device__ void check_target(const FusedClassifierForward<T>& p, int64_t row, int64_t target, const char* kernel) {
  if (target == p.ignore_index || counts(p, target)) return;
  device_fail(kernel, "a target is outside the vocabulary",
              "target %lld at row %lld is outside the vocabulary of %lld\n", static_cast<long long>(target),
              static_cast<long long>(row), static_cast<long long>(p.vocab_size));
  __builtin_unreachable();  // so that no register is kept for what would follow
}

// One row's arithmetic, a pack at a time.
template <typename T, typename Column>
struct Classifier {
  using A = accumulate_t<T>;

  Column target;
  Column vocab_size;
  A logit;  // the target's
  A dloss;
  // From the sum on:
  A max = 0;
  A rest = 0;  // the sum of exp(x - max) over all columns but the target's
  A scale = 0;
  A at_target = 0;

  __device__ Classifier(const FusedClassifierForward<T>& p, int64_t row, int64_t target)
      : target(static_cast<Column>(target)),
        vocab_size(static_cast<Column>(p.vocab_size)),
        logit(target == kNone ? A(0) : widen(p.logits[row * p.width + target])),
        dloss(p.dlosses ? p.dlosses[p.dlosses_per_row ? row : 0] : A(1)) {}

  template <int kVec>
  __device__ bool special(Column column, const A (&)[kVec]) const {
    return column < 0 || column + kVec > vocab_size ||
           static_cast<std::make_unsigned_t<Column>>(target - column) < kVec;
  }

  // -inf for the target, for padding, and for what belongs to the row before.
  template <int kVec>
  __device__ void leave_others(Column column, A (&x)[kVec]) const {
    if (!special(column, x)) return;
#pragma unroll
    for (int k = 0; k < kVec; ++k)
      if (column + k < 0 || column + k >= vocab_size || column + k == target)
        x[k] = -std::numeric_limits<A>::infinity();
  }

  __device__ void set_sum(A max_logit, A sum_of_others) {
    max = max_logit;
    rest = sum_of_others;
    const A total = exp(logit - max) + rest;
    scale = dloss / total;
    at_target = -(rest / total) * dloss;
  }

  __device__ A loss() const {
    if (target == kNone) return 0;
    const A shifted = logit - max;
    return shifted == A(0) ? log1p(rest) : log(exp(shifted) + rest) - shifted;
  }

  // Logits become gradients, but for the target and for padding ...
  template <int kVec>
  __device__ void differentiate(A (&x)[kVec]) const {
#pragma unroll
    for (int k = 0; k < kVec; ++k) x[k] = exp_for<T>(x[k] - max) * scale;
  }

  // ... whose are put in here.
  template <int kVec>
  __device__ void correct(Column column, A (&x)[kVec]) const {
    if (!special(column, x)) return;
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      if (column + k >= vocab_size) x[k] = 0;
      if (column + k == target) x[k] = at_target;
    }
  }
};

// Rows of up to kMaxItems packs a lane: a warp each, which keeps its row in registers. Packs lie at multiples of 16
// bytes, so the first and the last may reach beyond the row; of these only the row's elements are loaded and stored.
constexpr int kMaxItems = 4;
constexpr int kWarpRows = 8;  // of a block

template <typename T, int kItems>
__global__ void __launch_bounds__(kWarp* kWarpRows)
    fused_classifier_forward_warp_kernel(const FusedClassifierForward<T> p) {
  using A = accumulate_t<T>;
  constexpr int kVec = kPack<T>;
  using Registers = Row<T, kVec, kItems>;
  const int width = static_cast<int>(p.width);
  const int64_t stride = int64_t(gridDim.x) * kWarpRows;
  for (int64_t row = int64_t(blockIdx.x) * kWarpRows + threadIdx.y; row < p.rows; row += stride) {
    const int64_t target = read_target(p, row);
    if (threadIdx.x == 0) check_target(p, row, target, __func__);
    const T* logits = p.logits + row * width;
    const int before = elements_before<Packed<T, kVec>>(logits);
    const auto column = [&](int i) { return static_cast<int>(Registers::column(i)) - before; };
    Registers x;
    if (counts(p, target)) {
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (column(i) < width) x.packs[i] = load_within<kVec>(logits, column(i), width);
    }
    Classifier<T, int> classifier(p, row, counts(p, target) ? target : kNone);
    if (classifier.target != kNone) {
      A max = classifier.logit;
      x.each(before + width, [&](int i, auto& v) {
        classifier.leave_others(column(i), v);
#pragma unroll
        for (int k = 0; k < kVec; ++k) max = fmax(max, v[k]);
      });
      max = fmax(warp_reduce<FiniteMax>(max), std::numeric_limits<A>::lowest());
      A rest = 0;
      x.each(before + width, [&](int i, auto& v) {
        classifier.leave_others(column(i), v);
#pragma unroll
        for (int k = 0; k < kVec; ++k) rest += exp_for<T>(v[k] - max);
      });
      classifier.set_sum(max, warp_reduce<Sum>(rest));
      x.update(before + width, [&](int i, auto& v) {
        classifier.differentiate(v);
        classifier.correct(column(i), v);
      });
    } else {
      x.fill(0);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (column(i) < width) store_within(p.dlogits + row * width, column(i), width, x.packs[i]);
    if (threadIdx.x == 0) p.losses[row] = classifier.loss();
  }
}

// All other rows: they stay in shared memory. Targets are read a row ahead, and for the loads of rows to come.
template <typename T, bool kKept>
__global__ void __launch_bounds__((kWideThreads<T, kKept>))
    fused_classifier_forward_wide_kernel(const FusedClassifierForward<T> p, const WideShape shape) {
  using A = accumulate_t<T>;
  using Rows = WideRows<T, 1, kPack<T>, kKept>;
  Rows rows(shape, p.rows, p.width, {p.logits}, [&](int64_t row) { return counts(p, read_target(p, row)); });
  const auto checked = [&](int64_t row, int64_t target) {
    if (rows.first_thread()) check_target(p, row, target, "fused_classifier_forward_wide_kernel");
    return static_cast<typename Rows::Column>(counts(p, target) ? target : kNone);
  };
  auto target = checked(rows.row(), read_target(p, rows.row()));
  while (rows.more()) {
    rows.wait();
    Classifier<T, typename Rows::Column> classifier(p, rows.row(), target);
    const typename Rows::Exceptions exceptions = {classifier.vocab_size, target};
    SoftmaxSum<T> sum;
    if (target != kNone) {
      rows.each(-std::numeric_limits<A>::infinity(), exceptions, [&](auto column, auto& x, auto exceptional) {
        if (exceptional.value) classifier.leave_others(column, x[0]);
        sum.add(x[0]);
      });
      sum.include_max(classifier.logit);
    }
    const int64_t next = read_target(p, rows.next_row());
    const int64_t loaded_next = read_target(p, rows.loaded_next());
    if (target != kNone) {
      rows.reduce(sum);
      classifier.set_sum(sum.max, sum.total);
      rows.write(p.dlogits, exceptions, [&](auto column, auto& x, auto exceptional) {
        classifier.differentiate(x[0]);
        if (exceptional.value) classifier.correct(column, x[0]);
      });
    } else {
      rows.fill(p.dlogits, 0);
    }
    if (rows.first_thread()) p.losses[rows.row()] = classifier.loss();
    target = checked(rows.next_row(), next);
    rows.next(counts(p, loaded_next));
  }
}

// Where a row is kept between its two passes: registers, while they are one warp's; then, with launch_wide_rows, shared
// memory, of a part of a multiprocessor or of up to eight, else nowhere.
template <typename T>
void launch_forward(const FusedClassifierForward<T>& p, Stream stream) {
  const bool aligned = packs<T>(p.width, p.logits);
  const int64_t items = ceil_div(ceil_div(p.width, kPack<T>) + !aligned, kWarp);
  if (items > kMaxItems)
    return launch_wide_rows<T, 1, fused_classifier_forward_wide_kernel<T, true>,
                            fused_classifier_forward_wide_kernel<T, false>>(p, aligned, stream);
  const unsigned grid = grid_size(ceil_div(p.rows, kWarpRows));
  with_row_items<1, kMaxItems>(static_cast<int>(items), [&](auto items) {
    fused_classifier_forward_warp_kernel<T, items.value><<<grid, dim3(kWarp, kWarpRows), 0, stream>>>(p);
  });
}

// ---------------------------------------------------------------------------------------------------------------
// Backward: reads and writes dlogits once; 2 * N * Vp * sizeof(T) bytes. All loads of a thread come before its first
// store.

constexpr int kBackwardItems = 4;

// A pack of a row that begins in the row before or ends in the next keeps to its own elements.
template <typename T>
__global__ void __launch_bounds__(256)
    fused_classifier_backward_kernel(const FusedClassifierBackward<T> p, int segments) {
  using A = accumulate_t<T>;
  constexpr int kVec = kPack<T>;
  using Pack = Packed<T, kVec>;
  const int64_t unit = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t row = segments == 1 ? unit : unit / segments;
  if (row >= p.rows) return;
  const T* from = p.dlogits + row * p.width;
  const int before = elements_before<Pack>(from);
  const int64_t first = (unit - row * segments) * kBackwardItems * blockDim.x + threadIdx.x;
  const auto column = [&](int i) { return (first + int64_t(i) * blockDim.x) * kVec - before; };
  Pack packs[kBackwardItems];
#pragma unroll
  for (int i = 0; i < kBackwardItems; ++i)
    if (column(i) < p.width) packs[i] = load_within<kVec>(from, column(i), p.width);
  const A dloss = p.dlosses[p.dlosses_per_row ? row : 0];
  T* to = p.scaled + row * p.width;
#pragma unroll
  for (int i = 0; i < kBackwardItems; ++i) {
    if (column(i) >= p.width) break;
    A d[kVec];
    widen(d, packs[i]);
#pragma unroll
    for (int k = 0; k < kVec; ++k) d[k] = d[k] == A(0) ? A(0) : d[k] * dloss;
    store_within(to, column(i), p.width, narrow<T>(d));
  }
}

// Rows of up to 1024 packs side by side in a block, wider ones over several blocks.
template <typename T>
void launch_backward(const FusedClassifierBackward<T>& p, Stream stream) {
  const int64_t packs = ceil_div(p.width, kPack<T>) + !cuda::packs<T>(p.width, p.dlogits);
  const int64_t lanes = ceil_div(ceil_div(packs, kBackwardItems), kWarp) * kWarp;
  const dim3 block(std::min<int64_t>(lanes, 256), std::max<int64_t>(256 / lanes, 1));
  const int64_t segments = ceil_div(packs, int64_t(block.x) * kBackwardItems);
  const unsigned grid = static_cast<unsigned>(ceil_div(p.rows * segments, block.y));
  fused_classifier_backward_kernel<T><<<grid, block, 0, stream>>>(p, static_cast<int>(segments));
}

}  // namespace

template <typename T>
Status fused_classifier_forward(const FusedClassifierForward<T>& p, Stream stream) {
  if (p.rows == 0) return cudaSuccess;
  launch_forward(p, stream);
  return cudaGetLastError();
}

template <typename T>
Status fused_classifier_backward(const FusedClassifierBackward<T>& p, Stream stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  launch_backward(p, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                                        \
  template Status fused_classifier_forward<T>(const FusedClassifierForward<T>&, Stream); \
  template Status fused_classifier_backward<T>(const FusedClassifierBackward<T>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cuda
