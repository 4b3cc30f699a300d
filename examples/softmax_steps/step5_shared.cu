// Step 5: the row stays in shared memory, and is read from global memory once. It has 101 KB, so an SM holds two thread
// blocks. All copies start at once (cp.async), without registers, so that many bytes are in flight. While one thread
// block of an SM computes, the other one loads. A thread reads only packs that it has copied itself, so the read needs
// no barrier.
#include "cuda/ptx/sm80.cuh"
#include "max_sum.cuh"

const char* const kStep = "5 row in shared memory";

constexpr int kThreads = 768;

__global__ void __launch_bounds__(kThreads, 2) classifier_shared_kernel(Classifier p) {
  using namespace gptkernels::cuda;
  extern __shared__ Pack packs[];
  const int row = blockIdx.x;
  bfloat16* x = p.logits + int64_t(row) * kWidth;
  Pack* global = reinterpret_cast<Pack*>(x);
  for (int i = threadIdx.x; i < kPacks; i += kThreads) copy_async_16(shared_window(packs + i), global + i, true);
  const int target = p.targets[row];
  const float logit = x[target];
  copy_async_wait();
  MaxSum m = no_elements();
  for (int i = threadIdx.x; i < kPacks; i += kThreads) add_pack(m, packs[i], i * kVec);
  m = block_merge(m);
  if (threadIdx.x == 0) p.losses[row] = logf(m.sum) - (logit - m.max);
  for (int i = threadIdx.x; i < kPacks; i += kThreads) global[i] = gradients(packs[i], i * kVec, target, m);
}

void classifier(const Classifier& p) {
  constexpr int kBytes = kPacks * sizeof(Pack);
  check(cudaFuncSetAttribute(classifier_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  classifier_shared_kernel<<<p.rows, kThreads, kBytes>>>(p);
}
