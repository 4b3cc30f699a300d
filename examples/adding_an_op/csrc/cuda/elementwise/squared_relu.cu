#include "../../squared_relu.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"

namespace gptkernels::cuda {
namespace {

// One element per thread is correct for any size and alignment. csrc/cuda/elementwise/gelu.cu shows how packs of 16
// bytes make such a kernel fast.
constexpr int kThreads = 256;

// x > 0 ? x : 0 would turn a NaN into 0.
template <typename A>
__device__ A relu(A x) {
  return x < 0 ? A(0) : x;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) squared_relu_forward_simple_kernel(const SquaredReluForward<T> p) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.size) return;
  const auto y = relu(widen(p.x[i]));
  p.out[i] = narrow<T>(y * y);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) squared_relu_backward_simple_kernel(const SquaredReluBackward<T> p) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.size) return;
  p.dx[i] = narrow<T>(widen(p.dout[i]) * (2 * relu(widen(p.x[i]))));
}

}  // namespace

template <typename T>
Status squared_relu_forward(const SquaredReluForward<T>& p, Stream stream) {
  if (p.size == 0) return cudaSuccess;
  squared_relu_forward_simple_kernel<T><<<grid_size(ceil_div(p.size, kThreads)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T>
Status squared_relu_backward(const SquaredReluBackward<T>& p, Stream stream) {
  if (p.size == 0) return cudaSuccess;
  squared_relu_backward_simple_kernel<T><<<grid_size(ceil_div(p.size, kThreads)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                                \
  template Status squared_relu_forward<T>(const SquaredReluForward<T>&, Stream); \
  template Status squared_relu_backward<T>(const SquaredReluBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
