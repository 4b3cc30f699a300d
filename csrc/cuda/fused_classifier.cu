#include <cuda_pipeline.h>

#include <limits>

#include "../fused_classifier.h"
#include "assert.cuh"
#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Forward: reads the logits once, writes dlogits once; 2 * N * Vp * sizeof(T) bytes, and a target and a loss a row.
//
// The thread that holds a pack of columns is the only one that writes these, and but for the target's the only one that
// reads them, so dlogits may take the place of the logits. Columns V..Vp count as -inf and are written as 0.
//
// The target's exponential is left out of the sum. `rest` then holds the digits that a confident row's loss and
// gradient consist of, and that its sum, a little more than 1, would have rounded away.

template <typename A>
constexpr A kLowest = -std::numeric_limits<A>::infinity();

// A pack of logits with -inf for the target and for padding.
template <typename T, int kVec>
__device__ void load_others(accumulate_t<T> (&x)[kVec], const T* logits, int64_t column, int64_t target,
                            int64_t vocab_size) {
  load_wide<kVec>(x, logits + column);
  if (column + kVec <= vocab_size && (target < column || target >= column + kVec)) return;
#pragma unroll
  for (int k = 0; k < kVec; ++k)
    if (column + k >= vocab_size || column + k == target) x[k] = kLowest<accumulate_t<T>>;
}

template <typename T, int kVec>
__device__ void store_gradients(T* dlogits, int64_t column, int64_t vocab_size, accumulate_t<T> (&d)[kVec]) {
  if (column + kVec > vocab_size) {
#pragma unroll
    for (int k = 0; k < kVec; ++k)
      if (column + k >= vocab_size) d[k] = 0;
  }
  store_narrow<kVec>(dlogits + column, d);
}

template <typename A, int kVec>
__device__ A max_of(A max, const A (&x)[kVec]) {
#pragma unroll
  for (int k = 0; k < kVec; ++k) max = Max{}(max, x[k]);
  return max;
}

// x = exp(x - max); returns the sum.
template <typename A, int kVec>
__device__ A exponentials(A (&x)[kVec], A max) {
  A sum = 0;
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    x[k] = exp(x[k] - max);
    sum += x[k];
  }
  return sum;
}

template <typename A, int kVec>
__device__ void scale_by(A (&x)[kVec], A factor) {
#pragma unroll
  for (int k = 0; k < kVec; ++k) x[k] *= factor;
}

// A row's target: read before the row is overwritten, brought in when the other columns' sum is known.
template <typename T, int kVec>
class Target {
  using A = accumulate_t<T>;

 public:
  __device__ Target(const FusedClassifierForward<T>& p, int64_t row, const char* kernel) {
    column_ =
        p.targets_are_int64 ? static_cast<const int64_t*>(p.targets)[row] : static_cast<const int32_t*>(p.targets)[row];
    const bool outside = column_ < 0 || column_ >= p.vocab_size;
    ignored_ = outside || column_ == p.ignore_index;
    if (outside && column_ != p.ignore_index && threadIdx.x == 0)
      device_fail(kernel, "a target is outside the vocabulary",
                  "target %lld at row %lld is outside the vocabulary of %lld\n", static_cast<long long>(column_),
                  static_cast<long long>(row), static_cast<long long>(p.vocab_size));
    if (ignored_) return;
    logit_ = widen(p.logits[row * p.width + column_]);
    dloss_ = p.dlosses ? p.dlosses[p.dlosses_per_row ? row : 0] : A(1);
    __syncwarp();  // where the row is one warp's, nothing else keeps its stores behind this load
  }

  __device__ bool ignored() const { return ignored_; }
  __device__ int64_t column() const { return column_; }

  // The largest logit of the row, from that of the other columns.
  __device__ A largest(A of_others) const { return Max{}(of_others, logit_); }

  // What the other columns' exponentials are multiplied by.
  __device__ A scale(A max, A rest) const { return dloss_ / (exp(logit_ - max) + rest); }

  // The thread that has stored the target's column stores it again.
  __device__ void finish(const FusedClassifierForward<T>& p, int64_t row, A max, A rest) const {
    if (column_ / kVec % blockDim.x != threadIdx.x) return;
    const A shifted = logit_ - max;
    const A total = exp(shifted) + rest;
    p.losses[row] = shifted == A(0) ? log1p(rest) : log(total) - shifted;
    p.dlogits[row * p.width + column_] = narrow<T>(-(rest / total) * dloss_);
  }

