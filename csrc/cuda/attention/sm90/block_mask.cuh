// The arrays that the attention kernels for sm_90a read in place of a mask. A kernel that runs before them reads the
// mask once. It classifies each block of 64 queries and 64 keys, and writes a bit for each element that says whether
// the query sees the key: by the mask, by causality, and because there is such a key.
//
// An additive mask may have values so low that they hide a key as -inf does, if the query sees any other key: Hugging
// Face's models write torch.finfo(dtype).min, -3.4e38 for bfloat16. The bits of those keys are 0. A query may also have
// only such values, of kFar and less, for example if all the keys before it are padding. Then
//
//   - in bfloat16, a score that is added to such a value is rounded away. The probabilities are uniform over the keys
//     that have the largest value: the bits show these keys, and their scores count as 0.
//   - in float16 the lowest value, -65504, does not round a score away: the difference from the largest value is added.
//
// The largest value is the row's shift, which its logsumexp contains, and the class of its blocks is kMaskAdded.
#pragma once

#include <type_traits>

#include "../../../attention.h"
#include "cuda/common/launch.cuh"

namespace gptkernels::cuda {

constexpr int kMaskBlock = 64;  // queries and keys of a block

enum MaskClass : int {
  kMaskHidden = 0,  // no query sees a key
  kMaskBits = 1,    // the bits say which keys are seen
  kMaskAdded = 2,   // the same, and there are values to add, or rows that have a shift
  kMaskSeen = 3,    // every query sees every key
};

// A row has a shift if it has no value above this: -2^100, or -2^10.
template <typename T>
constexpr float kFar = std::is_same_v<T, bfloat16> ? -1.2676506002282294e30f : -1024;
constexpr float kFarHidden = -1.3292279957849159e36f;  // -2^120: hides a key in bfloat16's rows without a shift

// A row's shift, 0 if it has none, and log2 of the number of keys that have this value.
struct MaskRow {
  float shift;
  float log2_count;
};

// The classes of two neighbouring rows of blocks, which a tile of 128 queries or keys has.
struct SeenBlocks {
  const uint8_t* first;
  const uint8_t* second;
  int words;  // each has 8 blocks

#ifdef __CUDACC__
  // Returns, for word i, a bit at the lowest byte of every kUnits neighbouring blocks that are not all hidden.
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
  // Returns the classes of kUnits blocks from `block` on: the first row's in the lower 16 bits, the second's in the
  // upper.
  template <int kUnits>
  __device__ uint32_t classes(int block) const {
    if constexpr (kUnits == 1) return first[block] | second[block] << 16;
    return *reinterpret_cast<const uint16_t*>(first + block) | *reinterpret_cast<const uint16_t*>(second + block) << 16;
  }
  // Calls apply(block) for the first of every kUnits blocks that are not all hidden, from the last on.
  template <int kUnits, typename Apply>
  __device__ void for_each_from_last(const Apply& apply) const {
#pragma unroll 1  // fewer registers
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
  uint8_t* key_classes;  // (mask heads, key_pitch, query_pitch): the same; for the backward
  uint16_t* bits;        // (mask heads, bit_blocks, key_pitch, 64 queries, 4), of classes kMaskBits and kMaskAdded
  uint16_t* key_bits;    // (mask heads, bit_blocks, key_pitch, 64 keys, 4): for the backward
  MaskRow* rows;         // (mask heads, bit_blocks, 64), or null: no row has a shift
  int batch, head;       // strides of mask heads
  int heads;             // mask heads
  int query_blocks;
  int bit_blocks;   // query_blocks, or 1 if all queries see the same keys
  int query_pitch;  // multiples of 8 blocks
  int key_pitch;

  // Places all arrays in `memory`, and returns how many bytes they need.
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
  // Return the classes of two rows of blocks, from a block of queries or of keys on.
  __device__ SeenBlocks of_queries(int of_head, int query_block) const {
    const uint8_t* row = classes + (static_cast<int64_t>(of_head) * query_pitch + query_block) * key_pitch;
    return {row, row + key_pitch, key_pitch / 8};
  }
  __device__ SeenBlocks of_keys(int of_head, int key_block) const {
    const uint8_t* row = key_classes + (static_cast<int64_t>(of_head) * key_pitch + key_block) * query_pitch;
    return {row, row + query_pitch, query_pitch / 8};
  }
  __device__ int bit_block(int query_block) const { return bit_blocks == 1 ? 0 : query_block; }

  // Returns a thread's bits of one of its rows, in the order of its accumulators (wgmma.cuh): bit 2t + e is column 8t +
  // 2c + e, where c is the thread's place among the four that have the row.
  __device__ uint32_t query_bits(int of_head, int query_block, int key_block, int row, int c) const {
    return bits[bits_at(of_head, query_block, key_block) + row * 4 + c];
  }
  // The same if rows are keys and columns are queries.
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

// Fills the arrays.
template <typename T>
Status find_mask_blocks(const MaskBlocks& blocks, const AttentionMask<T>& mask, const AttentionSizes& sizes,
                        Stream stream);

}  // namespace gptkernels::cuda
