#include "../layernorm.h"
#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"

namespace gptkernels::cuda {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Forward: reads x once, writes out once; 2 * N * C * sizeof(T) bytes and 8 bytes of statistics a row. A residual is
// read once more, and the sum written: twice those bytes, which is what an addition by itself would take as well.
//
// A float32 mean is off by a rounding, as large as |mean| * 2^-24. The pass for the variance measures that rest too
// (`rest`, the average of x - mean), so that an offset in x costs no digits.

// x, or x + residual rounded to T.
template <int kVec, typename T>
__device__ void load_input(accumulate_t<T> (&x)[kVec], const LayernormForward<T>& p, int64_t i) {
  load_wide<kVec>(x, p.x + i);
  if (p.residual == nullptr) return;
  accumulate_t<T> residual[kVec];
  load_wide<kVec>(residual, p.residual + i);
#pragma unroll
  for (int k = 0; k < kVec; ++k) x[k] = widen(narrow<T>(x[k] + residual[k]));
}

template <typename A>
struct Moments {
  A mean, rest, rstd;
};

template <typename A>
__device__ Moments<A> moments(A mean, A rests, A squares, int64_t width, double eps) {
  const A rest = row_sum(rests) / A(width);
  const A variance = row_sum(squares) / A(width) - rest * rest;
  return {mean, rest, A(1) / sqrt(variance + A(eps))};
}

template <typename T>
__device__ void write_statistics(const LayernormForward<T>& p, int64_t row, const Moments<accumulate_t<T>>& m) {
  if (threadIdx.x != 0) return;
  p.mean[row] = m.mean + m.rest;
  p.rstd[row] = m.rstd;
}

template <typename T, int kVec>
__device__ void normalise(const LayernormForward<T>& p, int64_t column, accumulate_t<T> (&x)[kVec],
                          const Moments<accumulate_t<T>>& m) {
  using A = accumulate_t<T>;
  A weight[kVec], bias[kVec];
  if (p.weight) load_wide<kVec>(weight, p.weight + column);
  if (p.bias) load_wide<kVec>(bias, p.bias + column);
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    const A norm = (x[k] - m.mean - m.rest) * m.rstd;
    x[k] = (p.weight ? norm * weight[k] : norm) + (p.bias ? bias[k] : A(0));
  }
}

// The row stays in registers between the load and the store, so the variance is taken about the mean in a second pass
// that costs no memory traffic.
template <typename T, int kVec, int kItems>
__global__ void __launch_bounds__(kMaxRowThreads<T, kVec, kItems>)
    layernorm_forward_registers_kernel(const LayernormForward<T> p) {
  using A = accumulate_t<T>;
  const int64_t stride = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < p.rows; row += stride) {
    A x[kItems][kVec];
    A sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
        load_input(x[i], p, row * p.width + column);
#pragma unroll
        for (int k = 0; k < kVec; ++k) sum += x[i][k];
      }
    }
    if (p.residual) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
        if (column < p.width) store_narrow<kVec>(p.sum + row * p.width + column, x[i]);
      }
    }
    const A mean = row_sum(sum) / A(p.width);

    A rests = 0;
    A squares = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
#pragma unroll
        for (int k = 0; k < kVec; ++k) {
          rests += x[i][k] - mean;
          squares += (x[i][k] - mean) * (x[i][k] - mean);
        }
      }
    }
    const Moments<A> m = moments(mean, rests, squares, p.width, p.eps);
    write_statistics(p, row, m);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) normalise<T, kVec>(p, column, x[i], m);
    }
    // Apart from the loads of weights: the compiler moves none of them up over a store.
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) store_narrow<kVec>(p.out + row * p.width + column, x[i]);
    }
  }
}