 private:
  int64_t column_;
  A logit_ = 0;
  A dloss_ = 0;
  bool ignored_;
};

template <int kVec, typename T>
__device__ void write_ignored(const FusedClassifierForward<T>& p, int64_t row) {
  using A = accumulate_t<T>;
  if (threadIdx.x == 0) p.losses[row] = 0;
  const A zeros[kVec] = {};
  for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec)
    store_narrow<kVec>(p.dlogits + row * p.width + column, zeros);
}

// Rows in registers are kept to half of what would fit, so that a multiprocessor holds several blocks, and one loads
// while another stores.
constexpr int kMaxItems = 4;
constexpr int kRowArrays = 2;

// The row stays in registers between the load and the store, and each exponential is taken once.
template <typename T, int kVec, int kItems>
__global__ void __launch_bounds__(kMaxRowThreads<T, kVec, kItems, kRowArrays>)
    fused_classifier_forward_registers_kernel(const FusedClassifierForward<T> p) {
  using A = accumulate_t<T>;
  const int64_t stride = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < p.rows; row += stride) {
    const Target<T, kVec> target(p, row, __func__);
    if (target.ignored()) {
      write_ignored<kVec>(p, row);
      continue;
    }
    A x[kItems][kVec];
    A max = kLowest<A>;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
        load_others<T, kVec>(x[i], p.logits + row * p.width, column, target.column(), p.vocab_size);
        max = max_of(max, x[i]);
      }
    }
    max = target.largest(row_reduce<Max>(max, kLowest<A>));

    A rest = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) rest += exponentials(x[i], max);
    }
    rest = row_sum(rest);

    const A scale = target.scale(max, rest);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
        scale_by(x[i], scale);
        store_gradients<T, kVec>(p.dlogits + row * p.width, column, p.vocab_size, x[i]);
      }
    }
    target.finish(p, row, max, rest);
  }
}

// A pack on its way into shared memory, past the registers: a whole row of loads is in flight at once.
template <int kVec, typename T>
__device__ void copy_to_shared(T* shared, const T* global) {
  constexpr int kBytes = kVec * sizeof(T);
  if constexpr (kBytes >= 4)
    __pipeline_memcpy_async(shared, global, kBytes);
  else
    *shared = *global;
}

// The row stays in shared memory, a block a row; a thread meets its own packs only, so the block waits for nothing but
// the two reductions. The exponentials are taken twice, since shared memory holds no more than the logits' own dtype.
template <typename T, int kVec>
__global__ void __launch_bounds__(1024) fused_classifier_forward_shared_kernel(const FusedClassifierForward<T> p) {
  using A = accumulate_t<T>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* logits = reinterpret_cast<T*>(shared_bytes);  // (Vp)
  const int64_t first = int64_t(threadIdx.x) * kVec;
  const int64_t step = int64_t(blockDim.x) * kVec;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const Target<T, kVec> target(p, row, __func__);
    if (target.ignored()) {
      write_ignored<kVec>(p, row);
      continue;
    }
    for (int64_t column = first; column < p.width; column += step)
      copy_to_shared<kVec>(logits + column, p.logits + row * p.width + column);
    __pipeline_commit();
    __pipeline_wait_prior(0);

    A x[kVec];
    A max = kLowest<A>;
    for (int64_t column = first; column < p.width; column += step) {
      load_others<T, kVec>(x, logits, column, target.column(), p.vocab_size);
      max = max_of(max, x);
    }
    max = target.largest(row_reduce<Max>(max, kLowest<A>));

    A rest = 0;
    for (int64_t column = first; column < p.width; column += step) {
      load_others<T, kVec>(x, logits, column, target.column(), p.vocab_size);
      rest += exponentials(x, max);
    }
    rest = row_sum(rest);

    const A scale = target.scale(max, rest);
    for (int64_t column = first; column < p.width; column += step) {
      load_others<T, kVec>(x, logits, column, target.column(), p.vocab_size);
      exponentials(x, max);
      scale_by(x, scale);
      store_gradients<T, kVec>(p.dlogits + row * p.width, column, p.vocab_size, x);
    }
    target.finish(p, row, max, rest);
  }
}

