// Fills the arrays of block_mask.cuh before the attention kernels for sm_90a run.
#include <cmath>

#include "block_mask.cuh"
#include "cuda/common/packed.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kWarps = 8;  // of a thread block

// E is bool, or the dtype of the queries.
template <typename E>
struct MaskElements {
  const E* data;
  int64_t batch, head, query, key;
  int64_t batches, heads;  // 1 if broadcast
  int queries, keys;
  bool causal;
  int query_offset;
  bool in_chunks;  // whether rows are contiguous and begin at multiples of 16 bytes

  __device__ const E* row(int mask_head, int at) const {
    return data + mask_head / heads * batch + mask_head % heads * head + at * query;
  }
  __device__ int end(int at) const { return causal ? max(min(keys, at + query_offset + 1), 0) : keys; }
};

constexpr int kChunkBytes = 16;
template <typename E>
constexpr int kChunk = kChunkBytes / static_cast<int>(sizeof(E));

template <typename E>
__device__ void load_chunk(E (&elements)[kChunk<E>], const E* from) {
  *reinterpret_cast<uint4*>(elements) = __ldg(reinterpret_cast<const uint4*>(from));
}

// ---- rows that have a shift -----------------------------------------------------------------------------------------

struct Largest {
  float value = -INFINITY;
  int count = 0;

  __device__ void take(float x, int times) {
    if (x > value) count = 0, value = x;
    if (x == value) count += times;
  }
};

// Each warp processes one row. A value above kLowValue rules out a shift and ends the search, so the warp first reads
// the value of the key at the query's own position: a causal attn_mask does not hide this key.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps) attention_mask_rows_kernel(const __grid_constant__ MaskElements<T> mask,
                                                                          const __grid_constant__ MaskBlocks blocks) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int rows = blocks.bit_blocks * kMaskBlock, lane = threadIdx.x % 32;
  if (at >= static_cast<int64_t>(blocks.heads) * rows) return;
  const int row = static_cast<int>(at % rows);
  const int end = row < mask.queries || mask.query == 0 ? mask.end(row) : 0;
  const T* from = mask.row(static_cast<int>(at / rows), row);

  Largest largest;
  const int own_key = min(max(row + mask.keys - mask.queries, 0), end - 1);
  bool ordinary = end > 0 && !(static_cast<float>(from[own_key * mask.key]) <= kLowValue<T>);
  const int step = mask.in_chunks ? kChunk<T> : 1;
  for (int start = 0; start < end && !ordinary; start += 32 * step) {
    const int first = start + lane * step;
    bool higher = false;  // than kLowValue, or NaN
    const auto take = [&](float x) {
      higher |= !(x <= kLowValue<T>);
      largest.take(x, 1);
    };
    if (mask.in_chunks && first + kChunk<T> <= end) {
      T chunk[kChunk<T>];
      load_chunk(chunk, from + first);
#pragma unroll
      for (int i = 0; i < kChunk<T>; ++i) take(static_cast<float>(chunk[i]));
    } else {
      for (int i = first; i < min(first + step, end); ++i) take(static_cast<float>(from[i * mask.key]));
    }
    ordinary = __any_sync(~0u, higher);
  }
  for (int i = 16; i > 0; i /= 2) {
    const float value = __shfl_xor_sync(~0u, largest.value, i);
    largest.take(value, __shfl_xor_sync(~0u, largest.count, i));
  }
  const bool has_shift = !ordinary && largest.value > -INFINITY;
  if (lane == 0)
    blocks.rows[at] = {has_shift ? largest.value : 0, has_shift ? log2f(static_cast<float>(largest.count)) : 0};
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

// Bit i of lane l becomes bit l of lane i.
__device__ uint32_t transpose_bits(uint32_t x) {
  const int lane = threadIdx.x % 32;
  uint32_t lower = 0xFFFF;  // the lower s of every 2 s bits are set
#pragma unroll
  for (int s = 16; s > 0; s /= 2) {
    const uint32_t y = __shfl_xor_sync(~0u, x, s);
    x = lane & s ? (x & ~lower) | (y & ~lower) >> s : (x & lower) | (y & lower) << s;
    lower ^= lower << s / 2;
  }
  return x;
}

