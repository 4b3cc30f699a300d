#include "../gelu.h"
#include "gelu.cuh"
#include "launch.cuh"
#include "packed.cuh"

namespace gptkernels::cuda {
namespace {

// Elementwise over flat memory, a pack of kVec elements at a time: forward moves 2 * size * sizeof(T) bytes,
// backward 3. One thread finishes what is left when kVec does not divide the size. Outputs may be inputs: a thread has
// read its elements before it writes them, and no pointer is promised to be the only one.

constexpr int kThreads = 256;

template <typename Form, int N, typename T>
__device__ void forward_at(const GeluForward<T>& p, int64_t i) {
  accumulate_t<T> x[N];
  load_wide<N>(x, p.x + i);
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = Form::value(x[k]);
  store_narrow<N>(p.out + i, x);
}

template <typename Form, typename T, int kVec>
__global__ void __launch_bounds__(kThreads) gelu_forward_packed_kernel(const GeluForward<T> p) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x * kVec;
  for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kVec; i < p.size; i += stride) {
    if (i + kVec <= p.size)
      forward_at<Form, kVec>(p, i);
    else
      for (int64_t rest = i; rest < p.size; ++rest) forward_at<Form, 1>(p, rest);
  }
}

template <typename Form, int N, typename T>
__device__ void backward_at(const GeluBackward<T>& p, int64_t i) {
  accumulate_t<T> x[N], dout[N];
  load_wide<N>(x, p.x + i);
  load_wide<N>(dout, p.dout + i);
#pragma unroll
  for (int k = 0; k < N; ++k) dout[k] *= Form::derivative(x[k]);
  store_narrow<N>(p.dx + i, dout);
}

template <typename Form, typename T, int kVec>
__global__ void __launch_bounds__(kThreads) gelu_backward_packed_kernel(const GeluBackward<T> p) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x * kVec;
  for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kVec; i < p.size; i += stride) {
    if (i + kVec <= p.size)
      backward_at<Form, kVec>(p, i);
    else
      for (int64_t rest = i; rest < p.size; ++rest) backward_at<Form, 1>(p, rest);
  }
}

unsigned grid(int64_t size, int vec) {
  return grid_size(ceil_div(ceil_div(size, vec), kThreads));
}

template <typename Form, typename T>
Status launch_forward(const GeluForward<T>& p, Stream stream) {
  if (packs<T>(0, p.out, p.x))
    gelu_forward_packed_kernel<Form, T, kPack<T>><<<grid(p.size, kPack<T>), kThreads, 0, stream>>>(p);
  else
    gelu_forward_packed_kernel<Form, T, 1><<<grid(p.size, 1), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename Form, typename T>
Status launch_backward(const GeluBackward<T>& p, Stream stream) {
  if (packs<T>(0, p.dx, p.dout, p.x))
    gelu_backward_packed_kernel<Form, T, kPack<T>><<<grid(p.size, kPack<T>), kThreads, 0, stream>>>(p);
  else
    gelu_backward_packed_kernel<Form, T, 1><<<grid(p.size, 1), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

template <typename T>
Status gelu_forward(const GeluForward<T>& p, Stream stream) {
  if (p.size == 0) return cudaSuccess;
  return p.form == GeluForm::kTanh ? launch_forward<GeluTanh>(p, stream) : launch_forward<GeluErf>(p, stream);
}

template <typename T>
Status gelu_backward(const GeluBackward<T>& p, Stream stream) {
  if (p.size == 0) return cudaSuccess;
  return p.form == GeluForm::kTanh ? launch_backward<GeluTanh>(p, stream) : launch_backward<GeluErf>(p, stream);
}

#define GPTKERNELS_INSTANTIATE(T)                                 \
  template Status gelu_forward<T>(const GeluForward<T>&, Stream); \
  template Status gelu_backward<T>(const GeluBackward<T>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cuda
