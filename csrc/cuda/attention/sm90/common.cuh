// What the attention kernels for sm_90a share: barriers, the order of tiles, and which keys a query sees.
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

// Keeps what x (never -inf) is computed from ahead of what follows, where the assembler would move it behind a wait: a
// store that never happens needs x.
__device__ inline void complete(float x) {
  asm volatile("{\n.reg .pred never;\nsetp.eq.f32 never, %0, 0fFF800000;\n@never st.shared.f32 [%1], %0;\n}" ::"f"(x),
               "r"(0)
               : "memory");
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ inline bool quad_any(bool x) {
  return __ballot_sync(~0u, x) >> (threadIdx.x % 32 & ~3u) & 0xF;
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ inline bool is_far(float reference, float factor) {
  return fabsf(reference) * factor > kFarFromZero && reference != -INFINITY;
}

// Makes scores of rows whose reference is far from 0 relative to it: the reference of what is left is 0.
template <int kScores>
__device__ void subtract_far(float (&scores)[kScores], float (&reference)[2], float factor) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!is_far(reference[r], factor)) continue;
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) scores[i / 2 * 4 + i % 2 + 2 * r] -= reference[r];
    reference[r] = 0;
  }
}

// A thread's scores of its two rows to exponentials relative to the rows' references, in units of 1 / factor; their
// sums.
template <int kScores>
__device__ void exponentials(float (&scores)[kScores], float (&sums)[2], const float (&reference)[2], float factor) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float bias = reference[r] == -INFINITY ? 0 : -reference[r] * factor;
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      float& x = scores[4 * i + 2 * r];
      float& y = scores[4 * i + 2 * r + 1];
      x = exp2_approximately(fmaf(x, factor, bias));
      y = exp2_approximately(fmaf(y, factor, bias));
      even += x;
      odd += y;
    }
    sums[r] = even + odd;
  }
}

#endif

// ---- which keys a query sees ----------------------------------------------------------------------------------------

// What a kernel needs to know beside q, k and v. The plain form, causal or not, is compiled without the rest.
template <typename T>
struct Sm90Problem {
  int queries;
  int keys;
  int heads;
  int batches;
  int group;  // query heads for each key head
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

// ---- the keys of a padded sequence ----------------------------------------------------------------------------------

// Those that are no padding: from begin to before end, none where end <= begin.
struct KeyRange {
  int begin;
  int end;

  template <typename T>
  __device__ static KeyRange of(const Sm90Problem<T>& problem, int batch) {
    const AttentionMask<T>& mask = problem.mask;
    return {mask.key_begin ? min(max(mask.key_begin[batch], 0), problem.keys) : 0,
            mask.key_end ? min(max(mask.key_end[batch], 0), problem.keys) : problem.keys};
  }

  __device__ bool has(int key) const { return begin <= key && key < end; }
  __device__ bool has_all(int key, int count) const { return begin <= key && key + count <= end; }
};

// Sets the rows of keys or values in shared memory that are padding to 0, by all warps of a warpgroup: a probability of
// 0 times what may be there would not be 0. `first_key` is the first row's.
template <int kRows, int kPanels>
__device__ void clear_padding(uint32_t shared, KeyRange range, int first_key, int barrier) {
  const int row = threadIdx.x % kWarpgroup;
  if (row < kRows && !range.has(first_key + row))
    for (int i = 0; i < kPanels; ++i)
      for (int chunk = 0; chunk < 8; ++chunk)
        asm volatile(
            "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared + (i * kRows + row) * kPanelRowBytes + 16 * chunk),
            "r"(0)
            : "memory");
  fence_async_shared();
  warpgroup_barrier(barrier);
}

// ---- dropout --------------------------------------------------------------------------------------------------------
//
template <typename T>
__device__ float keep_probability(const Sm90Problem<T>& problem) {
  return 1 - static_cast<float>(problem.dropout.probability);
}

// Groups of philox.h's are drawn two at a time: with more there are no registers, with one the chain is too long.

// apply(i, whether d[i] is kept, whether d[i + 1] is) for every second element of a thread's n scores d, whose rows are
// queries and columns keys. `query` is the warp's first, `key` the block's. Two neighbouring 16x8 tiles are one group.
template <int n, typename Apply>
__device__ void for_kept(const DropoutDraw& dropout, uint32_t head, int query, int key, const Apply& apply) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < n / 8; j += 2) {
    PhiloxWords words[2];
    dropout_words(dropout.seed, dropout.offset, head, query / 2 + lane / 4, (key + 16 * j) / 4 + lane % 4, 0, 4, words);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w) {  // query + 8 * (w / 2), key + 8 * (w % 2)
        const uint32_t word = words[i].word[w];
        apply(8 * (j + i) + 4 * (w % 2) + 2 * (w / 2), dropout.keeps_lower(word), dropout.keeps_upper(word));
      }
  }
}