// Makes each thread's 16 bits adjacent, in the order of MaskBlocks::query_bits().
__device__ uint2 for_accumulators(uint64_t row) {
  uint32_t part[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    uint64_t x = row >> 2 * c & 0x0303030303030303ull;
    x = (x | x >> 6) & 0x000F000F000F000Full;
    x = (x | x >> 12) & 0x000000FF000000FFull;
    part[c] = static_cast<uint32_t>(x | x >> 24) & 0xFFFF;
  }
  return {part[0] | part[1] << 16, part[2] | part[3] << 16};
}

// Bit i is set if key i is seen.
struct SeenRow {
  uint64_t bits = 0;
  bool added = false;  // the mask changes a seen score

  __device__ void take(int i, bool seen, bool more) {
    bits |= static_cast<uint64_t>(seen) << i;
    added |= seen && more;
  }
  __device__ void take(int i, bool allowed, float) { take(i, allowed, false); }
  template <typename T>
  __device__ void take(int i, T element, float shift) {
    const float x = static_cast<float>(element);
    if constexpr (std::is_same_v<T, bfloat16>) {
      if (shift == 0)
        take(i, !(x <= kHidingValue), x != 0);
      else
        take(i, x == shift, true);
    } else {
      take(i, x != -INFINITY, x != shift);
    }
  }
  __device__ void take_chunk(int i, const bool* from, float) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    uint32_t sixteen = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k)  // each byte becomes 0 or 1; the multiplication gathers the 4 bits in the upper byte
      sixteen |= ((__vcmpne4(word[k], 0) & 0x01010101u) * 0x01020408u >> 24) << 4 * k;
    bits |= static_cast<uint64_t>(sixteen) << i;
  }
  template <typename T>
  __device__ void take_chunk(int i, const T* from, float shift) {
    T chunk[kChunk<T>];
    load_chunk(chunk, from);
    uint32_t seen = 0;
#pragma unroll
    for (int k = 0; k < kChunk<T>; ++k) {
      SeenRow one;
      one.take(0, chunk[k], shift);
      seen |= static_cast<uint32_t>(one.bits) << k;
      added |= one.added;
    }
    bits |= static_cast<uint64_t>(seen) << i;
  }
};

