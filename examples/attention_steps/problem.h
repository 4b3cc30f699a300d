#pragma once

#include "harness.h"

// Causal self-attention, out = softmax(q k^T / sqrt(HS)) v, of queries, keys and values that are packed as GPT-2's
// c_attn computes them.
struct Attention {
  bfloat16* out;        // (B, T, NH * HS)
  const bfloat16* qkv;  // (B, T, 3 * NH * HS)
  int batches;          // B
  int tokens;           // T, a multiple of 256
  int heads;            // NH
};

constexpr int kChannels = 64;     // HS
constexpr float kScale = 0.125f;  // 1 / sqrt(HS)
enum Part { kQuery, kKey, kValue };

// `head` counts the heads of all sequences.
__host__ __device__ inline const bfloat16* row_of(const Attention& p, Part part, int head, int token) {
  const int64_t row = int64_t(head / p.heads) * p.tokens + token;
  return p.qkv + ((row * 3 + part) * p.heads + head % p.heads) * kChannels;
}

__host__ __device__ inline bfloat16* out_of(const Attention& p, int head, int token) {
  const int64_t row = int64_t(head / p.heads) * p.tokens + token;
  return p.out + (row * p.heads + head % p.heads) * kChannels;
}

void attention(const Attention& p);
