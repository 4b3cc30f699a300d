// out[b, t] = wte[tokens[b, t]] + wpe[t], or 0 for the token of another shard.
//
// A warp computes 512 bytes of each of two rows if it uses packs. Persistent grids, and more rows per warp (which could
// share a row of wpe), read and write in bursts and were up to 10 % slower.
#pragma once

#include <cstdint>

#include "../../encoder.h"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "slab.cuh"
#include "token.cuh"

namespace gptkernels::cuda {

constexpr int kForwardThreads = 128;
constexpr int kForwardWarps = kForwardThreads / kWarp;
constexpr int kForwardRows = 2;  // rows per warp
constexpr int kForwardBlockRows = kForwardWarps * kForwardRows;

// Thread blocks are numbered slab by slab, and within a slab sequence by sequence.
struct ForwardBlocks {
  unsigned per_sequence;
  unsigned per_slab;  // per_sequence * sequences
};

template <typename T, typename Token, int kVec>
__global__ void __launch_bounds__(kForwardThreads)
    encoder_forward_slab_kernel(const EncoderForward<T, Token> p, const ForwardBlocks blocks) {
  const unsigned slab = blockIdx.x / blocks.per_slab;
  const unsigned block = blockIdx.x - slab * blocks.per_slab;
  const unsigned sequence = block / blocks.per_sequence;
  const unsigned part = block - sequence * blocks.per_sequence;
  const int64_t position = int64_t(part) * kForwardBlockRows + threadIdx.x / kWarp;
  if (position >= p.length) return;
  const int64_t row = sequence * p.length + position;
  const SlabColumns<kVec, kWarp> at(slab, p.width);
  // If a warp's second row is beyond the sequence, the warp computes its first row twice.
  int64_t offsets[kForwardRows];
  Token tokens[kForwardRows];
#pragma unroll
  for (int r = 0; r < kForwardRows; ++r) {
    offsets[r] = position + r * kForwardWarps < p.length ? r * kForwardWarps : 0;
    tokens[r] = p.tokens[row + offsets[r]];
  }
  bool all_inside = true;
#pragma unroll
  for (int r = 0; r < kForwardRows; ++r) all_inside &= tokens[r] >= 0 && tokens[r] < p.vocabulary;
  if (!all_inside)
    for (int r = 0; r < kForwardRows; ++r)
      if (!in_vocabulary(tokens[r], p.vocabulary, p.wpe ? "encoder" : "embedding", row + offsets[r])) return;
  Packed<T, kVec> embeddings[kForwardRows], positions[kForwardRows];
#pragma unroll
  for (int r = 0; r < kForwardRows; ++r) {
    const int64_t local = tokens[r] - p.first_token;
    const bool here = local >= 0 && local < p.table_rows;
    embeddings[r] = positions[r] = {};
    if (here) embeddings[r] = load_from_l2<kVec>(p.wte + local * p.width + at.column);
    if (here && p.wpe) positions[r] = load<kVec>(p.wpe + (position + offsets[r]) * p.width + at.column);
  }
#pragma unroll
  for (int r = 0; r < kForwardRows; ++r) {
    if (p.wpe) {
      accumulate_t<T> sum[kVec];
      widen(sum, embeddings[r]);
      add_pack(sum, positions[r]);
      embeddings[r] = narrow<T>(sum);
    }
    stream<kVec>(p.out + (row + offsets[r]) * p.width + at.column, embeddings[r]);
  }
}

}  // namespace gptkernels::cuda