// Each warp classifies one block. A lane reads two rows of the block.
template <typename E>
__global__ void __launch_bounds__(32 * kWarps)
    attention_mask_blocks_kernel(const __grid_constant__ MaskElements<E> mask,
                                 const __grid_constant__ MaskBlocks blocks) {
  const int chunks = blocks.key_pitch / kWarps;
  const int lane = threadIdx.x % 32, key_block = static_cast<int>(blockIdx.x % chunks) * kWarps + threadIdx.x / 32;
  const int strip = static_cast<int>(blockIdx.x / chunks % blocks.bit_blocks);
  const int mask_head = static_cast<int>(blockIdx.x / chunks / blocks.bit_blocks);
  const int first_key = key_block * kMaskBlock;
  const bool all_queries = blocks.bit_blocks < blocks.query_blocks;

  uint64_t rows[2];
  bool added = false, any = false, all = true;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = strip * kMaskBlock + lane + 32 * r;
    const bool inside = query < mask.queries || all_queries;
    const int count = inside ? min(max(mask.end(query) - first_key, 0), kMaskBlock) : 0;
    SeenRow row;
    const float shift = inside && blocks.rows ? blocks.row(mask_head, query).shift : 0;
    if (count > 0) {
      const E* from = mask.row(mask_head, query) + first_key * mask.key;
      if (mask.in_chunks && first_key + kMaskBlock <= mask.keys) {
#pragma unroll
        for (int i = 0; i < kMaskBlock; i += kChunk<E>) row.take_chunk(i, from + i, shift);
      } else {
        for (int i = 0; i < count; ++i) row.take(i, from[i * mask.key], shift);
      }
      if (count < kMaskBlock) row.bits &= (1ull << count) - 1;
    }
    added |= row.added;
    any |= row.bits != 0;
    all &= !inside || row.bits == ~0ull;
    rows[r] = row.bits;
  }
  any = __any_sync(~0u, any);
  added = __any_sync(~0u, added);
  all = __all_sync(~0u, all);
  const int kind = !any ? kMaskHidden : added ? kMaskAdded : all ? kMaskSeen : kMaskBits;

  const int first_block = all_queries ? 0 : strip;
  const bool is_last = all_queries || strip == blocks.query_blocks - 1;
  const int end_block = is_last ? blocks.query_pitch : strip + 1;
  for (int i = first_block + lane; i < end_block; i += 32) {
    const auto own = static_cast<uint8_t>(i < blocks.query_blocks ? kind : kMaskHidden);
    blocks.classes[(static_cast<int64_t>(mask_head) * blocks.query_pitch + i) * blocks.key_pitch + key_block] = own;
    if (blocks.key_classes)
      blocks.key_classes[(static_cast<int64_t>(mask_head) * blocks.key_pitch + key_block) * blocks.query_pitch + i] =
          own;
  }
  if (kind != kMaskBits && kind != kMaskAdded) return;
  const int64_t block = (static_cast<int64_t>(mask_head) * blocks.bit_blocks + strip) * blocks.key_pitch + key_block;
  uint2* bits = reinterpret_cast<uint2*>(blocks.bits + block * kMaskBlock * 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) bits[lane + 32 * r] = for_accumulators(rows[r]);
  if (!blocks.key_bits) return;
  uint2* key_bits = reinterpret_cast<uint2*>(blocks.key_bits + block * kMaskBlock * 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint64_t low = transpose_bits(static_cast<uint32_t>(rows[0] >> 32 * r));
    const uint64_t high = transpose_bits(static_cast<uint32_t>(rows[1] >> 32 * r));
    key_bits[lane + 32 * r] = for_accumulators(low | high << 32);
  }
}

template <typename E, typename T>
MaskElements<E> elements(const E* data, const AttentionMask<T>& mask, const AttentionSizes& s) {
  constexpr int kElements = kChunk<E>;
  return {.data = data,
          .batch = mask.batch,
          .head = mask.head,
          .query = mask.query,
          .key = mask.key,
          .batches = mask.batch ? s.batches : 1,
          .heads = mask.head ? s.heads : 1,
          .queries = static_cast<int>(s.queries),
          .keys = static_cast<int>(s.keys),
          .causal = mask.causal,
          .query_offset = static_cast<int>(mask.query_offset),
          .in_chunks = reinterpret_cast<uintptr_t>(data) % kChunkBytes == 0 && mask.key == 1 &&
                       mask.batch % kElements == 0 && mask.head % kElements == 0 && mask.query % kElements == 0};
}

}  // namespace

template <typename T>
Status find_mask_blocks(const MaskBlocks& blocks, const AttentionMask<T>& mask, const AttentionSizes& s,
                        Stream stream) {
  if (blocks.rows) {
    const int64_t rows = static_cast<int64_t>(blocks.heads) * blocks.bit_blocks * kMaskBlock;
    attention_mask_rows_kernel<T>
        <<<grid_size(ceil_div(rows, kWarps)), 32 * kWarps, 0, stream>>>(elements(mask.bias, mask, s), blocks);
  }
  const unsigned grid = grid_size(static_cast<int64_t>(blocks.heads) * blocks.bit_blocks * (blocks.key_pitch / kWarps));
  if (mask.allowed)
    attention_mask_blocks_kernel<bool><<<grid, 32 * kWarps, 0, stream>>>(elements(mask.allowed, mask, s), blocks);
  else
    attention_mask_blocks_kernel<T><<<grid, 32 * kWarps, 0, stream>>>(elements(mask.bias, mask, s), blocks);
  return cudaGetLastError();
}

#define INSTANTIATE(T) \
  template Status find_mask_blocks<T>(const MaskBlocks&, const AttentionMask<T>&, const AttentionSizes&, Stream);
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
