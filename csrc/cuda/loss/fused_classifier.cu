#include "fused_classifier.cuh"

namespace gptkernels::cuda {
namespace {

// A gradient of 0 stays 0 even if dloss is infinite or NaN.
template <typename A>
__device__ A scale_gradient(A d, A dloss) {
  return d == A(0) ? A(0) : d * dloss;
}

template <typename T>
__device__ bool is_no_op(const FusedClassifierBackward<T>& p) {
  return p.scaled == p.dlogits && !p.dlosses_per_row && *p.dlosses == accumulate_t<T>(1);
}

constexpr int kThreads = 128;

// Multiplies the elements i to i + N - 1 of the flat matrix by the dlosses of their rows.
template <int N, typename T>
__device__ void scale(const FusedClassifierBackward<T>& p, int64_t i) {
  const int64_t size = p.rows * p.width;
  int64_t row = 0, row_end = size;
  if (p.dlosses_per_row) {
    row = size >> 32 ? i / p.width : uint32_t(i) / uint32_t(p.width);  // a division of 32 bits takes less time
    row_end = (row + 1) * p.width;
  }
  accumulate_t<T> dloss = p.dlosses[row];
  accumulate_t<T> d[N];
  load_wide<N>(d, p.dlogits + i);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (i + k == row_end) {
      row_end += p.width;
      dloss = p.dlosses[++row];
    }
    d[k] = scale_gradient(d[k], dloss);
  }
  store_narrow<N>(p.scaled + i, d);
}

// A thread block multiplies `run` elements, a multiple of kThreads * kVec; the last one multiplies the rest.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    fused_classifier_backward_kernel(const FusedClassifierBackward<T> p, int64_t run) {
  if (is_no_op(p)) return;
  const int64_t begin = blockIdx.x * run, end = min(begin + run, p.rows * p.width);
  int64_t i = begin + threadIdx.x * kVec;
  for (; i + kVec <= end; i += kThreads * kVec) scale<kVec>(p, i);
  for (; i < end; ++i) scale<1>(p, i);
}

// A thread multiplies up to 8 packs. With one pack per thread, a large matrix would have so many thread blocks that
// even an empty kernel takes long: 0.25 ms on an H200 for 8192 rows of GPT-2's bfloat16 logits. Threads of small
// matrices have as few as 2 packs, so that the SMs finish at the same time.
template <typename T>
void launch_backward(const FusedClassifierBackward<T>& p, Stream stream) {
  with_packs<T>(all_aligned(p.scaled, p.dlogits), [&](auto vec) {
    constexpr int64_t kStep = kThreads * vec.value;
    const int64_t steps = ceil_div(p.rows * p.width, kStep), run = clamp(steps >> 15, 2, 8) * kStep;
    fused_classifier_backward_kernel<T, vec.value>
        <<<grid_size(ceil_div(p.rows * p.width, run)), kThreads, 0, stream>>>(p, run);
  });
}

}  // namespace

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
