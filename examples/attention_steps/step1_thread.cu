// Step 1: a thread per query. It makes three passes over the query's row of the (T, T) scores in global memory: for the
// scores and their maximum, for the exponentials and their sum, and for the weighted sum of the values. The library's
// attention_probabilities also writes this matrix to global memory.
#include "problem.h"

const char* const kStep = "1 a thread per query";

__global__ void attention_thread_kernel(Attention p, float* scores) {
  const int query = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y;
  const bfloat16* q = row_of(p, kQuery, head, query);
  float* row = scores + (int64_t(head) * p.tokens + query) * p.tokens;

  float max = -INFINITY, sum = 0;
  for (int key = 0; key <= query; ++key) {
    const bfloat16* k = row_of(p, kKey, head, key);
    float score = 0;
    for (int c = 0; c < kChannels; ++c) score += float(q[c]) * float(k[c]);
    row[key] = score * kScale;
    max = fmaxf(max, row[key]);
  }

  for (int key = 0; key <= query; ++key) {
    row[key] = expf(row[key] - max);
    sum += row[key];
  }

  float out[kChannels] = {};
  for (int key = 0; key <= query; ++key) {
    const bfloat16* v = row_of(p, kValue, head, key);
    const float probability = row[key] / sum;
    for (int c = 0; c < kChannels; ++c) out[c] += probability * float(v[c]);
  }
  for (int c = 0; c < kChannels; ++c) out_of(p, head, query)[c] = __float2bfloat16(out[c]);
}

void attention(const Attention& p) {
  const int heads = p.batches * p.heads;
  static float* scores = allocate<float>(size_t(heads) * p.tokens * p.tokens);  // 3.2 GB
  attention_thread_kernel<<<dim3(p.tokens / 128, heads), 128>>>(p, scores);
}
