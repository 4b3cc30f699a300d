// Mask policies of the forward. KeyTiles finds the key tiles that the loader loads for a query tile, and Scores hides
// the masked scores of a warpgroup's 64 queries.
#pragma once

#include "masks.cuh"

namespace gptkernels::cuda {

struct Queries {
  int first;
  int head;
  int batch;
};

// Query i sees key j if j < keys and, if kCausal, j <= i + query_offset.
template <bool kCausal>
struct PlainMask {
  static constexpr bool kBlocks = false, kAdds = false, kLongestLast = kCausal;

#if GPTKERNELS_WGMMA

  template <typename T>
  __device__ static int end(const Sm90Problem<T>& problem, int i) {
    return kCausal ? min(problem.keys, i + problem.query_offset + 1) : problem.keys;
  }

  // The number of key tiles that the `count` queries from `first` on see, but at least 1.
  template <int kKeys, typename T>
  __device__ static int key_tiles(const Sm90Problem<T>& problem, int first, int count) {
    return max((end(problem, first + count - 1) + kKeys - 1) / kKeys, 1);
  }

  template <int kKeys>
  struct KeyTiles {
    int count;

    template <typename T>
    __device__ KeyTiles(const Sm90Problem<T>& problem, const Sm90Mask&, const Queries& of, int queries)
        : count(key_tiles<kKeys>(problem, of.first, queries)) {}
    template <typename Load>
    __device__ void for_each_from_last(const Load& load) const {
#pragma unroll 1  // saves registers
      for (int tile = count - 1; tile >= 0; --tile) load(tile);
    }
  };

  template <int kKeys>
  struct Scores {
    int whole;  // number of key tiles that all of the warpgroup's queries see completely

    template <typename T>
    __device__ void start(const Sm90Problem<T>& problem, const Queries& queries) {
      whole = end(problem, queries.first) / kKeys;
    }
    __device__ int first_key(int tile) const { return tile * kKeys; }
    template <typename T>
    __device__ bool sees_none(const Sm90Problem<T>& problem, const Queries& queries, int tile) const {
      return kCausal && tile * kKeys >= end(problem, queries.first + 63);
    }
    template <typename T, int n>
    __device__ void hide(float (&scores)[n], const Sm90Problem<T>& problem, const Sm90Mask&, const Queries& queries,
                         int own_row, int lane, int tile) const {
      if (tile < whole) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first_key = tile * kKeys + 2 * (lane % 4);
        const int limit = end(problem, queries.first + own_row + 8 * r) - first_key;
#pragma unroll
        for (int i = 0; i < n / 4; ++i) {
          if (8 * i >= limit) scores[4 * i + 2 * r] = -INFINITY;
          if (8 * i + 1 >= limit) scores[4 * i + 2 * r + 1] = -INFINITY;
        }
      }
    }
  };
#endif
};

// The bits of block_mask.cuh include the causal mask and are 0 beyond the last key.
template <bool kAdditive>
struct BlockMask {
  static constexpr bool kBlocks = true, kAdds = kAdditive, kLongestLast = true;

#if GPTKERNELS_WGMMA

  template <int kKeys>
  struct KeyTiles {
    static constexpr int kUnits = kKeys / kMaskBlock;
    int mask_head;
    SeenBlocks seen;
    int seen_count;
    int count;  // at least 1: if no key tile is seen, the first one is loaded, with all of its scores hidden

    template <typename T>
    __device__ KeyTiles(const Sm90Problem<T>&, const Sm90Mask& mask, const Queries& of, int)
        : mask_head(mask.blocks.mask_head(of.batch, of.head)),
          seen(mask.blocks.of_queries(mask_head, of.first / kMaskBlock)),
          seen_count(seen.count<kUnits>()),
          count(max(seen_count, 1)) {}
    template <typename Load>
    __device__ void for_each_from_last(const Load& load) const {
      seen.for_each_from_last<kUnits>([&](int unit) { load(unit / kUnits); });
      if (seen_count == 0) load(0);
    }
    __device__ MaskedBlock block(int tile) const {
      return {tile * kKeys, seen.classes<kUnits>(tile * kUnits), mask_head, 0};
    }
  };

  template <int kKeys>
  struct Scores {
    static constexpr int kUnits = kKeys / kMaskBlock;
    OwnBlock<kUnits> own = {}, next = {};  // current and next key tile

    template <typename T>
    __device__ void start(const Sm90Problem<T>&, const Queries&) {}
    __device__ void look_ahead(const Sm90Mask& mask, const MaskedBlock& block, int first_query, int warpgroup,
                               int own_row) {
      next = OwnBlock<kUnits>::of(block, warpgroup, [&](int unit, int r) {
        return mask.blocks.query_bits(block.mask_head, first_query / kMaskBlock, block.first / kMaskBlock + unit,
                                      own_row + 8 * r, threadIdx.x % 4);
      });
    }
    __device__ void advance() { own = next; }
    __device__ int first_key(int) const { return own.first; }
    template <typename T>
    __device__ bool sees_none(const Sm90Problem<T>&, const Queries&, int) const {
      return false;
    }
    template <typename T, int n>
    __device__ void hide(float (&scores)[n], const Sm90Problem<T>& problem, const Sm90Mask& mask,
                         const Queries& queries, int own_row, int, int) const {
      if (own.seen()) return;
      if (kAdds && own.adds())
        add_values(scores, problem, mask, queries.batch, queries.head, queries.first + own_row, own.first);
      ::gptkernels::cuda::hide(scores, own.bits);
    }
  };
#endif
};

}  // namespace gptkernels::cuda
