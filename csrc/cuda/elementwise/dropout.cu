#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "dropout.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 128;

template <int N, typename T>
__device__ void drop(const DropoutForward<T>& p, const DenseDropoutDraw<accumulate_t<T>>& draw, int64_t i) {
  accumulate_t<T> x[N];
  load_wide<N>(x, p.x + i);
  draw.apply(x, i);
  store_narrow<N>(p.out + i, x);
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    dropout_forward_packed_kernel(const DropoutForward<T> p, const DenseDropout<accumulate_t<T>> dropout) {
  const auto draw = dropout.draw();
  int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  if (i + kVec <= p.size) return drop<kVec>(p, draw, i);
  for (; i < p.size; ++i) drop<1>(p, draw, i);
}

template <typename T, int kVec>
void launch(const DropoutForward<T>& p, Stream stream) {
  const unsigned grid = grid_size(ceil_div(p.size, kThreads * kVec));
  dropout_forward_packed_kernel<T, kVec><<<grid, kThreads, 0, stream>>>(p, DenseDropout<accumulate_t<T>>(p.arguments));
}

__global__ void __launch_bounds__(kThreads) dropout_mask_kernel(bool* mask, int64_t size, DenseDropout<float> dropout) {
  const auto draw = dropout.draw();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  float kept[1] = {1};
  if (i >= size) return;
  draw.apply(kept, i);
  mask[i] = kept[0] != 0;
}

}  // namespace

template <typename T>
Status dropout_forward(const DropoutForward<T>& p, Stream stream) {
  if (p.size == 0) return cudaSuccess;
  can_vectorize<T>(0, p.out, p.x) ? launch<T, kPack<T>>(p, stream) : launch<T, 1>(p, stream);
  return cudaGetLastError();
}

Status dropout_mask(bool* mask, int64_t size, const DropoutArguments& arguments, Stream stream) {
  if (size == 0) return cudaSuccess;
  dropout_mask_kernel<<<grid_size(ceil_div(size, kThreads)), kThreads, 0, stream>>>(mask, size,
                                                                                    DenseDropout<float>(arguments));
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T) template Status dropout_forward<T>(const DropoutForward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