// Rows too wide for registers: a block a row, which reads the row three times, the second and third from L2.
template <typename T, int kVec>
__global__ void __launch_bounds__(1024) layernorm_forward_wide_kernel(const LayernormForward<T> p) {
  using A = accumulate_t<T>;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x_row = (p.residual ? p.sum : p.x) + row * p.width;  // a thread reads what it has written itself
    A x[kVec];
    A sum = 0;
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      load_input(x, p, row * p.width + column);
      if (p.residual) store_narrow<kVec>(p.sum + row * p.width + column, x);
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum += x[k];
    }
    const A mean = row_sum(sum) / A(p.width);

    A rests = 0;
    A squares = 0;
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      load_wide<kVec>(x, x_row + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        rests += x[k] - mean;
        squares += (x[k] - mean) * (x[k] - mean);
      }
    }
    const Moments<A> m = moments(mean, rests, squares, p.width, p.eps);
    write_statistics(p, row, m);
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      load_wide<kVec>(x, x_row + column);
      normalise<T, kVec>(p, column, x, m);
      store_narrow<kVec>(p.out + row * p.width + column, x);
    }
  }
}

template <typename T, int kVec>
void launch_forward(const LayernormForward<T>& p, Stream stream) {
  constexpr int kMaxItems = 8;
  const RowShape shape = row_shape<T, kVec, kMaxItems>(p.width);
  const unsigned grid = grid_size(ceil_div(p.rows, shape.block.y));
  if (shape.items == 0) return layernorm_forward_wide_kernel<T, kVec><<<grid, shape.block, 0, stream>>>(p);
  with_items<kMaxItems>(shape.items, [&](auto items) {
    layernorm_forward_registers_kernel<T, kVec, items.value><<<grid, shape.block, 0, stream>>>(p);
  });
}

// ---------------------------------------------------------------------------------------------------------------
// Backward: reads x and dout once, writes dx once. With g = dout * weight and n = (x - mean) * rstd,
//   dx = rstd * (g - avg(g) - n * avg(g * n)),   dweight = sum over rows of dout * n,   dbias = sum over rows of dout.
// A persistent grid walks over the rows; a thread meets the same columns in every row, so it keeps their part of
// dweight and dbias in registers, and writes it once, as one row of the workspace. A second kernel adds those rows.

// A product rounded by itself: fused into the subtraction of its own average it would leave a rest where there is none.
__device__ float product(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ double product(double a, double b) {
  return __dmul_rn(a, b);
}

// Registers for partial sums and the row in hand bound the items a thread; wider rows take the `wide` kernels.
constexpr int kBackwardMaxItems = 4;
constexpr int kBackwardArrays = 4;  // norm, gradient, dweight, dbias

template <typename T, int kVec, int kItems>
__global__ void __launch_bounds__(kMaxRowThreads<T, kVec, kItems, kBackwardArrays>)
    layernorm_backward_registers_kernel(const LayernormBackward<T> p) {
  using A = accumulate_t<T>;
  A dweight[kItems][kVec] = {};
  A dbias[kItems][kVec] = {};
  const int64_t lane = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t lanes = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = lane; row < p.rows; row += lanes) {
    const A mean = p.mean[row];
    const A rstd = p.rstd[row];
    A norm[kItems][kVec], gradient[kItems][kVec];
    A sum_g = 0;
    A sum_gn = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
        load_wide<kVec>(norm[i], p.x + row * p.width + column);
        load_wide<kVec>(gradient[i], p.dout + row * p.width + column);
        A weight[kVec];
        if (p.weight) load_wide<kVec>(weight, p.weight + column);
#pragma unroll
        for (int k = 0; k < kVec; ++k) {
          norm[i][k] = (norm[i][k] - mean) * rstd;
          dweight[i][k] += gradient[i][k] * norm[i][k];
          dbias[i][k] += gradient[i][k];
          if (p.weight) gradient[i][k] = product(gradient[i][k], weight[k]);
          sum_g += gradient[i][k];
          sum_gn += gradient[i][k] * norm[i][k];
        }
      }
    }
    if (p.dx == nullptr) continue;
    const A avg_g = row_sum(sum_g) / A(p.width);
    const A avg_gn = row_sum(sum_gn) / A(p.width);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
      if (column < p.width) {
        A dresidual[kVec] = {};
        if (p.dresidual) load_wide<kVec>(dresidual, p.dresidual + row * p.width + column);
#pragma unroll
        for (int k = 0; k < kVec; ++k)
          gradient[i][k] = (gradient[i][k] - avg_g - norm[i][k] * avg_gn) * rstd + dresidual[k];
        store_narrow<kVec>(p.dx + row * p.width + column, gradient[i]);
      }
    }
  }
  if (p.workspace == nullptr) return;
  A* partial = static_cast<A*>(p.workspace) + lane * 2 * p.width;  // (lanes, 2, C)
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t column = (int64_t(i) * blockDim.x + threadIdx.x) * kVec;
    if (column < p.width) {
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        partial[column + k] = dweight[i][k];
        partial[p.width + column + k] = dbias[i][k];
      }
    }
  }
}

