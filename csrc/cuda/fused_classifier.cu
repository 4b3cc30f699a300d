#include "../fused_classifier.h"
#include "common/assert.cuh"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "common/row.cuh"
#include "common/simple_row.cuh"
#include "common/softmax_sum.cuh"
#include "wide_row.cuh"
#include "wide_row_launch.cuh"

namespace gptkernels::cuda {
namespace {

// ==== forward ========================================================================================================

// Reads the logits once and writes dlogits once, 2 * N * Vp * sizeof(T) bytes, and a target and a loss per row.
//
// A thread writes only packs that it has read itself, so dlogits may overwrite the logits. Every thread also reads the
// target's logit; it does so before the reduction, and all writes come after it. Columns V..Vp count as -inf and are
// written as 0.
//
// The sum of exponentials leaves out the target's. For a confident row that sum is small, and its digits are what loss
// and gradient consist of; added to the target's 1, they would be rounded away.
//
// The row is kept in the logits' dtype, which for 16-bit types takes half the space of float32 exponentials; each
// exponential is computed twice.

// The target of a row; ignore_index beyond the last row.
template <typename T>
__device__ int64_t read_target(const FusedClassifierForward<T>& p, int64_t row) {
  if (row >= p.rows) return p.ignore_index;
  return p.targets_are_int64 ? static_cast<const int64_t*>(p.targets)[row]
                             : static_cast<const int32_t*>(p.targets)[row];
}

// Whether a row with this target has a loss. A target outside the vocabulary is never used as an index.
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
              static_cast<long long>(p.first_row + row), static_cast<long long>(p.vocab_size));
  __builtin_unreachable();  // frees the registers that the code after the call would need
}

// The arithmetic of one row, pack by pack.
template <typename T, typename Column>
struct Classifier {
  using A = accumulate_t<T>;

  Column target;
  Column vocab_size;
  A logit;  // the target's
  A dloss;
  // Known after set_sum():
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

  // Sets to -inf the target, the padding, and elements of the previous row.
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

  // Turns logits into gradients, except for the target and the padding ...
  template <int kVec>
  __device__ void differentiate(A (&x)[kVec]) const {
#pragma unroll
    for (int k = 0; k < kVec; ++k) x[k] = exp_for<T>(x[k] - max) * scale;
  }

  // ... which this sets.
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

// ---- any row: one block, which reads it from memory in both passes ----

template <typename T, int kVec>
__global__ void __launch_bounds__(kSimpleThreads)
    fused_classifier_forward_simple_kernel(const FusedClassifierForward<T> p) {
  using A = accumulate_t<T>;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t target = read_target(p, row);
    const bool has_loss = counts(p, target);
    if (threadIdx.x == 0) check_target(p, row, target, __func__);
    Classifier<T, int64_t> classifier(p, row, has_loss ? target : kNone);
    A x[kVec];
    SoftmaxSum<T> sum;
    if (has_loss)
      for_each_pack<kVec>(p.vocab_size, [&](int64_t column) {
        load_wide<kVec>(x, p.logits + row * p.width + column);
        classifier.leave_others(column, x);
        sum.add(x);
      });
    sum.include_max(classifier.logit);
    sum.block_reduce();
    classifier.set_sum(sum.max, sum.total);
    for_each_pack<kVec>(p.width, [&](int64_t column) {
      for (int k = 0; k < kVec; ++k) x[k] = 0;
      if (has_loss) {
        load_wide<kVec>(x, p.logits + row * p.width + column);
        classifier.differentiate(x);
        classifier.correct(column, x);
      }
      store_narrow<kVec>(p.dlogits + row * p.width + column, x);
    });
    if (threadIdx.x == 0) p.losses[row] = classifier.loss();
  }
}

// ---- rows that fit into the registers of a warp ----

// Rows of up to kMaxItems packs per lane: one warp each, which keeps the row in registers. Packs are at multiples of 16
// bytes, so the first and the last may reach beyond the row; of these, only the row's elements are loaded and stored.
constexpr int kMaxItems = 4;
constexpr int kWarpRows = 8;  // of a block

