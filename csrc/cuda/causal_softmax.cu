#include "../causal_softmax.h"
#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {
namespace {

// Both directions write whole rows but read no pack that lies above the diagonal: on average half of each input. In the
// pack that the diagonal cuts, what is above it is replaced before it is used.

constexpr int kMaxItems = 8;

// Row `row` of all matrices' rows is row t of its matrix, with t + 1 columns up to the diagonal.
__device__ inline int64_t columns_of(int64_t row, int64_t tokens) {
  return row % tokens + 1;
}

template <int kVec, typename T>
__device__ void load_below(accumulate_t<T> (&x)[kVec], const T* p, int64_t column, int64_t columns,
                           accumulate_t<T> above) {
  if (column < columns) load_wide<kVec>(x, p + column);
#pragma unroll
  for (int k = 0; k < kVec; ++k)
    if (column + k >= columns) x[k] = above;
}

template <typename T, int kVec, int kItems>
__global__ void __launch_bounds__(kMaxRowThreads<T, kVec, kItems>)
    causal_softmax_forward_registers_kernel(const CausalSoftmaxForward<T> p) {
  using A = accumulate_t<T>;
  const A infinity = A(INFINITY);
  const int64_t rows = p.matrices * p.tokens;
  const int64_t stride = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += stride) {
    const int64_t columns = columns_of(row, p.tokens);
    A x[kItems][kVec];
    A largest = -infinity;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      load_below<kVec>(x[i], p.scores + row * p.tokens, column, columns, -infinity);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        if (column + k < columns) x[i][k] *= A(p.scale);
        largest = Max{}(largest, x[i][k]);
      }
    }
    largest = row_reduce<Max>(largest, -infinity);
    A total = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        x[i][k] = column + k < columns ? exp(x[i][k] - largest) : A(0);
        total += x[i][k];
      }
    }
    total = row_sum(total);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column >= p.tokens) continue;
#pragma unroll
      for (int k = 0; k < kVec; ++k) x[i][k] = column + k < columns ? x[i][k] / total : A(0);
      store_narrow<kVec>(p.out + row * p.tokens + column, x[i]);
    }
  }
}

// Rows too wide for registers: a block a row, which reads the row three times, the second and third from L2.
template <typename T, int kVec>
__global__ void __launch_bounds__(1024) causal_softmax_forward_wide_kernel(const CausalSoftmaxForward<T> p) {
  using A = accumulate_t<T>;
  const A infinity = A(INFINITY);
  const int64_t first = int64_t(threadIdx.x) * kVec;
  const int64_t step = int64_t(blockDim.x) * kVec;
  for (int64_t row = blockIdx.x; row < p.matrices * p.tokens; row += gridDim.x) {
    const int64_t columns = columns_of(row, p.tokens);
    const T* scores = p.scores + row * p.tokens;
    A x[kVec];
    A largest = -infinity;
    for (int64_t column = first; column < columns; column += step) {
      load_below<kVec>(x, scores, column, columns, -infinity);
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        if (column + k < columns) largest = Max{}(largest, x[k] * A(p.scale));
    }
    largest = row_reduce<Max>(largest, -infinity);
    A total = 0;
    for (int64_t column = first; column < columns; column += step) {
      load_below<kVec>(x, scores, column, columns, -infinity);
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        if (column + k < columns) total += exp(x[k] * A(p.scale) - largest);
    }
    total = row_sum(total);
    for (int64_t column = first; column < p.tokens; column += step) {
      load_below<kVec>(x, scores, column, columns, -infinity);
#pragma unroll
      for (int k = 0; k < kVec; ++k) x[k] = column + k < columns ? exp(x[k] * A(p.scale) - largest) / total : A(0);
      store_narrow<kVec>(p.out + row * p.tokens + column, x);
    }
  }
}

template <typename T, int kVec>
void launch_forward(const CausalSoftmaxForward<T>& p, Stream stream) {
  const RowShape shape = row_shape<T, kVec, kMaxItems>(p.tokens);
  const unsigned grid = grid_size(ceil_div(p.matrices * p.tokens, shape.block.y));
  if (shape.items == 0) return causal_softmax_forward_wide_kernel<T, kVec><<<grid, shape.block, 0, stream>>>(p);
  with_items<kMaxItems>(shape.items, [&](auto items) {
    causal_softmax_forward_registers_kernel<T, kVec, items.value><<<grid, shape.block, 0, stream>>>(p);
  });
}

