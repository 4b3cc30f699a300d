// The arithmetic of the backward kernels for sm_90a: operands, matmuls, and the gradient of the softmax. Notation: S
// are the scores, P the probabilities, g is the gradient of out, D = sum(g * out) - dlogsumexp for each query, and v'
// is the transpose of v.
//
// A warpgroup holds 64 x 64 scores in registers: a thread holds 16 columns of two rows, `row` and row + 8
// (cuda/ptx/wgmma.cuh). In the kernels for dq, rows are queries and columns are keys. In the kernels for dk and dv,
// rows are keys and columns are queries.
#pragma once

#include "backward.cuh"

namespace gptkernels::cuda {

#if GPTKERNELS_WGMMA

// ---- operands and results -------------------------------------------------------------------------------------------

// Loads a warp's 16 rows of a panel of 64 columns as A operands.
__device__ inline void load_a(uint32_t* a, uint32_t panel, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    load_matrices(*reinterpret_cast<uint32_t (*)[4]>(a + 4 * i),
                  panel + panel_offset(row + lane % 16, 2 * i + lane / 16));
}

// Multiplies the 64 rows that a warpgroup holds in registers by `factor`, rounds them, and stores them to panels in
// shared memory. The panels are `panel_bytes` apart.
template <typename T, int n>
__device__ void stage_tile(const float (&tile)[n], float factor, uint32_t shared, uint32_t panel_bytes) {
  const int warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < n / 8; ++i) {
    const float* t = &tile[8 * i];
    store_matrices(shared + i / 4 * panel_bytes + panel_offset(warp * 16 + lane % 16, i % 4 * 2 + lane / 16),
                   pack_pair<T>(t[0] * factor, t[1] * factor), pack_pair<T>(t[2] * factor, t[3] * factor),
                   pack_pair<T>(t[4] * factor, t[5] * factor), pack_pair<T>(t[6] * factor, t[7] * factor));
  }
}

__device__ inline float2 load_shared_pair(uint32_t shared) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(shared) : "memory");
  return pair;
}

// ---- matmuls --------------------------------------------------------------------------------------------------------

// Starts the matmul d = a b', where a (64 x 4n) is in registers and b (64 x 4n) in shared memory.
template <typename T, int n>
__device__ void multiply(float (&d)[32], const uint32_t (&a)[n], uint32_t b) {
  const uint64_t block = panel_descriptor(b);
  pin_registers(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < n / 4; ++i)
    wgmma<T, false>(d, &a[4 * i], block + (i / 4 * (kBlockPanel >> 4) + i % 4 * kStepK), i > 0);
  wgmma_commit();
}

// Starts the matmul d = a b', where a and b (64 x HS) are in shared memory. `rows` is the descriptor of a, which is 64
// rows of a tile.
template <typename T, int HS>
__device__ void multiply(float (&d)[32], uint64_t rows, uint32_t b) {
  const uint64_t block = panel_descriptor(b);
  pin_registers(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < HS / 16; ++i)
    wgmma<T, false>(d, rows + (i / 4 * (kRowPanel >> 4) + i % 4 * kStepK),
                    block + (i / 4 * (kBlockPanel >> 4) + i % 4 * kStepK), i > 0);
  wgmma_commit();
}

// Starts the matmul d += a b, or d = a b if not `accumulate`, where a (64 x 64) is in registers and b (64 x 2n) in
// shared memory.
template <typename T, int n>
__device__ void multiply_add(float (&d)[n], uint32_t (&a)[16], uint32_t b, bool accumulate) {
  const uint64_t block = n == 32 ? panel_descriptor(b) : panel_descriptor(b, kBlockPanel);
  pin_registers(a);
  pin_registers(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma<T, true>(d, &a[4 * i], block + i * kStepRows, i > 0 || accumulate);
  wgmma_commit();
}

// ---- probabilities --------------------------------------------------------------------------------------------------
//
// P = exp(scale S - logsumexp) = 2^(S * scale_log2 + bias), where bias = -logsumexp * log2(e) of the query.

// Replaces scores, whose rows are queries, by probabilities.
template <int n>
__device__ void probabilities_of_rows(float (&scores)[n], float scale_log2, const float (&bias)[2]) {
  float last = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) scores[i] = exp2_approximately(fmaf(scores[i], scale_log2, bias[i / 2 % 2]));
#pragma unroll
  for (int i = 0; i < n; i += 8) last = fmaxf(last, scores[i + 7]);
  complete(last);
}

// Replaces scores, whose columns are queries, by probabilities. The biases of the queries are in shared memory.
__device__ inline void probabilities_of_columns(float (&scores)[32], float scale_log2, uint32_t bias) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 of = load_shared_pair(bias + (8 * i + 2 * (threadIdx.x % 4)) * 4);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      scores[4 * i + c] = exp2_approximately(fmaf(scores[4 * i + c], scale_log2, c % 2 ? of.y : of.x));
  }
}