// Rows too wide for shared memory: a block a row, which reads it twice, the second time from L2. The first pass keeps a
// running maximum and a sum that is rescaled whenever the maximum grows.
template <typename T, int kVec>
__global__ void __launch_bounds__(1024) fused_classifier_forward_wide_kernel(const FusedClassifierForward<T> p) {
  using A = accumulate_t<T>;
  const int64_t first = int64_t(threadIdx.x) * kVec;
  const int64_t step = int64_t(blockDim.x) * kVec;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const Target<T, kVec> target(p, row, __func__);
    if (target.ignored()) {
      write_ignored<kVec>(p, row);
      continue;
    }
    A x[kVec];
    A own_max = kLowest<A>;
    A own_sum = 0;
    for (int64_t column = first; column < p.width; column += step) {
      load_others<T, kVec>(x, p.logits + row * p.width, column, target.column(), p.vocab_size);
      const A pack_max = max_of(kLowest<A>, x);
      if (pack_max > own_max) {
        own_sum *= exp(own_max - pack_max);
        own_max = pack_max;
      }
      own_sum += exponentials(x, own_max == kLowest<A> ? A(0) : own_max);  // -inf - -inf would be no number
    }
    const A max = target.largest(row_reduce<Max>(own_max, kLowest<A>));
    const A rest = row_sum(own_sum == A(0) ? A(0) : own_sum * exp(own_max - max));

    const A scale = target.scale(max, rest);
    for (int64_t column = first; column < p.width; column += step) {
      load_others<T, kVec>(x, p.logits + row * p.width, column, target.column(), p.vocab_size);
      exponentials(x, max);
      scale_by(x, scale);
      store_gradients<T, kVec>(p.dlogits + row * p.width, column, p.vocab_size, x);
    }
    target.finish(p, row, max, rest);
  }
}

// Where a row is kept between its load and its store: registers, else shared memory, else nowhere. A row that takes
// more than half of a multiprocessor's shared memory is alone there and gets all the threads a block may have.
template <typename T, int kVec>
void launch_forward(const FusedClassifierForward<T>& p, Stream stream) {
  const RowShape shape = row_shape<T, kVec, kMaxItems, kRowArrays>(p.width);
  if (shape.items) {
    const unsigned grid = grid_size(ceil_div(p.rows, shape.block.y));
    return with_items<kMaxItems>(shape.items, [&](auto items) {
      fused_classifier_forward_registers_kernel<T, kVec, items.value><<<grid, shape.block, 0, stream>>>(p);
    });
  }
  const unsigned grid = grid_size(p.rows);
  const int64_t row_bytes = p.width * int64_t(sizeof(T));
  const int64_t shared_bytes = max_dynamic_shared_memory<fused_classifier_forward_shared_kernel<T, kVec>>();
  if (row_bytes <= shared_bytes) {
    const int threads = row_bytes <= shared_bytes / 2 ? 512 : 1024;
    fused_classifier_forward_shared_kernel<T, kVec><<<grid, threads, row_bytes, stream>>>(p);
  } else {
    fused_classifier_forward_wide_kernel<T, kVec><<<grid, 1024, 0, stream>>>(p);
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Backward: reads and writes dlogits once.

template <typename T, int kVec>
__global__ void __launch_bounds__(1024) fused_classifier_backward_rows_kernel(const FusedClassifierBackward<T> p) {
  using A = accumulate_t<T>;
  const int64_t stride = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < p.rows; row += stride) {
    const A dloss = p.dlosses[p.dlosses_per_row ? row : 0];
#pragma unroll 4
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      A d[kVec];
      load_wide<kVec>(d, p.dlogits + row * p.width + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) d[k] = d[k] == A(0) ? A(0) : d[k] * dloss;
      store_narrow<kVec>(p.scaled + row * p.width + column, d);
    }
  }
}

template <typename T, int kVec>
void launch_backward(const FusedClassifierBackward<T>& p, Stream stream) {
  const RowShape shape = row_shape<T, kVec, kMaxItems>(p.width);
  const unsigned grid = grid_size(ceil_div(p.rows, shape.block.y));
  fused_classifier_backward_rows_kernel<T, kVec><<<grid, shape.block, 0, stream>>>(p);
}

}  // namespace

template <typename T>
Status fused_classifier_forward(const FusedClassifierForward<T>& p, Stream stream) {
  if (p.rows == 0) return cudaSuccess;
  if (packs<T>(p.width, p.dlogits, p.logits))
    launch_forward<T, kPack<T>>(p, stream);
  else
    launch_forward<T, 1>(p, stream);
  return cudaGetLastError();
}

template <typename T>
Status fused_classifier_backward(const FusedClassifierBackward<T>& p, Stream stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  if (packs<T>(p.width, p.scaled, p.dlogits))
    launch_backward<T, kPack<T>>(p, stream);
  else
    launch_backward<T, 1>(p, stream);
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
