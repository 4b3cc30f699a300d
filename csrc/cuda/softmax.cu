#include "../softmax.h"
#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kMaxItems = 8;

// Reads x once, writes out once: the row stays in registers from its maximum to its quotients.
template <typename T, int kVec, int kItems>
__global__ void __launch_bounds__(kMaxRowThreads<T, kVec, kItems>)
    softmax_forward_registers_kernel(const SoftmaxForward<T> p) {
  using A = accumulate_t<T>;
  const A infinity = A(INFINITY);
  const int64_t stride = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < p.rows; row += stride) {
    A x[kItems][kVec];
    A largest = -infinity;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
        load_wide<kVec>(x[i], p.x + row * p.width + column);
#pragma unroll
        for (int k = 0; k < kVec; ++k) largest = Max{}(largest, x[i][k]);
      }
    }
    largest = row_reduce<Max>(largest, -infinity);
    A total = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
#pragma unroll
        for (int k = 0; k < kVec; ++k) {
          x[i][k] = exp(x[i][k] - largest);
          total += x[i][k];
        }
      }
    }
    total = row_sum(total);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
#pragma unroll
        for (int k = 0; k < kVec; ++k) x[i][k] /= total;
        store_narrow<kVec>(p.out + row * p.width + column, x[i]);
      }
    }
  }
}

// The maximum of what a thread has seen, and the sum of exp(x - maximum).
template <typename A>
struct RunningSum {
  A largest = -A(INFINITY);
  A total = 0;

  template <int kVec>
  __device__ void add(const A (&x)[kVec]) {
    A next = largest;
#pragma unroll
    for (int k = 0; k < kVec; ++k) next = Max{}(next, x[k]);
    if (next == -A(INFINITY)) return;  // nothing but -inf yet: its exponentials are zeros
    total *= exp(largest - next);
#pragma unroll
    for (int k = 0; k < kVec; ++k) total += exp(x[k] - next);
    largest = next;
  }
};

// Rows too wide for registers: a block a row, which reads the row twice, the second time from L2.
template <typename T, int kVec>
__global__ void __launch_bounds__(1024) softmax_forward_wide_kernel(const SoftmaxForward<T> p) {
  using A = accumulate_t<T>;
  const int64_t first = int64_t(threadIdx.x) * kVec;
  const int64_t step = int64_t(blockDim.x) * kVec;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    A x[kVec];
    RunningSum<A> running;
    for (int64_t column = first; column < p.width; column += step) {
      load_wide<kVec>(x, p.x + row * p.width + column);
      running.add(x);
    }
    const A largest = row_reduce<Max>(running.largest, -A(INFINITY));
    const A total = row_sum(running.total * exp(running.largest - largest));
    for (int64_t column = first; column < p.width; column += step) {
      load_wide<kVec>(x, p.x + row * p.width + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) x[k] = exp(x[k] - largest) / total;
      store_narrow<kVec>(p.out + row * p.width + column, x);
    }
  }
}

template <typename T, int kVec>
void launch_forward(const SoftmaxForward<T>& p, Stream stream) {
  const RowShape shape = row_shape<T, kVec, kMaxItems>(p.width);
  const unsigned grid = grid_size(ceil_div(p.rows, shape.block.y));
  if (shape.items == 0) return softmax_forward_wide_kernel<T, kVec><<<grid, shape.block, 0, stream>>>(p);
  with_items<kMaxItems>(shape.items, [&](auto items) {
    softmax_forward_registers_kernel<T, kVec, items.value><<<grid, shape.block, 0, stream>>>(p);
  });
}

// dx = out * (dout - sum(dout * out)): reads dout and out once, writes dx once.
constexpr int kBackwardArrays = 2;  // dout, out

template <typename T, int kVec, int kItems>
__global__ void __launch_bounds__(kMaxRowThreads<T, kVec, kItems, kBackwardArrays>)
    softmax_backward_registers_kernel(const SoftmaxBackward<T> p) {
  using A = accumulate_t<T>;
  const int64_t stride = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < p.rows; row += stride) {
    A dout[kItems][kVec], out[kItems][kVec];
    A dot = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
        load_wide<kVec>(dout[i], p.dout + row * p.width + column);
        load_wide<kVec>(out[i], p.out + row * p.width + column);
#pragma unroll
        for (int k = 0; k < kVec; ++k) dot += dout[i][k] * out[i][k];
      }
    }
    dot = row_sum(dot);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
#pragma unroll
        for (int k = 0; k < kVec; ++k) out[i][k] *= dout[i][k] - dot;
        store_narrow<kVec>(p.dx + row * p.width + column, out[i]);
      }
    }
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(1024) softmax_backward_wide_kernel(const SoftmaxBackward<T> p) {
  using A = accumulate_t<T>;
  const int64_t first = int64_t(threadIdx.x) * kVec;
  const int64_t step = int64_t(blockDim.x) * kVec;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    A dout[kVec], out[kVec];
    A dot = 0;
    for (int64_t column = first; column < p.width; column += step) {
      load_wide<kVec>(dout, p.dout + row * p.width + column);
      load_wide<kVec>(out, p.out + row * p.width + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) dot += dout[k] * out[k];
    }
    dot = row_sum(dot);
    for (int64_t column = first; column < p.width; column += step) {
      load_wide<kVec>(dout, p.dout + row * p.width + column);
      load_wide<kVec>(out, p.out + row * p.width + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) out[k] *= dout[k] - dot;
      store_narrow<kVec>(p.dx + row * p.width + column, out);
    }
  }
}

template <typename T, int kVec>
void launch_backward(const SoftmaxBackward<T>& p, Stream stream) {
  const RowShape shape = row_shape<T, kVec, kMaxItems, kBackwardArrays>(p.width);
  const unsigned grid = grid_size(ceil_div(p.rows, shape.block.y));
  if (shape.items == 0) return softmax_backward_wide_kernel<T, kVec><<<grid, shape.block, 0, stream>>>(p);
  with_items<kMaxItems>(shape.items, [&](auto items) {
    softmax_backward_registers_kernel<T, kVec, items.value><<<grid, shape.block, 0, stream>>>(p);
  });
}

}  // namespace

template <typename T>
Status softmax_forward(const SoftmaxForward<T>& p, Stream stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  if (packs<T>(p.width, p.out, p.x))
    launch_forward<T, kPack<T>>(p, stream);
  else
    launch_forward<T, 1>(p, stream);
  return cudaGetLastError();
}

template <typename T>
Status softmax_backward(const SoftmaxBackward<T>& p, Stream stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  if (packs<T>(p.width, p.dx, p.dout, p.out))
    launch_backward<T, kPack<T>>(p, stream);
  else
    launch_backward<T, 1>(p, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                       \
  template Status softmax_forward<T>(const SoftmaxForward<T>&, Stream); \
  template Status softmax_backward<T>(const SoftmaxBackward<T>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cuda
