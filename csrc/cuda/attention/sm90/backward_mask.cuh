// Masks of the backward kernels for sm_90a: which blocks a warpgroup computes, and which scores are hidden.
#pragma once

#include "backward.cuh"

namespace gptkernels::cuda {

// With kBlocks, block_mask.cu has classified the mask, including causality. With kAdds, the mask's values are added to
// the scores.
template <bool causal, bool blocks, bool adds>
struct MaskPolicy {
  static constexpr bool kCausal = causal, kBlocks = blocks, kAdds = adds;
};
using NoMask = MaskPolicy<false, false, false>;
using CausalMask = MaskPolicy<true, false, false>;
using BoolMask = MaskPolicy<false, true, false>;
using AdditiveMask = MaskPolicy<false, true, true>;

#if GPTKERNELS_WGMMA

// ---- blocks that a warpgroup does not compute -----------------------------------------------------------------------

// Releases the next stage without using it, once it is full: an earlier arrival would count for the stage's previous
// block, which the other warpgroup may still use.
template <typename Barriers, int kStages>
__device__ void pass_over(const Barriers& full, const Barriers& empty, RingPosition<kStages>& ring) {
  barrier_wait(full[ring.slot], ring.phase);
  __syncwarp();  // lane 0 arrives for all
  barrier_arrive_if(threadIdx.x % 32 == 0, empty[ring.slot]);
  ring.advance();
}

template <bool kRowsAreKeys>
__device__ OwnBlock<1> own_block(const MaskBlocks& blocks, const MaskedBlock& block, int row) {
  const int own_row = threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
  const int row_block = row / kMaskBlock, column_block = block.first / kMaskBlock;
  return OwnBlock<1>::of(block, row_block % 2, [&](int, int r) {
    if constexpr (kRowsAreKeys)
      return blocks.bits_of_key(block.mask_head, column_block, row_block, own_row + 8 * r, threadIdx.x % 4);
    else
      return blocks.query_bits(block.mask_head, row_block, column_block, own_row + 8 * r, threadIdx.x % 4);
  });
}

// The blocks of a tile under a block mask. A block that is hidden only for this warpgroup is skipped, unless the ring
// could deadlock:
//
//   While a warpgroup waits for block j, it holds the stages of the two blocks i and h that it computed last (h < i <
//   j), because their matmuls may still run. Stages are filled in order, so block j has the stage of block j -
//   kStages. With h <= j - kStages the loader would wait for the warpgroup to release h before it loads j, and the
//   warpgroup would wait for the loader. Therefore j - h < kStages must hold, where j - h = (blocks skipped between
//   h and i) + 1 + (blocks skipped between i and j) + 1.
//
// A warpgroup therefore skips at most kStages - 3 blocks between h and j, and computes the next block even if all its
// scores are hidden. (Without a block mask at most one block is skipped, because one half of a tile sees at most one
// block more than the other half.)
template <int kStages, bool kRowsAreKeys>
struct SeenByWarpgroup {
  static constexpr int kMostPassed = kStages - 3;
  OwnBlock<1> own;
  int left;        // blocks left, including the current one
  int passed = 0;  // blocks skipped before the current one

  template <typename Shared>
  __device__ void find(const MaskBlocks& blocks, Shared& shared, RingPosition<kStages>& ring, int row) {
    const int passed_before = passed;
    for (passed = 0; left > 0; --left, ++passed) {
      barrier_wait(shared.block_full[ring.slot], ring.phase);
      own = own_block<kRowsAreKeys>(blocks, shared.masked[ring.slot], row);
      if (!own.hidden() || passed_before + passed == kMostPassed) return;
      __syncwarp();  // all lanes have read the MaskedBlock, which the loader may overwrite after lane 0's arrival
      barrier_arrive_if(threadIdx.x % 32 == 0, shared.block_empty[ring.slot]);
      ring.advance();
    }
  }
};

// ---- scores ---------------------------------------------------------------------------------------------------------

// Hides the columns before `limit` if kBefore, otherwise the columns from `limit` on.
template <bool kBefore>
__device__ void hide_columns(float (&scores)[32], int r, int limit) {
  limit -= 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c)
      if ((8 * i + c < limit) == kBefore) scores[4 * i + 2 * r + c] = -INFINITY;
}

// Rows are queries: `first_row` is the warpgroup's first row, `row` the first of the thread's two rows.
template <typename Mask, typename T>
__device__ void hide_keys(float (&scores)[32], const Sm90Backward<T>& p, const OwnBlock<1>& own, int head,
                          int first_row, int row, int first_key) {
  if (Mask::kBlocks && !own.seen()) {
    if (Mask::kAdds && own.adds())
      add_values(scores, p.problem, p.mask, head / p.problem.heads, head % p.problem.heads, row, first_key);
    hide(scores, own.bits);
  }
  int end = Mask::kBlocks ? INT_MAX : p.problem.keys;
  if constexpr (Mask::kCausal) end = min(end, first_row + p.problem.query_offset + 1);
  if (first_key + 64 > end) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int limit = p.problem.keys;
      if constexpr (Mask::kCausal) limit = min(limit, row + 8 * r + p.problem.query_offset + 1);
      hide_columns<false>(scores, r, limit - first_key);
    }
  }
}

// Rows are keys. Keys beyond the last key are not hidden, because their gradients are not stored.
template <typename Mask, typename T>
__device__ void hide_queries(float (&scores)[32], const Sm90Backward<T>& p, const OwnBlock<1>& own, int head,
                             int first_row, int row, int first_query) {
  if (Mask::kBlocks && !own.seen()) {
    if (Mask::kAdds && own.adds())
      add_values_of_keys(scores, p.problem, p.mask, head / p.problem.heads, head % p.problem.heads, row, first_query);
    hide(scores, own.bits);
  }
  if (Mask::kCausal && first_query + p.problem.query_offset < first_row + 63) {
#pragma unroll
    for (int r = 0; r < 2; ++r) hide_columns<true>(scores, r, row + 8 * r - p.problem.query_offset - first_query);
  }
}

#endif

}  // namespace gptkernels::cuda
