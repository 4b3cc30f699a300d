// Arrays that describe an attention mask to the attention kernels for sm_90a. The kernels of block_mask.cu read the
// mask, classify each block of 64 queries and 64 keys, and write bits: 1 if the query sees the key. The attention
// kernels read these arrays, and those values of an additive mask that change scores.
//
// An additive mask may hide keys by torch.finfo(dtype).min, as in Hugging Face's models: -3.4e38 in bfloat16, -65504 in
// float16. In bfloat16 the bits of such keys are 0, unless the row has a shift. In float16 only -inf makes a bit 0, and
// -65504 is added to the score.
//
// A row (a query) has a shift if all its values are at or below kLowValue, but not all are -inf, for example because
// all keys before the query are padding. The shift is the largest value:
//
//   - In bfloat16, adding a score to such a value rounds the score away, so the probabilities are uniform over the keys
//     whose value is the shift. The bits of these keys are 1, and their scores are replaced by 0.
//   - In float16, adding a score even to -65504 does not round the score away. The mask's value minus the shift is
//     added to the score.
//
// The logsumexp that the forward returns for such a row includes the shift.
#pragma once

#include <type_traits>

#include "../../../attention.h"
#include "cuda/common/launch.cuh"

namespace gptkernels::cuda {

constexpr int kMaskBlock = 64;  // queries or keys

enum MaskClass : int {
  kMaskHidden = 0,  // no key is seen
  kMaskBits = 1,    // the bits tell which keys are seen
  kMaskAdded = 2,   // as kMaskBits, and the mask changes scores (masks.cuh)
  kMaskSeen = 3,    // every key is seen
};

// -2^100 in bfloat16, -2^10 in float16.
template <typename T>
constexpr float kLowValue = std::is_same_v<T, bfloat16> ? -1.2676506002282294e30f : -1024;
// -2^120: in bfloat16, a value at or below it hides its key if the row has no shift.
constexpr float kHidingValue = -1.3292279957849159e36f;

// The shift is 0 if the row has none; log2_count is log2 of the number of keys whose value is the shift.
struct MaskRow {
  float shift;
  float log2_count;
};

// The classes of a tile of 128 queries or keys, which has two rows of blocks.
struct SeenBlocks {
  const uint8_t* first;
  const uint8_t* second;
  int words;  // of 8 classes

#ifdef __CUDACC__
  // Reads 8 classes, one byte each, of both rows of blocks. In the result, bit 0 of each group of kUnits bytes is 1 if
  // any of the group's blocks in either row is not hidden.
  template <int kUnits>
  __device__ uint64_t seen(int i) const {
    uint64_t x = reinterpret_cast<const uint64_t*>(first)[i] | reinterpret_cast<const uint64_t*>(second)[i];
    x = (x | x >> 1) & 0x0101010101010101ull;
    return kUnits == 1 ? x : (x | x >> 8) & 0x0001000100010001ull;
  }
  template <int kUnits>
  __device__ int count() const {
    int n = 0;
#pragma unroll 1
    for (int i = 0; i < words; ++i) n += __popcll(seen<kUnits>(i));
    return n;
  }
  // The lower 16 bits are the classes in the first row, the upper 16 bits those in the second row.
  template <int kUnits>
  __device__ uint32_t classes(int block) const {
    if constexpr (kUnits == 1) return first[block] | second[block] << 16;
    return *reinterpret_cast<const uint16_t*>(first + block) | *reinterpret_cast<const uint16_t*>(second + block) << 16;
  }
  template <int kUnits, typename Apply>
  __device__ void for_each_from_last(const Apply& apply) const {
#pragma unroll 1  // saves registers
    for (int i = words - 1; i >= 0; --i)
#pragma unroll 1
      for (uint64_t x = seen<kUnits>(i); x;) {
        const int bit = 63 - __clzll(static_cast<long long>(x));
        x ^= 1ull << bit;
        apply(i * 8 + bit / 8);
      }
  }
#endif
};

struct MaskBlocks {
  uint8_t* classes;      // (mask heads, query_pitch, key_pitch); blocks beyond the last query or key are hidden
  uint8_t* key_classes;  // `classes` transposed, for the backward; else null
  uint16_t* bits;      // (mask heads, bit_blocks, key_pitch, 64 queries, 4); only for classes kMaskBits and kMaskAdded
  uint16_t* key_bits;  // (mask heads, bit_blocks, key_pitch, 64 keys, 4), for the backward; else null
  MaskRow* rows;       // (mask heads, bit_blocks, 64); null for a bool mask
  int batch, head;     // the mask head of (b, h) is b * batch + h * head
  int heads;
  int query_blocks;
  int bit_blocks;   // query_blocks, or 1 if all queries see the same keys
  int query_pitch;  // a multiple of 8
  int key_pitch;    // a multiple of 8