// dx of rows too wide for registers: a block a row, which reads x and dout twice.
template <typename T, int kVec>
__global__ void __launch_bounds__(1024) layernorm_backward_wide_kernel(const LayernormBackward<T> p) {
  using A = accumulate_t<T>;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const A mean = p.mean[row];
    const A rstd = p.rstd[row];
    A norm[kVec], gradient[kVec], weight[kVec];
    const auto load_columns = [&](int64_t column) {
      load_wide<kVec>(norm, p.x + row * p.width + column);
      load_wide<kVec>(gradient, p.dout + row * p.width + column);
      if (p.weight) load_wide<kVec>(weight, p.weight + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        norm[k] = (norm[k] - mean) * rstd;
        if (p.weight) gradient[k] = product(gradient[k], weight[k]);
      }
    };
    A sum_g = 0;
    A sum_gn = 0;
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      load_columns(column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        sum_g += gradient[k];
        sum_gn += gradient[k] * norm[k];
      }
    }
    const A avg_g = row_sum(sum_g) / A(p.width);
    const A avg_gn = row_sum(sum_gn) / A(p.width);
    for (int64_t column = int64_t(threadIdx.x) * kVec; column < p.width; column += int64_t(blockDim.x) * kVec) {
      load_columns(column);
      A dresidual[kVec] = {};
      if (p.dresidual) load_wide<kVec>(dresidual, p.dresidual + row * p.width + column);
#pragma unroll
      for (int k = 0; k < kVec; ++k) gradient[k] = (gradient[k] - avg_g - norm[k] * avg_gn) * rstd + dresidual[k];
      store_narrow<kVec>(p.dx + row * p.width + column, gradient);
    }
  }
}

// Partial sums of dweight and dbias for wide rows: a thread a column, each block of the grid's y a run of rows.
template <typename T>
__global__ void layernorm_backward_columns_kernel(const LayernormBackward<T> p) {
  using A = accumulate_t<T>;
  const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= p.width) return;
  A dweight = 0;
  A dbias = 0;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const A dout = widen(p.dout[row * p.width + column]);
    dweight += dout * (widen(p.x[row * p.width + column]) - p.mean[row]) * p.rstd[row];
    dbias += dout;
  }
  A* partial = static_cast<A*>(p.workspace) + int64_t(blockIdx.y) * 2 * p.width;  // (gridDim.y, 2, C)
  partial[column] = dweight;
  partial[p.width + column] = dbias;
}

// Adds the workspace's rows, in order: threadIdx.x is a column of the (2 * C) wide workspace, the block's y threads
// take every 8th row, then one of them adds the 8 sums.
constexpr int kSumRows = 8;

