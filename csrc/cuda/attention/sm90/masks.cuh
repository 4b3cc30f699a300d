// How the attention kernels for sm_90a apply a mask that block_mask.cu has classified. The loader skips blocks that are
// hidden from all rows of a tile, and writes a MaskedBlock for each stage to shared memory. The computing warpgroups
// read the bits of their rows, and the values to add, from global memory.
#pragma once

#include <climits>

#include "block_mask.cuh"
#include "common.cuh"

namespace gptkernels::cuda {

struct Sm90Mask {
  MaskBlocks blocks;
  float inverse_scale;
  bool pairs;  // whether one load of 4 bytes can read the additive mask for two neighbouring keys

  template <typename T>
  static Sm90Mask of(const AttentionMask<T>& mask, const AttentionSizes& s, double scale, bool backward, void* memory) {
    Sm90Mask found = {};
    found.blocks.lay_out(mask, s, backward, memory);
    found.inverse_scale = static_cast<float>(1 / scale);
    found.pairs = reinterpret_cast<uintptr_t>(mask.bias) % 4 == 0 && mask.key == 1 && mask.query % 2 == 0 &&
                  mask.head % 2 == 0 && mask.batch % 2 == 0 && s.keys % 2 == 0;
    return found;
  }
};

template <typename T>
bool has_mask(const AttentionMask<T>& mask) {
  return mask.allowed || mask.bias;
}

template <typename T, typename Params>
bool supports_mask(const Params& p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  if (has_bounds(p.mask)) return false;  // keys outside the bounds may be NaN, and 0 * NaN is NaN
  if (!has_mask(p.mask)) return true;
  const AttentionSizes& s = p.sizes;
  const int64_t heads = (p.mask.head ? s.heads : 1) * (p.mask.batch ? s.batches : 1);
  return p.scale > 1e-6 && p.scale < 1e6 && s.queries < kLargest && s.keys < kLargest &&
         heads * (ceil_div(s.queries, kMaskBlock) + 8) * (ceil_div(s.keys, kMaskBlock) + 8) < kLargest;
}

template <typename T>
int64_t mask_workspace(const AttentionMask<T>& mask, const AttentionSizes& s, bool backward) {
  return has_mask(mask) ? MaskBlocks{}.lay_out(mask, s, backward, nullptr) : 0;
}

// `classes` is as returned by SeenBlocks::classes().
struct alignas(16) MaskedBlock {
  int first;
  uint32_t classes;
  int mask_head;
  int member;  // in the kernels for dk and dv: index of the query head among those that share the key head
};

#if GPTKERNELS_WGMMA

// One warpgroup's part of a MaskedBlock: kUnits neighbouring blocks of its 64 rows.
template <int kUnits>
struct OwnBlock {
  static constexpr uint32_t kLow = kUnits == 1 ? 0x01 : 0x0101;
  int first;
  uint32_t classes;
  uint32_t bits[2];  // 16 bits per row and unit
  int member;

  __device__ bool hidden() const { return classes == 0; }
  __device__ bool seen() const { return classes == 3 * kLow; }
  __device__ bool adds() const { return classes >> 1 & ~classes & kLow; }

  // `half` (0 or 1) selects the warpgroup's row of blocks.
  template <typename Read>
  __device__ static OwnBlock of(const MaskedBlock& block, int half, const Read& read) {
    OwnBlock own = {block.first, block.classes >> 16 * half & 0xFFFF, {0, 0}, block.member};
    if (own.seen() || own.hidden()) return own;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const uint32_t kind = own.classes >> 8 * unit & 0xFF;
      if (kind == kMaskHidden) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) own.bits[r] |= (kind == kMaskSeen ? 0xFFFF : read(unit, r)) << 16 * unit;
    }
    return own;
  }
};

template <int n>
__device__ void hide(float (&scores)[n], const uint32_t (&bits)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < n / 4; ++i) {
      if (!(bits[r] >> 2 * i & 1)) scores[4 * i + 2 * r] = -INFINITY;
      if (!(bits[r] >> (2 * i + 1) & 1)) scores[4 * i + 2 * r + 1] = -INFINITY;
    }
}

