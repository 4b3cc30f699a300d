// Step 3: online softmax. One pass computes maximum and sum, so the row is read twice instead of three times. Shuffles
// replace most barriers.
#include "max_sum.cuh"

const char* const kStep = "3 online softmax";

constexpr int kThreads = 1024;

__global__ void classifier_online_kernel(Classifier p) {
  const int row = blockIdx.x;
  bfloat16* x = p.logits + int64_t(row) * p.width;
  const int target = p.targets[row];
  const float logit = x[target];
  MaxSum m = no_elements();
  for (int i = threadIdx.x; i < p.vocab; i += kThreads) m = merge(m, {float(x[i]), 1});
  m = block_merge(m);
  if (threadIdx.x == 0) p.losses[row] = logf(m.sum) - (logit - m.max);
  const float scale = 1 / m.sum;
  for (int i = threadIdx.x; i < p.width; i += kThreads)
    x[i] = __float2bfloat16(i < p.vocab ? __expf(float(x[i]) - m.max) * scale - (i == target) : 0.f);
}

void classifier(const Classifier& p) {
  classifier_online_kernel<<<p.rows, kThreads>>>(p);
}
