// Step 1: a thread per row, as one would write it in C. It makes three passes over the row: for the maximum, without
// which an exponential could overflow, for the sum of the exponentials, and for the gradients.
#include "problem.h"

const char* const kStep = "1 a thread per row";

__global__ void classifier_thread_kernel(Classifier p) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= p.rows) return;
  bfloat16* x = p.logits + int64_t(row) * p.width;
  const int target = p.targets[row];
  float max = -INFINITY, sum = 0;
  for (int i = 0; i < p.vocab; ++i) max = fmaxf(max, float(x[i]));
  for (int i = 0; i < p.vocab; ++i) sum += expf(float(x[i]) - max);
  p.losses[row] = logf(sum) - (float(x[target]) - max);
  for (int i = 0; i < p.width; ++i)
    x[i] = __float2bfloat16(i < p.vocab ? expf(float(x[i]) - max) / sum - (i == target) : 0.f);
}

void classifier(const Classifier& p) {
  classifier_thread_kernel<<<(p.rows + 31) / 32, 32>>>(p);
}
