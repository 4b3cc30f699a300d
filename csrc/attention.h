// Flash attention (Dao, FlashAttention-2, 2023): out = dropout(softmax(scale * q k^T + mask)) v, without storing the
// (Tq, Tk) matrices.
//
// Shapes: B batch, NH attention heads, KH key heads (NH is a multiple of KH; query head h reads key head h / (NH /
// KH)), Tq queries, Tk keys, HS head size.
#pragma once

#include "device.h"
#include "dropout.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T>
struct HeadsView {
  T* data;
  int64_t batch;
  int64_t head;
  int64_t token;

  constexpr T* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
};

// A query sees the keys that satisfy all conditions. If it sees no key, its out is 0 and its logsumexp is -inf.
template <typename T>
struct AttentionMask {
  bool causal = false;  // query i sees the keys j <= i + query_offset
  int64_t query_offset = 0;
  const int32_t* key_begin = nullptr;  // (B) or null: keys key_begin[b] <= j < key_end[b]
  const int32_t* key_end = nullptr;    // (B) or null
  // At most one of the two (B, NH, Tq, Tk) masks is given, with the strides below (0 for broadcast dimensions).
  const bool* allowed = nullptr;  // false hides the key
  const T* bias = nullptr;        // added to scale * q k^T; -inf hides
  int64_t batch = 0;
  int64_t head = 0;
  int64_t query = 0;
  int64_t key = 0;
};

struct AttentionSizes {
  int64_t batches;    // B
  int64_t heads;      // NH
  int64_t key_heads;  // KH
  int64_t queries;    // Tq
  int64_t keys;       // Tk
  int64_t head_size;  // HS
};

struct QueryHead {
  int64_t index;  // batch * NH + head
  int64_t batch;
  int64_t head;
  int64_t key_head;

  constexpr QueryHead(const AttentionSizes& s, int64_t index)
      : index(index), batch(index / s.heads), head(index % s.heads), key_head(head / (s.heads / s.key_heads)) {}
};

template <typename T>
struct AttentionForward {
  HeadsView<T> out;            // (B, NH, Tq, HS)
  accumulate_t<T>* logsumexp;  // (B, NH, Tq), dense
  HeadsView<const T> query;    // (B, NH, Tq, HS)
  HeadsView<const T> key;      // (B, KH, Tk, HS)
  HeadsView<const T> value;    // (B, KH, Tk, HS)
  AttentionSizes sizes;
  double scale;
  AttentionMask<T> mask;
  DropoutArguments dropout;
  bool tf32 = false;  // float32 matmuls in TF32 (CUDA)
  void* workspace = nullptr;
};

template <typename T>
struct AttentionBackward {
  HeadsView<T> dquery;
  HeadsView<T> dkey;
  HeadsView<T> dvalue;
  HeadsView<const T> dout;            // (B, NH, Tq, HS)
  const accumulate_t<T>* dlogsumexp;  // (B, NH, Tq), dense, or null
  HeadsView<const T> out;
  const accumulate_t<T>* logsumexp;
  HeadsView<const T> query;
  HeadsView<const T> key;
  HeadsView<const T> value;
  AttentionSizes sizes;
  double scale;
  AttentionMask<T> mask;
  DropoutArguments dropout;
  bool tf32 = false;
  void* workspace = nullptr;
};

// The softmax of a single key is constant, so without dlogsumexp the gradients of query and key are exactly 0.
template <typename T>
constexpr double gradient_scale(const AttentionBackward<T>& p) {
  return p.sizes.keys == 1 && !p.dlogsumexp ? 0 : p.scale;
}

// These functions return sizes in bytes. A workspace must have the alignment of memory from torch's allocators (at
// least 256 bytes on CUDA).
template <typename T>
int64_t attention_forward_workspace(const AttentionForward<T>& p);
template <typename T>
int64_t attention_backward_workspace(const AttentionBackward<T>& p);

template <typename T>
Status attention_forward(const AttentionForward<T>& p, Stream stream);
template <typename T>
Status attention_backward(const AttentionBackward<T>& p, Stream stream);

// For tests and debugging: the dense (B, NH, Tq, Tk) mask, true if the probability is kept.
Status attention_dropout_mask(bool* mask, const AttentionSizes& sizes, const DropoutArguments& dropout, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
