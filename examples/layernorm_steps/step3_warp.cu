// Step 3: a warp per row. The row stays in registers, and is read from memory once. Shuffles need no barrier. The
// number of elements per thread must be a constant, because registers can only be indexed by constants.
#include "problem.h"

const char* const kStep = "3 a warp, in registers";

constexpr int kWarps = 8;
constexpr int kElements = kWidth / 32;

__device__ float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  return value;
}

__global__ void layernorm_warp_kernel(Layernorm p) {
  const int row = blockIdx.x * kWarps + threadIdx.y;
  if (row >= p.rows) return;
  const bfloat16* from = p.x + int64_t(row) * kWidth;
  bfloat16* out = p.out + int64_t(row) * kWidth;
  float x[kElements], sum = 0, squares = 0;
  for (int i = 0; i < kElements; ++i) x[i] = float(from[threadIdx.x + i * 32]);
  for (int i = 0; i < kElements; ++i) sum += x[i];
  const float mean = warp_sum(sum) / kWidth;
  for (int i = 0; i < kElements; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const float rstd = rsqrtf(warp_sum(squares) / kWidth + p.eps);
  for (int i = 0; i < kElements; ++i) {
    const int column = threadIdx.x + i * 32;
    out[column] = __float2bfloat16((x[i] - mean) * rstd * float(p.weight[column]) + float(p.bias[column]));
  }
  if (threadIdx.x == 0) p.mean[row] = mean, p.rstd[row] = rstd;
}

void layernorm(const Layernorm& p) {
  layernorm_warp_kernel<<<(p.rows + kWarps - 1) / kWarps, dim3(32, kWarps)>>>(p);
}