// For a row with a shift: -(logsumexp - shift) * log2(e). In bfloat16, logsumexp - shift is the log of the number of
// keys whose value is the shift. The stored logsumexp lacks this log, because adding the much larger shift has rounded
// it away.
template <typename T>
__device__ float shifted_bias(float logsumexp, const MaskRow& row) {
  return std::is_same_v<T, bfloat16> ? -row.log2_count : -(logsumexp - row.shift) * kLog2E;
}

// Returns score + (value - shift) / scale; the result is multiplied by the scale later. In a bfloat16 row with a shift,
// 0 replaces the score, because a value of this magnitude (2^100 or more) would round the score away.
template <typename T>
__device__ float add_value(float score, float value, float shift, float inverse_scale) {
  const float kept = std::is_same_v<T, bfloat16> && shift != 0 ? 0 : 1;
  return fmaf(value - shift, inverse_scale, kept * score);
}

template <typename T>
__device__ const T* mask_values(const AttentionMask<T>& mask, int batch, int head) {
  return mask.bias + batch * mask.batch + head * mask.head;
}

// Keeps the compiler from loading all values before their first use, which would take too many registers.
__device__ inline void in_parts(int i) {
  if (i % 4 == 3) asm volatile("" ::: "memory");
}

// Adds the mask's values to scores whose rows are queries.
template <typename T, int n>
__device__ void add_values(float (&scores)[n], const Sm90Problem<T>& problem, const Sm90Mask& masked, int batch,
                           int head, int query, int first_key) {
  const AttentionMask<T>& mask = problem.mask;
  const int mask_head = masked.blocks.mask_head(batch, head);
  const int key = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int own = min(query + 8 * r, problem.queries - 1);
    const T* row = mask_values(mask, batch, head) + own * mask.query;
    const float shift = masked.blocks.row(mask_head, own).shift;
    const auto add = [&](int i, float x, float y) {
      float& first = scores[4 * i + 2 * r];
      float& second = scores[4 * i + 2 * r + 1];
      first = add_value<T>(first, x, shift, masked.inverse_scale);
      second = add_value<T>(second, y, shift, masked.inverse_scale);
    };
    if (masked.pairs) {
#pragma unroll
      for (int i = 0; i < n / 4; ++i) {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(row + min(key + 8 * i, problem.keys - 2));
        const float2 pair = unpack_pair<T>(word);
        add(i, pair.x, pair.y);
        in_parts(i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < n / 4; ++i) {
        add(i, static_cast<float>(row[min(key + 8 * i, problem.keys - 1) * mask.key]),
            static_cast<float>(row[min(key + 8 * i + 1, problem.keys - 1) * mask.key]));
        in_parts(i);
      }
    }
  }
}

// Adds the mask's values to scores whose rows are keys.
template <typename T, int n>
__device__ void add_values_of_keys(float (&scores)[n], const Sm90Problem<T>& problem, const Sm90Mask& masked, int batch,
                                   int head, int key, int first_query) {
  const AttentionMask<T>& mask = problem.mask;
  const int mask_head = masked.blocks.mask_head(batch, head);
  const T* values = mask_values(mask, batch, head);
#pragma unroll
  for (int i = 0; i < n / 4; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int query = min(first_query + 8 * i + 2 * static_cast<int>(threadIdx.x % 4) + c, problem.queries - 1);
      const float shift = masked.blocks.row(mask_head, query).shift;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& score = scores[4 * i + 2 * r + c];
        const auto value =
            static_cast<float>(values[query * mask.query + min(key + 8 * r, problem.keys - 1) * mask.key]);
        score = add_value<T>(score, value, shift, masked.inverse_scale);
      }
    }
    in_parts(2 * i + 1);
  }
}

#endif

}  // namespace gptkernels::cuda