template <typename T, int kItems>
__global__ void __launch_bounds__(kWarp* kWarpRows)
    fused_classifier_forward_warp_kernel(const FusedClassifierForward<T> p) {
  using A = accumulate_t<T>;
  constexpr int kVec = kPack<T>;
  using Registers = Row<T, Warp, kItems>;
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

// ---- wider rows, in shared memory ----

// Targets are read one row ahead, and those of the rows to be loaded, to skip ignored rows.
template <typename T>
__global__ void __launch_bounds__(kWideThreads<T>)
    fused_classifier_forward_wide_kernel(const FusedClassifierForward<T> p, const WideShape shape) {
  using A = accumulate_t<T>;
  using Rows = WideRows<T>;
  Rows rows(shape, p.logits, p.rows, p.width, [&](int64_t row) { return counts(p, read_target(p, row)); });
  const auto checked = [&](int64_t row, int64_t target) {
    if (rows.first_thread()) check_target(p, row, target, "fused_classifier_forward_wide_kernel");
    return static_cast<int>(counts(p, target) ? target : kNone);
  };
  auto target = checked(rows.row(), read_target(p, rows.row()));
  while (rows.more()) {
    rows.wait();
    Classifier<T, int> classifier(p, rows.row(), target);
    const typename Rows::BoundaryColumns boundary_columns = {classifier.vocab_size, target};
    SoftmaxSum<T> sum;
    if (target != kNone) {
      rows.each(-std::numeric_limits<A>::infinity(), boundary_columns, [&](int column, auto& x, auto boundary) {
        if (boundary.value) classifier.leave_others(column, x);
        sum.add(x);
      });
      sum.include_max(classifier.logit);
    }
    const int64_t next = read_target(p, rows.next_row());
    const int64_t loaded_next = read_target(p, rows.loaded_next());
    if (target != kNone) {
      rows.reduce(sum);
      classifier.set_sum(sum.max, sum.total);
      rows.write(p.dlogits, boundary_columns, [&](int column, auto& x, auto boundary) {
        classifier.differentiate(x);
        if (boundary.value) classifier.correct(column, x);
      });
    } else {
      rows.fill(p.dlogits, 0);
    }
    if (rows.first_thread()) p.losses[rows.row()] = classifier.loss();
    target = checked(rows.next_row(), next);
    rows.next(counts(p, loaded_next));
  }
}

// A warp per row while its registers hold it; then shared memory, of a part of an SM or of up to eight; else the simple
// kernel (before sm_90: rows that one SM cannot hold).
template <typename T>
void launch_forward(const FusedClassifierForward<T>& p, Stream stream) {
  const bool aligned = can_vectorize<T>(p.width, p.logits);
  const int64_t items = ceil_div(ceil_div(p.width, kPack<T>) + !aligned, kWarp);
  if (items <= kMaxItems) {
    const unsigned grid = grid_size(ceil_div(p.rows, kWarpRows));
    with_constant<1, kMaxItems>(static_cast<int>(items), [&](auto items) {
      fused_classifier_forward_warp_kernel<T, items.value><<<grid, dim3(kWarp, kWarpRows), 0, stream>>>(p);
    });
  } else if (!launch_wide_rows<T, fused_classifier_forward_wide_kernel<T>>(p, aligned, stream)) {
    if (aligned && can_vectorize<T>(p.width, p.dlogits))
      fused_classifier_forward_simple_kernel<T, kPack<T>><<<grid_size(p.rows), kSimpleThreads, 0, stream>>>(p);
    else
      fused_classifier_forward_simple_kernel<T, 1><<<grid_size(p.rows), kSimpleThreads, 0, stream>>>(p);
  }
}

// ==== backward =======================================================================================================

// Reads and writes dlogits once: 2 * N * Vp * sizeof(T) bytes. A thread issues all its loads before its first store.

constexpr int kBackwardItems = 4;

// Of packs that start in the previous row or end in the next one, only the row's own elements are accessed.
template <typename T>
__global__ void __launch_bounds__(256)
    fused_classifier_backward_kernel(const FusedClassifierBackward<T> p, int segments) {
  using A = accumulate_t<T>;
  constexpr int kVec = kPack<T>;
  using Pack = Packed<T, kVec>;
  const int64_t unit = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t row = segments == 1 ? unit : unit / segments;
  if (row >= p.rows) return;
  if (p.scaled == p.dlogits && !p.dlosses_per_row && *p.dlosses == A(1)) return;  // in place: nothing changes
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

// A block has several rows of up to 1024 packs; a wider row is divided over several blocks.
template <typename T>
void launch_backward(const FusedClassifierBackward<T>& p, Stream stream) {
  const int64_t packs = ceil_div(p.width, kPack<T>) + !can_vectorize<T>(p.width, p.dlogits);
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
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