// The same where rows are keys and columns queries. Two lanes whose keys are neighbours need halves of the same two
// groups: each draws one, and gives the other its halves.
template <int n, typename Apply>
__device__ void for_kept_transposed(const DropoutDraw& dropout, uint32_t head, int key, int query, const Apply& apply) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane / 4 % 2;
  const uint32_t own_halves = odd ? 0x7632 : 0x5410, other_halves = odd ? 0x5410 : 0x7632;
#pragma unroll
  for (int j = 0; j < n / 8; j += 2) {
    PhiloxWords words[2];
    dropout_words(dropout.seed, dropout.offset, head, (query + 16 * j) / 2 + lane % 4 * 2 + odd, key / 4 + lane / 8, 8,
                  0, words);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // query + 8 * half; the lower bits are of `key`, the upper of key + 8
        const uint32_t (&word)[4] = words[i].word;
        const uint32_t own = __byte_perm(word[2 * half], word[2 * half + 1], own_halves);
        const uint32_t got = __shfl_xor_sync(~0u, __byte_perm(word[2 * half], word[2 * half + 1], other_halves), 4);
        const uint32_t first = odd ? got : own, second = odd ? own : got;  // of two neighbouring queries
        const int at = 8 * (j + i) + 4 * half;
        apply(at, dropout.keeps_lower(first), dropout.keeps_lower(second));
        apply(at + 2, dropout.keeps_upper(first), dropout.keeps_upper(second));
      }
  }
}

#endif

// ---- what these kernels serve ---------------------------------------------------------------------------------------

template <typename T>
bool suits_tma(const HeadsView<T>& t, const AttentionSizes& s, int64_t heads, int64_t tokens) {
  return tma_takes<std::remove_const_t<T>>(t.data, t.token, tokens, t.head, heads, t.batch, s.batches);
}

template <typename T>
bool has_bounds(const AttentionMask<T>& mask) {
  return mask.key_begin || mask.key_end;
}

// Causal or not, keys of padded sequences, nothing else that hides a key, dropout that keeps something, and sizes that
// 32 bits index.
template <typename T, auto kKernel, typename Params>
bool sm90_serves(const Params& p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  const AttentionSizes& s = p.sizes;
  const AttentionMask<T>& mask = p.mask;
  return built_for_wgmma<kKernel>() && tensor_map_encoder() && s.head_size % 8 == 0 && p.scale > 0 &&
         dropout_threshold(p.dropout.probability) < 1 << 16 && std::abs(mask.query_offset) < kLargest &&
         s.queries < kLargest && s.keys < kLargest &&
         s.batches * s.heads * (ceil_div(s.queries, 128) + ceil_div(s.keys, 128)) < kLargest &&
         suits_tma(p.query, s, s.heads, s.queries) && suits_tma(p.key, s, s.key_heads, s.keys) &&
         suits_tma(p.value, s, s.key_heads, s.keys) && suits_tma(p.out, s, s.heads, s.queries);
}

}  // namespace gptkernels::cuda