// dscores = scale * out * (dout - sum(dout * out)), from registers.
constexpr int kBackwardArrays = 2;  // dout, out

template <typename T, int kVec, int kItems>
__global__ void __launch_bounds__(kMaxRowThreads<T, kVec, kItems, kBackwardArrays>)
    causal_softmax_backward_registers_kernel(const CausalSoftmaxBackward<T> p) {
  using A = accumulate_t<T>;
  const int64_t rows = p.matrices * p.tokens;
  const int64_t stride = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += stride) {
    const int64_t columns = columns_of(row, p.tokens);
    A dout[kItems][kVec], out[kItems][kVec];
    A dot = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      load_below<kVec>(dout[i], p.dout + row * p.tokens, column, columns, A(0));
      load_below<kVec>(out[i], p.out + row * p.tokens, column, columns, A(0));
#pragma unroll
      for (int k = 0; k < kVec; ++k) dot += dout[i][k] * out[i][k];
    }
    dot = row_sum(dot);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column >= p.tokens) continue;
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        out[i][k] = column + k < columns ? out[i][k] * (dout[i][k] - dot) * A(p.scale) : A(0);
      store_narrow<kVec>(p.dscores + row * p.tokens + column, out[i]);
    }
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(1024) causal_softmax_backward_wide_kernel(const CausalSoftmaxBackward<T> p) {
  using A = accumulate_t<T>;
  const int64_t first = int64_t(threadIdx.x) * kVec;
  const int64_t step = int64_t(blockDim.x) * kVec;
  for (int64_t row = blockIdx.x; row < p.matrices * p.tokens; row += gridDim.x) {
    const int64_t columns = columns_of(row, p.tokens);
    A dout[kVec], out[kVec];
    A dot = 0;
    for (int64_t column = first; column < columns; column += step) {
      load_below<kVec>(dout, p.dout + row * p.tokens, column, columns, A(0));
      load_below<kVec>(out, p.out + row * p.tokens, column, columns, A(0));
#pragma unroll
      for (int k = 0; k < kVec; ++k) dot += dout[k] * out[k];
    }
    dot = row_sum(dot);
    for (int64_t column = first; column < p.tokens; column += step) {
      load_below<kVec>(dout, p.dout + row * p.tokens, column, columns, A(0));
      load_below<kVec>(out, p.out + row * p.tokens, column, columns, A(0));
#pragma unroll
      for (int k = 0; k < kVec; ++k) out[k] = column + k < columns ? out[k] * (dout[k] - dot) * A(p.scale) : A(0);
      store_narrow<kVec>(p.dscores + row * p.tokens + column, out);
    }
  }
}

template <typename T, int kVec>
void launch_backward(const CausalSoftmaxBackward<T>& p, Stream stream) {
  const RowShape shape = row_shape<T, kVec, kMaxItems, kBackwardArrays>(p.tokens);
  const unsigned grid = grid_size(ceil_div(p.matrices * p.tokens, shape.block.y));
  if (shape.items == 0) return causal_softmax_backward_wide_kernel<T, kVec><<<grid, shape.block, 0, stream>>>(p);
  with_items<kMaxItems>(shape.items, [&](auto items) {
    causal_softmax_backward_registers_kernel<T, kVec, items.value><<<grid, shape.block, 0, stream>>>(p);
  });
}

}  // namespace

template <typename T>
Status causal_softmax_forward(const CausalSoftmaxForward<T>& p, Stream stream) {
  if (p.matrices * p.tokens == 0) return cudaSuccess;
  if (packs<T>(p.tokens, p.out, p.scores))
    launch_forward<T, kPack<T>>(p, stream);
  else
    launch_forward<T, 1>(p, stream);
  return cudaGetLastError();
}

template <typename T>
Status causal_softmax_backward(const CausalSoftmaxBackward<T>& p, Stream stream) {
  if (p.matrices * p.tokens == 0) return cudaSuccess;
  if (packs<T>(p.tokens, p.dscores, p.dout, p.out))
    launch_backward<T, kPack<T>>(p, stream);
  else
    launch_backward<T, 1>(p, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                                    \
  template Status causal_softmax_forward<T>(const CausalSoftmaxForward<T>&, Stream); \
  template Status causal_softmax_backward<T>(const CausalSoftmaxBackward<T>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cuda