  // Places the arrays in `memory`, unless it is null, and returns the number of bytes that they need.
  template <typename T>
  int64_t lay_out(const AttentionMask<T>& mask, const AttentionSizes& s, bool backward, void* memory) {
    const auto up = [](int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; };
    const int64_t mask_heads = (mask.head ? s.heads : 1) * (mask.batch ? s.batches : 1);
    head = mask.head ? 1 : 0;
    batch = mask.batch ? static_cast<int>(mask.head ? s.heads : 1) : 0;
    heads = static_cast<int>(mask_heads);
    query_blocks = static_cast<int>(ceil_div(s.queries, kMaskBlock));
    bit_blocks = mask.query == 0 && !mask.causal ? 1 : query_blocks;
    query_pitch = static_cast<int>(up(query_blocks, 8));
    key_pitch = static_cast<int>(up(ceil_div(s.keys, kMaskBlock), 8));
    int64_t bytes = 0;
    const auto place = [&]<typename E>(E*& array, int64_t count) {
      array = count && memory ? reinterpret_cast<E*>(static_cast<char*>(memory) + bytes) : nullptr;
      bytes += up(count * static_cast<int64_t>(sizeof(E)), 256);
    };
    const int64_t blocks = mask_heads * bit_blocks * key_pitch;
    place(classes, mask_heads * query_pitch * key_pitch);
    place(key_classes, backward ? mask_heads * query_pitch * key_pitch : 0);
    place(bits, blocks * kMaskBlock * 4);
    place(key_bits, backward ? blocks * kMaskBlock * 4 : 0);
    place(rows, mask.bias ? mask_heads * bit_blocks * kMaskBlock : 0);
    return bytes;
  }

#ifdef __CUDACC__
  __device__ int mask_head(int of_batch, int of_head) const { return of_batch * batch + of_head * head; }
  __device__ SeenBlocks of_queries(int of_head, int query_block) const {
    const uint8_t* row = classes + (static_cast<int64_t>(of_head) * query_pitch + query_block) * key_pitch;
    return {row, row + key_pitch, key_pitch / 8};
  }
  __device__ SeenBlocks of_keys(int of_head, int key_block) const {
    const uint8_t* row = key_classes + (static_cast<int64_t>(of_head) * key_pitch + key_block) * query_pitch;
    return {row, row + query_pitch, query_pitch / 8};
  }
  __device__ int bit_block(int query_block) const { return bit_blocks == 1 ? 0 : query_block; }

  // A thread's bits of a row, in the order of its accumulators (wgmma.cuh): bit 2t + e (t < 8, e < 2) is column 8t + 2c
  // + e, where c (0 to 3) is the thread's index among the four threads that hold the row.
  __device__ uint32_t query_bits(int of_head, int query_block, int key_block, int row, int c) const {
    return bits[bits_at(of_head, query_block, key_block) + row * 4 + c];
  }
  // query_bits() for scores whose rows are keys.
  __device__ uint32_t bits_of_key(int of_head, int query_block, int key_block, int row, int c) const {
    return key_bits[bits_at(of_head, query_block, key_block) + row * 4 + c];
  }
  __device__ int64_t bits_at(int of_head, int query_block, int key_block) const {
    const int block = (of_head * bit_blocks + bit_block(query_block)) * key_pitch + key_block;  // below 2^30
    return static_cast<int64_t>(block) * (kMaskBlock * 4);
  }
  __device__ MaskRow row(int of_head, int query) const {
    if (!rows) return {0, 0};
    const int block = bit_block(query / kMaskBlock);
    return rows[(static_cast<int64_t>(of_head) * bit_blocks + block) * kMaskBlock + query % kMaskBlock];
  }
#endif
};

template <typename T>
Status find_mask_blocks(const MaskBlocks& blocks, const AttentionMask<T>& mask, const AttentionSizes& sizes,
                        Stream stream);

}  // namespace gptkernels::cuda