// ---- dropout --------------------------------------------------------------------------------------------------------
//
// Let p be the dropout probability, and M the dropout mask, whose elements are 0 or 1 / (1 - p) and multiply the
// elements of g v'. Then dS = P (M g v' - D). The kernels compute (1 - p) dS from (1 - p) D, and multiply dq, dk and dv
// by last_factor(), which divides by 1 - p. Until dS is computed, a dropped element of P is marked by its sign bit.

struct MarkDropped {
  float (&weights)[32];

  __device__ explicit MarkDropped(float (&w)[32]) : weights(w) {}
  __device__ void operator()(int i, bool keep, bool keep_next) const {
    if (!keep) weights[i] = -weights[i];
    if (!keep_next) weights[i + 1] = -weights[i + 1];
  }
};

// Packs P as A operands of matmuls. A dropped element of P becomes 0.
template <bool kDropout, typename T>
__device__ void weights_to_a(uint32_t (&a)[16], const float (&weights)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float low = weights[2 * i], high = weights[2 * i + 1];
    a[i] = kDropout ? pack_positive<T>(low, high) : pack_pair<T>(low, high);
  }
}

template <bool kDropout, typename T>
__device__ float last_factor(const Sm90Backward<T>& p, float factor) {
  return kDropout ? factor / keep_probability(p.problem) : factor;
}

// ---- the gradient of the softmax ------------------------------------------------------------------------------------

template <bool kDropout>
__device__ float score_gradient(float weight, float dp, float delta) {
  if constexpr (!kDropout) return weight * (dp - delta);
  return fmaf(fmaxf(weight, 0), dp, -fabsf(weight) * delta);
}

// Replaces dP, whose rows are queries, by dS.
template <bool kDropout>
__device__ void score_gradients_of_rows(float (&dp)[32], const float (&weights)[32], const float (&delta)[2]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) dp[i] = score_gradient<kDropout>(weights[i], dp[i], delta[i / 2 % 2]);
}

// Replaces dP, whose columns are queries, by dS. D of the queries is in shared memory.
template <bool kDropout>
__device__ void score_gradients_of_columns(float (&dp)[32], const float (&weights)[32], uint32_t delta) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 of = load_shared_pair(delta + (8 * i + 2 * (threadIdx.x % 4)) * 4);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      dp[4 * i + c] = score_gradient<kDropout>(weights[4 * i + c], dp[4 * i + c], c % 2 ? of.y : of.x);
  }
}

// ---- statistics of queries ------------------------------------------------------------------------------------------

// Adds to `delta` this thread's terms of sum(dout * out) of its two rows. `out` and `dout` are the A operands of a
// panel.
template <typename T>
__device__ void add_products(float (&delta)[2], const uint32_t* out, const uint32_t* dout) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 a = unpack_pair<T>(out[i]), b = unpack_pair<T>(dout[i]);
    delta[i % 2] += a.x * b.x + a.y * b.y;
  }
}

// Computes two statistics of each of a thread's two queries: the bias of the exponent, -logsumexp * log2(e), or
// shifted_bias() in a row with a shift; and D = sum(dout * out) - dlogsumexp, or (1 - p) D with dropout. load() starts
// the loads from global memory, long before finish() uses the values.
template <typename T, typename Mask>
struct RowStatistics {
  float logsumexp[2], dlogsumexp[2];
  MaskRow mask[2];

  __device__ void load(const Sm90Backward<T>& p, int head, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row + 8 * r;
      const int64_t index = static_cast<int64_t>(head) * p.problem.queries + query;
      const bool inside = query < p.problem.queries;
      logsumexp[r] = inside ? p.logsumexp[index] : -INFINITY;
      dlogsumexp[r] = inside && p.dlogsumexp ? p.dlogsumexp[index] : 0;
      if constexpr (Mask::kAdds) mask[r] = p.mask.blocks.row(p.mask_head(head), min(query, p.problem.queries - 1));
    }
  }

  // On entry `delta` holds the sums of add_products(). Replaces `delta` by D, computes the bias, and stores D and the
  // bias for the kernel for dk and dv.
  template <bool kDropout>
  __device__ void finish(const Sm90Backward<T>& p, int head, int row, float (&delta)[2], float (&bias)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      delta[r] = quad_sum(delta[r]) - dlogsumexp[r];
      if constexpr (kDropout) delta[r] *= keep_probability(p.problem);
      bias[r] = logsumexp[r] == -INFINITY ? -INFINITY : -logsumexp[r] * kLog2E;  // P = 0 for a query that sees no key
      if constexpr (Mask::kAdds)
        if (mask[r].shift != 0 && bias[r] != -INFINITY) bias[r] = shifted_bias<T>(logsumexp[r], mask[r]);
      if (threadIdx.x % 4 == 0) {
        p.row_bias[head * p.pitch + row + 8 * r] = bias[r];
        p.row_delta[head * p.pitch + row + 8 * r] = delta[r];
      }
    }
  }
};

#endif

}  // namespace gptkernels::cuda
