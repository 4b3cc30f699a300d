#include "../../normal.h"
#include "../../normal_number.h"
#include "cuda/common/launch.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads) normal_kernel(const NormalNumbers<T> p) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.rows * p.columns) return;
  const int64_t row = at / p.columns;
  const auto index = static_cast<uint64_t>(p.first_index + row * p.row_stride + (at - row * p.columns));
  const PhiloxWords words = philox(p.seed, normal_counter(p.stream, index / kNormalGroup));
  const bool odd = index % kNormalGroup;
  const double z = normal_number(odd ? words.word[2] : words.word[0], odd ? words.word[3] : words.word[1]);
  p.out[at] = static_cast<T>(static_cast<accumulate_t<T>>(p.mean + p.std * z));
}

}  // namespace

template <typename T>
Status normal(const NormalNumbers<T>& p, Stream stream) {
  const int64_t size = p.rows * p.columns;
  if (size == 0) return cudaSuccess;
  normal_kernel<T><<<grid_size(ceil_div(size, kThreads)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T) template Status normal<T>(const NormalNumbers<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
