// Arguments and dropout of the attention kernels for sm_90a, and the conditions under which they support a call.
#pragma once

#include <cmath>

#include "../../../attention.h"
#include "cuda/attention/tile_order.cuh"
#include "cuda/common/approximate.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/elementwise/dropout.cuh"
#include "cuda/ptx/pipeline.cuh"
#include "cuda/ptx/sm80.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace gptkernels::cuda {

#if GPTKERNELS_WGMMA

// Makes ptxas compute x before the code that follows the call, for example a wait for matmuls. The store is never
// executed, because x is never -inf.
__device__ inline void complete(float x) {
  asm volatile("{\n.reg .pred never;\nsetp.eq.f32 never, %0, 0fFF800000;\n@never st.shared.f32 [%1], %0;\n}" ::"f"(x),
               "r"(0)
               : "memory");
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

#endif

// ---- arguments ------------------------------------------------------------------------------------------------------

template <typename T>
struct Sm90Problem {
  int queries;
  int keys;
  int heads;
  int batches;
  int group;  // query heads per key head
  int query_offset;
  float scale;
  float scale_log2;  // scale * log2(e)
  AttentionMask<T> mask;
  DropoutArguments dropout;
};

template <typename T>
Sm90Problem<T> sm90_problem(const AttentionSizes& sizes, double scale, const AttentionMask<T>& mask,
                            const DropoutArguments& dropout) {
  return {.queries = static_cast<int>(sizes.queries),
          .keys = static_cast<int>(sizes.keys),
          .heads = static_cast<int>(sizes.heads),
          .batches = static_cast<int>(sizes.batches),
          .group = static_cast<int>(sizes.heads / sizes.key_heads),
          .query_offset = static_cast<int>(mask.query_offset),
          .scale = static_cast<float>(scale),
          .scale_log2 = static_cast<float>(scale * 1.4426950408889634),
          .mask = mask,
          .dropout = dropout};
}

template <typename T>
CUtensorMap panel_map(const HeadsView<T>& t, const AttentionSizes& sizes, int64_t heads, int64_t tokens, int rows) {
  return panel_map<std::remove_const_t<T>>(t.data, sizes.head_size, t.token, tokens, t.head, heads, t.batch,
                                           sizes.batches, rows);
}

#if GPTKERNELS_WGMMA

// ---- dropout --------------------------------------------------------------------------------------------------------

template <typename T>
__device__ float keep_probability(const Sm90Problem<T>& problem) {
  return 1 - static_cast<float>(problem.dropout.probability);
}

// Random words are drawn for two groups of elements (philox.h) at a time: three would need too many registers, and one
// would make the chain of dependent instructions too long.

// Calls apply(i, keep, keep_next) for every even i of the thread's n scores, with dropout's decisions on scores i and i
// + 1. Rows are queries, columns are keys. A thread's 8 elements of two neighbouring 16x8 tiles are one group
// (DropoutGroup). `head` is DropoutDraw::head_number().
template <int n, typename Apply>
__device__ void for_kept(const DropoutDraw& dropout, uint32_t head, int query, int key, const Apply& apply) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < n / 8; j += 2) {
    PhiloxWords words[2];
    dropout_words(dropout.seed, dropout.offset, head, dropout.first_group_row + query / 2 + lane / 4,
                  (key + 16 * j) / 4 + lane % 4, 0, 4, words);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t word = words[i].word[w];
        apply(8 * (j + i) + 4 * (w % 2) + 2 * (w / 2), dropout.keeps_lower(word), dropout.keeps_upper(word));
      }
  }
}

// Rows are keys, columns are queries. Two lanes with neighbouring keys need halves of the same two groups: each lane
// draws one group, and the lanes exchange halves.
template <int n, typename Apply>
__device__ void for_kept_transposed(const DropoutDraw& dropout, uint32_t head, int key, int query, const Apply& apply) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane / 4 % 2;
  const uint32_t own_halves = odd ? 0x7632 : 0x5410, other_halves = odd ? 0x5410 : 0x7632;
#pragma unroll
  for (int j = 0; j < n / 8; j += 2) {
    PhiloxWords words[2];
    dropout_words(dropout.seed, dropout.offset, head,
                  dropout.first_group_row + (query + 16 * j) / 2 + lane % 4 * 2 + odd, key / 4 + lane / 8, 8, 0, words);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of 16 queries
        const uint32_t (&word)[4] = words[i].word;
        const uint32_t own = __byte_perm(word[2 * half], word[2 * half + 1], own_halves);
        const uint32_t got = __shfl_xor_sync(~0u, __byte_perm(word[2 * half], word[2 * half + 1], other_halves), 4);
        // `first` and `second` are for neighbouring queries. Their lower halves are for the thread's first key, their
        // upper halves for that key + 8.
        const uint32_t first = odd ? got : own, second = odd ? own : got;
        const int at = 8 * (j + i) + 4 * half;
        apply(at, dropout.keeps_lower(first), dropout.keeps_lower(second));
        apply(at + 2, dropout.keeps_upper(first), dropout.keeps_upper(second));
      }
  }
}

#endif

// ---- which calls the kernels support --------------------------------------------------------------------------------

template <typename T>
bool tma_supports(const HeadsView<T>& t, const AttentionSizes& s, int64_t heads, int64_t tokens) {
  return tma_supports<std::remove_const_t<T>>(t.data, t.token, tokens, t.head, heads, t.batch, s.batches);
}

template <typename T>
bool has_bounds(const AttentionMask<T>& mask) {
  return mask.key_begin || mask.key_end;
}

// The callers also check the largest head size, and, by supports_mask(), the mask.
template <typename T, auto kKernel, typename Params>
bool sm90_supports(const Params& p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  const AttentionSizes& s = p.sizes;
  const AttentionMask<T>& mask = p.mask;
  return built_for_wgmma<kKernel>() && tensor_map_encoder() && s.head_size % 8 == 0 && p.scale > 0 &&
         dropout_threshold(p.dropout.probability) < 1 << 16 && std::abs(mask.query_offset) < kLargest &&
         s.queries < kLargest && s.keys < kLargest &&
         s.batches * s.heads * (ceil_div(s.queries, 128) + ceil_div(s.keys, 128)) < kLargest &&
         tma_supports(p.query, s, s.heads, s.queries) && tma_supports(p.key, s, s.key_heads, s.keys) &&
         tma_supports(p.value, s, s.key_heads, s.keys) && tma_supports(p.out, s, s.heads, s.queries);
}

}  // namespace gptkernels::cuda
