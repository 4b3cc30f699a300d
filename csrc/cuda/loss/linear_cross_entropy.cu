// One kernel computes the scale of a mean (dloss / the number of targets that are not ignored). Another kernel computes
// the sum of the losses, and multiplies it by the scale. Each kernel has one thread block, because N values are little
// work compared with three matmuls over N rows.
#include "../../linear_cross_entropy.h"
#include "cuda/common/reduce.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kInFlight = 8;

template <typename S, typename Value>
__device__ S sum_over(int64_t n, const Value& value) {
  S sum = 0;
  for (int64_t begin = threadIdx.x; begin < n; begin += kInFlight * kThreads) {
    S found[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = begin + k * kThreads;
      found[k] = i < n ? value(i) : S(0);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) sum += found[k];
  }
  return block_sum(sum);
}

template <typename A, typename Index>
__global__ void __launch_bounds__(kThreads) linear_cross_entropy_mean_scale_kernel(MeanScale<A> p) {
  const Index* targets = static_cast<const Index*>(p.targets);
  const auto is_counted = [&](int64_t i) { return static_cast<long long>(targets[i] != p.ignore_index); };
  const long long rows = sum_over<long long>(p.rows, is_counted);
  if (threadIdx.x != 0) return;
  const A scale = (p.dloss ? *p.dloss : A(1)) / static_cast<A>(rows);
  *p.scale = scale;
  if (p.finite) *p.finite = rows > 0 ? scale : A(0);
}

template <typename A>
__global__ void __launch_bounds__(kThreads) linear_cross_entropy_loss_sum_kernel(LossSum<A> p) {
  const double total = sum_over<double>(p.rows, [&](int64_t i) { return static_cast<double>(p.losses[i]); });
  if (threadIdx.x == 0) *p.loss = static_cast<A>(total * (p.scale ? static_cast<double>(*p.scale) : 1.0));
}

}  // namespace

template <typename A>
Status mean_scale(const MeanScale<A>& p, Stream stream) {
  if (p.targets_are_int64)
    linear_cross_entropy_mean_scale_kernel<A, int64_t><<<1, kThreads, 0, stream>>>(p);
  else
    linear_cross_entropy_mean_scale_kernel<A, int32_t><<<1, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename A>
Status loss_sum(const LossSum<A>& p, Stream stream) {
  linear_cross_entropy_loss_sum_kernel<A><<<1, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(A)                             \
  template Status mean_scale<A>(const MeanScale<A>&, Stream); \
  template Status loss_sum<A>(const LossSum<A>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)

}  // namespace gptkernels::cuda
