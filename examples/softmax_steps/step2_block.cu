// Step 2: a thread block per row. Neighbouring threads read neighbouring elements (coalesced accesses), and combine
// maxima and sums in shared memory.
#include "problem.h"

const char* const kStep = "2 a thread block per row";

constexpr int kThreads = 1024;

template <typename Combine>
__device__ float block_combine(float value, Combine combine) {
  __shared__ float values[kThreads];
  __syncthreads();  // all threads have read the previous result
  values[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) values[threadIdx.x] = combine(values[threadIdx.x], values[threadIdx.x + half]);
  }
  __syncthreads();
  return values[0];
}

__global__ void classifier_block_kernel(Classifier p) {
  const int row = blockIdx.x;
  bfloat16* x = p.logits + int64_t(row) * p.width;
  const int target = p.targets[row];
  const float logit = x[target];  // read before the first barrier, overwritten after it
  float max = -INFINITY, sum = 0;
  for (int i = threadIdx.x; i < p.vocab; i += kThreads) max = fmaxf(max, float(x[i]));
  max = block_combine(max, [](float a, float b) { return fmaxf(a, b); });
  for (int i = threadIdx.x; i < p.vocab; i += kThreads) sum += expf(float(x[i]) - max);
  sum = block_combine(sum, [](float a, float b) { return a + b; });
  if (threadIdx.x == 0) p.losses[row] = logf(sum) - (logit - max);
  for (int i = threadIdx.x; i < p.width; i += kThreads)
    x[i] = __float2bfloat16(i < p.vocab ? expf(float(x[i]) - max) / sum - (i == target) : 0.f);
}

void classifier(const Classifier& p) {
  classifier_block_kernel<<<p.rows, kThreads>>>(p);
}
