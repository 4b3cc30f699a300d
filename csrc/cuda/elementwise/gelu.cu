// A thread loads kItems packs, kThreads packs apart, before it uses the first. An incomplete last thread block, and
// every thread block if an array is not 16-byte aligned (kVec is 1), accesses single elements.
#include "../../gelu.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "gelu.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 128;

template <typename Form, int N, typename T>
__device__ Packed<T, N> forward_of(const Packed<T, N>& x) {
  accumulate_t<T> out[N];
  widen(out, x);
#pragma unroll
  for (int k = 0; k < N; ++k) out[k] = Form::value(out[k]);
  return narrow<T>(out);
}

template <typename Form, int N, typename T>
__device__ Packed<T, N> backward_of(const Packed<T, N>& x, const Packed<T, N>& dout) {
  accumulate_t<T> x_wide[N], dx[N];
  widen(x_wide, x);
  widen(dx, dout);
#pragma unroll
  for (int k = 0; k < N; ++k) dx[k] *= Form::derivative(x_wide[k]);
  return narrow<T>(dx);
}

template <int kRun, typename Whole, typename One>
__device__ void for_each_run(int64_t size, int pack, const Whole& whole, const One& one) {
  const int64_t begin = int64_t(blockIdx.x) * kThreads * kRun;
  if (begin + kThreads * kRun <= size) return whole(begin + int64_t(threadIdx.x) * pack);
  for (int64_t i = begin + threadIdx.x; i < size; i += kThreads) one(i);
}

template <typename Form, typename T, int kVec, int kItems>
__global__ void __launch_bounds__(kThreads) gelu_forward_packed_kernel(const GeluForward<T> p) {
  constexpr int kStep = kThreads * kVec;
  for_each_run<kVec * kItems>(
      p.size, kVec,
      [&](int64_t i) {
        Packed<T, kVec> x[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) x[j] = load<kVec>(p.x + i + j * kStep);
#pragma unroll
        for (int j = 0; j < kItems; ++j) store(p.out + i + j * kStep, forward_of<Form>(x[j]));
      },
      [&](int64_t i) { store(p.out + i, forward_of<Form>(load<1>(p.x + i))); });
}

template <typename Form, typename T, int kVec, int kItems>
__global__ void __launch_bounds__(kThreads) gelu_backward_packed_kernel(const GeluBackward<T> p) {
  constexpr int kStep = kThreads * kVec;
  for_each_run<kVec * kItems>(
      p.size, kVec,
      [&](int64_t i) {
        Packed<T, kVec> x[kItems], dout[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          x[j] = load<kVec>(p.x + i + j * kStep);
          dout[j] = load<kVec>(p.dout + i + j * kStep);
        }
#pragma unroll
        for (int j = 0; j < kItems; ++j) store(p.dx + i + j * kStep, backward_of<Form>(x[j], dout[j]));
      },
      [&](int64_t i) { store(p.dx + i, backward_of<Form>(load<1>(p.x + i), load<1>(p.dout + i))); });
}

// Small thread blocks that start and end at different times keep reads and writes evenly mixed, so one pack per thread
// is fastest (docs/notes/gelu.md). The forward of the exact GELU in 16 bits uses two packs, because the eight elements
// of a pack take many instructions.
template <typename Form, typename T, int kVec>
constexpr int kForwardItems = 1;
template <typename T, int kVec>
constexpr int kForwardItems<GeluErf<T>, T, kVec> = kSixteenBits<T> ? 2 : 1;

template <typename Form, typename T, int kVec, int kItems = kForwardItems<Form, T, kVec>>
void launch(const GeluForward<T>& p, Stream stream) {
  const unsigned grid = grid_size(ceil_div(p.size, kThreads * kVec * kItems));
  gelu_forward_packed_kernel<Form, T, kVec, kItems><<<grid, kThreads, 0, stream>>>(p);
}

template <typename Form, typename T, int kVec, int kItems = 1>
void launch(const GeluBackward<T>& p, Stream stream) {
  const unsigned grid = grid_size(ceil_div(p.size, kThreads * kVec * kItems));
  gelu_backward_packed_kernel<Form, T, kVec, kItems><<<grid, kThreads, 0, stream>>>(p);
}

template <typename T, int kVec, typename Arguments>
Status launch_form(const Arguments& p, Stream stream) {
  if (p.form == GeluForm::kTanh)
    launch<GeluTanh<T>, T, kVec>(p, stream);
  else
    launch<GeluErf<T>, T, kVec>(p, stream);
  return cudaGetLastError();
}

}  // namespace

template <typename T>
Status gelu_forward(const GeluForward<T>& p, Stream stream) {
  if (p.size == 0) return cudaSuccess;
  return can_vectorize<T>(0, p.out, p.x) ? launch_form<T, kPack<T>>(p, stream) : launch_form<T, 1>(p, stream);
}

template <typename T>
Status gelu_backward(const GeluBackward<T>& p, Stream stream) {
  if (p.size == 0) return cudaSuccess;
  return can_vectorize<T>(0, p.dx, p.dout, p.x) ? launch_form<T, kPack<T>>(p, stream) : launch_form<T, 1>(p, stream);
}

#define GPTKERNELS_INSTANTIATE(T)                                 \
  template Status gelu_forward<T>(const GeluForward<T>&, Stream); \
  template Status gelu_backward<T>(const GeluBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
