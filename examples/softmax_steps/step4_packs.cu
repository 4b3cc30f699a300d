// Step 4: one instruction loads or stores a pack of 8 bfloat16 (16 bytes). The sum is rescaled once per pack.
#include "max_sum.cuh"

const char* const kStep = "4 packs of 16 bytes";

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) classifier_packs_kernel(Classifier p) {
  const int row = blockIdx.x;
  bfloat16* x = p.logits + int64_t(row) * kWidth;
  Pack* packs = reinterpret_cast<Pack*>(x);
  const int target = p.targets[row];
  const float logit = x[target];
  MaxSum m = no_elements();
  for (int i = threadIdx.x; i < kPacks; i += kThreads) add_pack(m, packs[i], i * kVec);
  m = block_merge(m);
  if (threadIdx.x == 0) p.losses[row] = logf(m.sum) - (logit - m.max);
  for (int i = threadIdx.x; i < kPacks; i += kThreads) packs[i] = gradients(packs[i], i * kVec, target, m);
}

void classifier(const Classifier& p) {
  classifier_packs_kernel<<<p.rows, kThreads>>>(p);
}
