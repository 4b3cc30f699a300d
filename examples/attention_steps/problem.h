#pragma once

#include "harness.h"

// Causal self-attention, out = softmax(q k^T / sqrt(HS)) v for each sequence and head, where query i sees the keys
// 0..i. The queries, keys and values are packed as GPT-2's c_attn computes them.
struct Attention {
  bfloat16* out;        // (B, T, NH * HS)
  const bfloat16* qkv;  // (B, T, 3 * NH * HS)
  int batches;          // B
  int tokens;           // T, a multiple of 256
  int heads;            // NH
};

constexpr int kChannels = 64;        // HS
constexpr float kScale = 0.125f;     // 1 / sqrt(HS)
enum Part { kQuery, kKey, kValue };  // the parts of qkv

// Returns a token's HS channels of q, k or v. `head` counts the heads of all sequences.
__host__ __device__ inline const bfloat16* row_of(const Attention& p, Part part, int head, int token) {
  const int64_t row = int64_t(head / p.heads) * p.tokens + token;
  return p.qkv + ((row * 3 + part) * p.heads + head % p.heads) * kChannels;
}

__host__ __device__ inline bfloat16* out_of(const Attention& p, int head, int token) {
  const int64_t row = int64_t(head / p.heads) * p.tokens + token;
  return p.out + (row * p.heads + head % p.heads) * kChannels;
}

// Each step defines this function.
void attention(const Attention& p);
