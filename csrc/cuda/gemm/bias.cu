#include "../../device.h"
#include "bias.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"

namespace gptkernels::cuda {
namespace {

template <typename T, int kVec>
__global__ void matmul_bias_kernel(T* out, const T* bias, int64_t rows, int64_t columns, int64_t ld) {
  const int64_t column = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kVec;
  if (column >= columns) return;
  const Packed<T, kVec> b = load<kVec>(bias + column);
  const int64_t stride = int64_t(gridDim.y) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += stride)
    store<kVec>(out + row * ld + column, b);
}

template <typename T, int kVec>
void launch(T* out, const T* bias, int64_t rows, int64_t columns, int64_t ld, Stream stream) {
  constexpr int kRows = 8;
  constexpr int64_t kMaxRuns = 4096;
  const int64_t runs = clamp(ceil_div(rows, 4 * kRows), 1, kMaxRuns);
  const dim3 grid(grid_size(ceil_div(columns, kWarp * kVec)), static_cast<unsigned>(runs));
  matmul_bias_kernel<T, kVec><<<grid, dim3(kWarp, kRows), 0, stream>>>(out, bias, rows, columns, ld);
}

}  // namespace

template <typename T>
Status write_bias(T* out, const T* bias, int64_t rows, int64_t columns, int64_t ld, Stream stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  if (can_vectorize<T>(columns, out, bias) && ld % kPack<T> == 0)
    launch<T, kPack<T>>(out, bias, rows, columns, ld, stream);
  else
    launch<T, 1>(out, bias, rows, columns, ld, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T) template Status write_bias<T>(T*, const T*, int64_t, int64_t, int64_t, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