template <typename T>
__global__ void layernorm_backward_sum_kernel(const LayernormBackward<T> p, int64_t partials) {
  using A = accumulate_t<T>;
  __shared__ A sums[kSumRows][kWarp];
  const int64_t column = int64_t(blockIdx.x) * kWarp + threadIdx.x;
  const A* partial = static_cast<const A*>(p.workspace);
  A sum = 0;
  if (column < 2 * p.width)
    for (int64_t row = threadIdx.y; row < partials; row += kSumRows) sum += partial[row * 2 * p.width + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= 2 * p.width) return;
  for (int row = 1; row < kSumRows; ++row) sum += sums[row][threadIdx.x];
  T* out = column < p.width ? p.dweight : p.dbias;
  if (out) out[column % p.width] = narrow<T>(sum);
}

// What a backward launches, and so how many rows of partial sums it writes.
struct BackwardShape {
  RowShape row;
  unsigned grid;
  int64_t partials;
};

template <typename T, int kVec>
BackwardShape backward_shape(int64_t rows, int64_t width) {
  constexpr int kBlocksPerMultiprocessor = 4;
  const RowShape row = row_shape<T, kVec, kBackwardMaxItems, kBackwardArrays>(width);
  const int64_t blocks = std::min<int64_t>(ceil_div(rows, row.block.y), kBlocksPerMultiprocessor * multiprocessors());
  const unsigned grid = grid_size(blocks);
  if (row.items) return {row, grid, int64_t(grid) * row.block.y};
  return {row, grid, std::clamp<int64_t>(rows / 16, 1, 64)};
}

template <typename T, int kVec>
void launch_backward(const LayernormBackward<T>& p, Stream stream) {
  const BackwardShape shape = backward_shape<T, kVec>(p.rows, p.width);
  if (shape.row.items) {
    with_items<kBackwardMaxItems>(shape.row.items, [&](auto items) {
      layernorm_backward_registers_kernel<T, kVec, items.value><<<shape.grid, shape.row.block, 0, stream>>>(p);
    });
  } else {
    if (p.dx) layernorm_backward_wide_kernel<T, kVec><<<shape.grid, shape.row.block, 0, stream>>>(p);
    constexpr int kThreads = 128;
    const dim3 grid(grid_size(ceil_div(p.width, kThreads)), static_cast<unsigned>(shape.partials));
    if (p.workspace) layernorm_backward_columns_kernel<T><<<grid, kThreads, 0, stream>>>(p);
  }
  if (p.workspace) {
    const unsigned grid = grid_size(ceil_div(2 * p.width, kWarp));
    layernorm_backward_sum_kernel<T><<<grid, dim3(kWarp, kSumRows), 0, stream>>>(p, shape.partials);
  }
}

}  // namespace

template <typename T>
Status layernorm_forward(const LayernormForward<T>& p, Stream stream) {
  if (p.rows == 0) return cudaSuccess;
  if (packs<T>(p.width, p.out, p.sum, p.x, p.residual, p.weight, p.bias))
    launch_forward<T, kPack<T>>(p, stream);
  else
    launch_forward<T, 1>(p, stream);
  return cudaGetLastError();
}

// The larger of the packed and the unpacked shape's need, since the pointers' alignment is not known yet.
template <typename T>
int64_t layernorm_backward_workspace(int64_t rows, int64_t width) {
  const int64_t partials =
      std::max(backward_shape<T, kPack<T>>(rows, width).partials, backward_shape<T, 1>(rows, width).partials);
  return partials * 2 * width * int64_t(sizeof(accumulate_t<T>));
}

template <typename T>
Status layernorm_backward(const LayernormBackward<T>& p, Stream stream) {
  if (p.width == 0) return cudaSuccess;
  if (packs<T>(p.width, p.dx, p.dout, p.dresidual, p.x, p.weight))
    launch_backward<T, kPack<T>>(p, stream);
  else
    launch_backward<T, 1>(p, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                           \
  template Status layernorm_forward<T>(const LayernormForward<T>&, Stream); \
  template int64_t layernorm_backward_workspace<T>(int64_t, int64_t);       \
  template Status layernorm_backward<T>(const LayernormBackward<T>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cuda
