// What the attention kernels for sm_90a read in place of a mask. A kernel before them reads the mask once; it says of
// each block of 64 queries and 64 keys what a kernel has to do there, and has a bit for each element: whether the query
// sees the key, by the mask, by causality, and since there is such a key at all.
//
// An additive mask may have values so low that one of them is like -inf beside any other key that the query sees:
// Hugging Face's models write torch.finfo(dtype).min, -3.4e38 for bfloat16. Those bits are 0. Where a query has only
// such values (kFar and less, far beyond what a score of this size can be added to), its probabilities are uniform over
// the keys of the largest one: the bits are those keys, its scores count as 0 (a uniform row), and the value is its
// shift, what its logsumexp is without the sum. float16's lowest, -65504, is not beyond all scores: where a query has
// only values of -1024 and less, the largest is its shift too, and only what they differ from it is added.
#pragma once

#include <type_traits>

#include "../../../attention.h"
#include "cuda/common/launch.cuh"

namespace gptkernels::cuda {

constexpr int kMaskBlock = 64;  // queries, and keys

enum MaskClass : int {
  kMaskHidden = 0,  // no query sees a key
  kMaskBits = 1,    // the bits are all that there is to know, beside which rows are uniform
  kMaskAdded = 2,   // and there are values to add
  kMaskSeen = 3,    // every query sees every key
};

// A row that has a value above this is an ordinary one: -2^100, or -2^10.
template <typename T>
constexpr float kFar = std::is_same_v<T, bfloat16> ? -1.2676506002282294e30f : -1024;
constexpr float kFarHidden = -1.3292279957849159e36f;  // -2^120: in bfloat16's ordinary rows as good as -inf

// Of a row of the mask: its shift, 0 for ordinary rows, and log2 of the number of keys that have this value.
struct MaskRow {
  float shift;
  float log2_count;
};

// The classes of two neighbouring rows of blocks, a tile's.
struct SeenBlocks {
  const uint8_t* first;
  const uint8_t* second;
  int words;  // of 8 blocks

#ifdef __CUDACC__
  // Of word i: a bit at the lowest byte of every kUnits neighbouring blocks that are not all hidden.
  template <int kUnits>
  __device__ uint64_t seen(int i) const {
    uint64_t x = reinterpret_cast<const uint64_t*>(first)[i] | reinterpret_cast<const uint64_t*>(second)[i];
    x = (x | x >> 1) & 0x0101010101010101ull;
    return kUnits == 1 ? x : (x | x >> 8) & 0x0001000100010001ull;
  }
  template <int kUnits>
  __device__ int count() const {
    int n = 0;
    for (int i = 0; i < words; ++i) n += __popcll(seen<kUnits>(i));
    return n;
  }
  // What a kernel needs of `kUnits` blocks from `block` on: the classes of the first row in the lower 16 bits, those of
  // the second in the upper.
  template <int kUnits>
  __device__ uint32_t classes(int block) const {
    if constexpr (kUnits == 1) return first[block] | second[block] << 16;
    return *reinterpret_cast<const uint16_t*>(first + block) | *reinterpret_cast<const uint16_t*>(second + block) << 16;
  }
  // apply(block) of each kUnits blocks that are not all hidden, from the last on.
  template <int kUnits, typename Apply>
  __device__ void for_each_from_last(const Apply& apply) const {
    for (int i = words - 1; i >= 0; --i)
      for (uint64_t x = seen<kUnits>(i); x;) {
        const int bit = 63 - __clzll(static_cast<long long>(x));
        x ^= 1ull << bit;
        apply(i * 8 + bit / 8);
      }
  }
#endif
};

struct MaskBlocks {
  uint8_t* classes;      // (mask heads, query_pitch, key_pitch): those of no query or key are hidden
  uint8_t* key_classes;  // (mask heads, key_pitch, query_pitch): the same; for the backward
  uint16_t* bits;        // (mask heads, bit_blocks, key_pitch, 64 queries, 4), in blocks kMaskBits and kMaskAdded
  uint16_t* key_bits;    // (mask heads, bit_blocks, key_pitch, 64 keys, 4): for the backward
  MaskRow* rows;         // (mask heads, bit_blocks, 64), or null: all rows are ordinary
  int batch, head;       // mask heads from one batch, and from one head, to the next
  int heads;             // mask heads
  int query_blocks;
  int bit_blocks;   // query_blocks, or 1 where all queries see the same
  int query_pitch;  // multiples of 8 blocks
  int key_pitch;
  uint64_t* shifted;  // (mask heads, bit_blocks + 1, 2), of additive masks: a bit for each row that has a shift, twice
  int* has_added;     // whether a block is kMaskAdded; of additive masks

  // Places of all arrays in `memory`; returns the bytes they take.
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
    place(shifted, mask.bias ? mask_heads * (bit_blocks + 1) * 2 : 0);
    place(has_added, mask.bias ? 1 : 0);
    return bytes;
  }

#ifdef __CUDACC__
  __device__ int mask_head(int of_batch, int of_head) const { return of_batch * batch + of_head * head; }
  // The classes of two rows of blocks: of queries, and of keys.
  __device__ SeenBlocks of_queries(int of_head, int query_block) const {
    const uint8_t* row = classes + (static_cast<int64_t>(of_head) * query_pitch + query_block) * key_pitch;
    return {row, row + key_pitch, key_pitch / 8};
  }
  __device__ SeenBlocks of_keys(int of_head, int key_block) const {
    const uint8_t* row = key_classes + (static_cast<int64_t>(of_head) * key_pitch + key_block) * query_pitch;
    return {row, row + query_pitch, query_pitch / 8};
  }
  __device__ int bit_block(int query_block) const { return bit_blocks == 1 ? 0 : query_block; }

  // A thread's part of the bits of one of its rows, as it has accumulators (wgmma.cuh): bit 2t + e is column 8t + 2c +
  // e, c the thread's place in its four.
  __device__ uint32_t query_bits(int of_head, int query_block, int key_block, int row, int c) const {
    return bits[bits_at(of_head, query_block, key_block) + row * 4 + c];
  }
  // The same where rows are keys and columns queries.
  __device__ uint32_t bits_of_key(int of_head, int query_block, int key_block, int row, int c) const {
    return key_bits[bits_at(of_head, query_block, key_block) + row * 4 + c];
  }
  __device__ int64_t bits_at(int of_head, int query_block, int key_block) const {
    const int block = (of_head * bit_blocks + bit_block(query_block)) * key_pitch + key_block;  // below 2^30
    return static_cast<int64_t>(block) * (kMaskBlock * 4);
  }
  // Which of 64 queries have a shift, in 16 bytes as copies are; none after the last.
  __device__ uint64_t* shifted_rows(int of_head, int query_block) const {
    return shifted + (static_cast<int64_t>(of_head) * (bit_blocks + 1) + bit_block(query_block)) * 2;
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
