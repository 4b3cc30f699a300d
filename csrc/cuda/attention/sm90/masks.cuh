// What the attention kernels for sm_90a do under a mask. The loading warp leaves out blocks that are hidden and says of
// each other one, in shared memory beside its buffer, where it is and what the two warpgroups have to do there; these
// then take their bits of it from attention/sm90/block_mask.cuh's arrays, and values to add from the mask itself.
#pragma once

#include <climits>

#include "block_mask.cuh"
#include "common.cuh"

namespace gptkernels::cuda {

// What a kernel is compiled for.
enum class Masks { kNone, kBool, kAdditive };

// Whether rows that have a shift are uniform: their scores count as 0 (attention/sm90/block_mask.cuh).
template <typename T>
constexpr bool has_uniform_rows(Masks masks) {
  return masks == Masks::kAdditive && std::is_same_v<T, bfloat16>;
}

// Arguments of a kernel under a mask.
struct Sm90Mask {
  MaskBlocks blocks;
  float inverse_scale;
  bool pairs;  // two neighbouring keys are one aligned load of 4 bytes

  // The blocks' arrays begin at `memory`.
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

// Masks that these kernels serve: not together with key_begin and key_end, and of a size that 32 bits index.
template <typename T, typename Params>
bool serves_mask(const Params& p) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  if (!has_mask(p.mask)) return true;
  const AttentionSizes& s = p.sizes;
  const int64_t heads = (p.mask.head ? s.heads : 1) * (p.mask.batch ? s.batches : 1);
  return !has_bounds(p.mask) && p.scale > 1e-6 && p.scale < 1e6 && s.queries < kLargest && s.keys < kLargest &&
         heads * (ceil_div(s.queries, kMaskBlock) + 8) * (ceil_div(s.keys, kMaskBlock) + 8) < kLargest;
}

template <typename T>
int64_t mask_workspace(const AttentionMask<T>& mask, const AttentionSizes& s, bool backward) {
  return has_mask(mask) ? MaskBlocks{}.lay_out(mask, s, backward, nullptr) : 0;
}

// Beside a buffer of the ring: its first key or query, and the classes as SeenBlocks::classes has them.
struct alignas(16) MaskedBlock {
  int first;
  uint32_t classes;
  int mask_head;
  int member;  // of the heads that share keys, where blocks are queries
};

constexpr int kShiftedBytes = 16;  // of MaskBlocks::shifted_rows

#if GPTKERNELS_WGMMA

__device__ inline uint64_t load_shifted(uint32_t shared) {
  uint64_t rows;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(rows) : "r"(shared) : "memory");
  return rows;
}

// A block as a warpgroup sees it: kUnits blocks of 64 of a row of the classes.
template <int kUnits>
struct OwnBlock {
  static constexpr uint32_t kLow = kUnits == 1 ? 0x01 : 0x0101;
  int first;
  uint32_t classes;
  uint32_t bits[2];  // of this thread's two rows, 16 for each unit
  int member;

  __device__ bool hidden() const { return classes == 0; }
  __device__ bool seen() const { return classes == 3 * kLow; }
  __device__ bool adds() const { return classes >> 1 & ~classes & kLow; }

  // read(unit, row) has the bits of one unit and row.
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

// Scores whose bits are 0 become -inf.
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

// The scores of uniform rows become 0, where columns are queries and bit i of `uniform` is column i.
template <int n>
__device__ void clear_uniform(float (&scores)[n], uint64_t uniform) {
  if (uniform == 0) return;
  const uint64_t own = uniform >> 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < n / 4; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c)
      if (own >> (8 * i + c) & 1) scores[4 * i + c] = scores[4 * i + 2 + c] = 0;
}

// The same where rows are queries: one of this thread's two becomes 0 in the registers that are their A operand.
template <int n>
__device__ void clear_row(uint32_t (&query)[n], int row) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) query[2 * i + row] = 0;
}

// And in shared memory, by all warps of a warpgroup whose 64 queries begin at `shared` in panels that are `panel_bytes`
// apart.
template <int kPanels>
__device__ void clear_uniform(uint32_t shared, int panel_bytes, uint64_t uniform, int barrier) {
  if (uniform == 0) return;
  const int row = threadIdx.x % 64, first_chunk = threadIdx.x % kWarpgroup / 64 * 4;
  if (uniform >> row & 1)
    for (int i = 0; i < kPanels; ++i)
      for (int chunk = first_chunk; chunk < first_chunk + 4; ++chunk)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared + i * panel_bytes + row * kPanelRowBytes +
                                                                      16 * chunk),
                     "r"(0)
                     : "memory");
  fence_async_shared();
  warpgroup_barrier(barrier);
}

// Minus the logsumexp, in units of log2, of the scores of a row that has a shift, as they are here.
template <typename T>
__device__ float shifted_bias(float logsumexp, const MaskRow& row) {
  return std::is_same_v<T, bfloat16> ? -row.log2_count : -(logsumexp - row.shift) * kLog2E;
}

// A score with a mask's value, in units of 1 / scale.
template <typename T>
__device__ float add_value(float score, float value, float shift, float inverse_scale) {
  if (std::is_same_v<T, bfloat16> && shift != 0) return 0;
  return fmaf(value - shift, inverse_scale, score);
}

template <typename T>
__device__ const T* mask_values(const AttentionMask<T>& mask, int batch, int head) {
  return mask.bias + batch * mask.batch + head * mask.head;
}

// Loads on either side stay there: what is loaded ahead has no registers.
__device__ inline void in_parts(int i) {
  if (i % 4 == 3) asm volatile("" ::: "memory");
}

// Adds a mask's values to scores in units of 1 / scale. Rows are queries, this thread's `query` and query + 8, columns
// keys from `first_key` on.
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

// The same where rows are keys, `key` and key + 8, and columns queries from `first_query` on.
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
