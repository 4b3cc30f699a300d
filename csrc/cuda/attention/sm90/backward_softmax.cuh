// The arithmetic of the backward kernels for sm_90a (notation: backward.cu). A thread holds 16 columns of two rows,
// `row` and row + 8, of a warpgroup's 64 x 64 scores (cuda/ptx/wgmma.cuh). Rows are queries in the kernels for dq, and
// keys in the kernels for dk and dv.
#pragma once

#include "backward.cuh"

namespace gptkernels::cuda {

#if GPTKERNELS_WGMMA

// ---- operands and results -------------------------------------------------------------------------------------------

__device__ inline void load_a(uint32_t* a, uint32_t panel, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    load_matrices(*reinterpret_cast<uint32_t (*)[4]>(a + 4 * i),
                  panel + panel_offset(row + lane % 16, 2 * i + lane / 16));
}

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

// Starts d = a b', where a and b are (64 x 4n).
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

// Starts d = a b', where a and b are (64 x HS), and `rows` is the descriptor of a.
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

// Starts d += a b if `accumulate`, otherwise d = a b, where a is (64 x 64) and b is (64 x 2n).
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

template <int n>
__device__ void probabilities_of_rows(float (&scores)[n], float scale_log2, const float (&bias)[2]) {
  float last = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) scores[i] = exp2_approximately(fmaf(scores[i], scale_log2, bias[i / 2 % 2]));
#pragma unroll
  for (int i = 0; i < n; i += 8) last = fmaxf(last, scores[i + 7]);
  complete(last);
}

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
// Let M be 0 for dropped elements and otherwise 1 / (1 - p), where p is the dropout probability. Then
// dS = P (M g v' - delta). The kernels compute (1 - p) dS from (1 - p) delta, and last_factor() divides dq, dk and dv
// by 1 - p. The sign bit marks a dropped element of P until dS is computed.

struct MarkDropped {
  float (&weights)[32];

  __device__ explicit MarkDropped(float (&w)[32]) : weights(w) {}
  __device__ void operator()(int i, bool keep, bool keep_next) const {
    if (!keep) weights[i] = -weights[i];
    if (!keep_next) weights[i + 1] = -weights[i + 1];
  }
};

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

template <bool kDropout>
__device__ void score_gradients_of_rows(float (&dp)[32], const float (&weights)[32], const float (&delta)[2]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) dp[i] = score_gradient<kDropout>(weights[i], dp[i], delta[i / 2 % 2]);
}

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

template <typename T>
__device__ void add_products(float (&delta)[2], const uint32_t* out, const uint32_t* dout) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 a = unpack_pair<T>(out[i]), b = unpack_pair<T>(dout[i]);
    delta[i % 2] += a.x * b.x + a.y * b.y;
  }
}

// The bias and delta of a thread's two queries. With dropout, delta is multiplied by 1 - p. If a query has a shift
// (block_mask.cuh), its bias is shifted_bias(). load() is called long before finish() needs the values.
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

  // On entry, `delta` holds the sums of add_products().
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
