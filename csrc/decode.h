// One decoding step of GPT-2: the logits after the last token of each of B sequences, with the keys and values of
// earlier tokens in a cache.
//
// Shapes: B sequences, L layers, C channels, NH attention heads, HS = C / NH head size, V vocabulary, Vp rows of the LM
// head.
#pragma once

#include "device.h"
#include "gelu.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// Matrices are (out, in). Biases may be null.
template <typename T>
struct DecodeLayer {
  const T* norm_1_weight;  // (C)
  const T* norm_1_bias;
  const T* qkv_weight;  // (3C, C)
  const T* qkv_bias;
  const T* attn_proj_weight;  // (C, C)
  const T* attn_proj_bias;
  const T* norm_2_weight;  // (C)
  const T* norm_2_bias;
  const T* fc_weight;  // (4C, C)
  const T* fc_bias;
  const T* mlp_proj_weight;  // (C, 4C)
  const T* mlp_proj_bias;
};

template <typename T>
struct Decode {
  T* logits;                     // (B, Vp)
  T* keys_values;                // (L, 2, B, NH, capacity, HS); the op appends the last tokens' keys and values
  const int64_t* sequences;      // (B, length); -1, which sample_ writes if it cannot draw a token, is read as 0
  const int64_t* lengths;        // (B), including the last token, which is not in the cache yet
  const T* wte;                  // (V or more, C)
  const T* wpe;                  // (capacity or more, C)
  const DecodeLayer<T>* layers;  // (L), in host memory
  const T* norm_weight;          // (C)
  const T* norm_bias;            // (C) or null
  const T* lm_head;              // (Vp, C)
  int64_t batch;                 // B
  int64_t sequence_length;       // row length of `sequences`
  int64_t layer_count;           // L
  int64_t width;                 // C
  int64_t heads;                 // NH
  int64_t capacity;              // of the cache, in tokens per sequence
  int64_t vocabulary;            // V
  int64_t lm_head_rows;          // Vp
  double eps;
  GeluForm gelu;
  void* workspace;
};

constexpr int64_t kDecodeMaxBatch = 8;
constexpr int64_t kDecodeMaxHeadSize = 256;

// Returns the size in bytes.
template <typename T>
int64_t decode_workspace(const Decode<T>& p) {
  return static_cast<int64_t>(sizeof(accumulate_t<T>)) * p.batch * p.width * 8;
}

template <typename T>
Status decode(const Decode<T>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
