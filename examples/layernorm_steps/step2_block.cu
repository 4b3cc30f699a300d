// Step 2: a thread block per row. Neighbouring threads read neighbouring elements (coalesced accesses), and add their
// sums in shared memory. The simple kernels for rows in csrc/cuda have this form.
#include "problem.h"

const char* const kStep = "2 a thread block per row";

constexpr int kThreads = 256;

__device__ float block_sum(float value) {
  __shared__ float sums[kThreads];
  __syncthreads();  // all threads have read the previous sum
  sums[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  return sums[0];
}

__global__ void layernorm_block_kernel(Layernorm p) {
  const int row = blockIdx.x;
  const bfloat16* x = p.x + int64_t(row) * p.width;
  bfloat16* out = p.out + int64_t(row) * p.width;
  float sum = 0, squares = 0;
  for (int i = threadIdx.x; i < p.width; i += kThreads) sum += float(x[i]);
  const float mean = block_sum(sum) / p.width;
  for (int i = threadIdx.x; i < p.width; i += kThreads) squares += (float(x[i]) - mean) * (float(x[i]) - mean);
  const float rstd = 1 / sqrtf(block_sum(squares) / p.width + p.eps);
  for (int i = threadIdx.x; i < p.width; i += kThreads)
    out[i] = __float2bfloat16((float(x[i]) - mean) * rstd * float(p.weight[i]) + float(p.bias[i]));
  if (threadIdx.x == 0) p.mean[row] = mean, p.rstd[row] = rstd;
}

void layernorm(const Layernorm& p) {
  layernorm_block_kernel<<<p.rows, kThreads>>>(p);
}
