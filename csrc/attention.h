// Attention without its (T, T) matrices (Dao, FlashAttention-2, 2023): out = dropout(softmax(scale * q k^T + mask)) v.
//
// Shapes: B batch, NH heads, KH key heads (NH a multiple of KH; query head h reads key head h / (NH / KH)), Tq queries,
// Tk keys, HS head size.
#pragma once

#include "device.h"
#include "dropout.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// A (B, heads, T, HS) tensor in memory: element (b, h, t, i) is at data[b * batch + h * head + t * token + i].
template <typename T>
struct HeadsView {
  T* data;
  int64_t batch;
  int64_t head;
  int64_t token;
};

// Which keys a query sees. All conditions hold together; a query that sees no key has out = 0 and logsumexp = -inf.
template <typename T>
struct AttentionMask {
  bool causal = false;                 // query i sees the keys j <= i + query_offset
  int64_t query_offset = 0;            // the position of query 0 among the keys
  const int32_t* key_begin = nullptr;  // (B) or null: sequence b's keys are key_begin[b] <= j < key_end[b]
  const int32_t* key_end = nullptr;    // (B) or null
  // (B, NH, Tq, Tk) by these strides, 0 where it is broadcast; at most one of the two is given.
  const bool* allowed = nullptr;  // false: not seen
  const T* bias = nullptr;        // added to scale * q k^T; -inf: not seen
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

template <typename T>
struct AttentionForward {
  HeadsView<T> out;            // (B, NH, Tq, HS)
  accumulate_t<T>* logsumexp;  // (B, NH, Tq), dense: of the scaled and masked scores
  HeadsView<const T> query;    // (B, NH, Tq, HS)
  HeadsView<const T> key;      // (B, KH, Tk, HS)
  HeadsView<const T> value;    // (B, KH, Tk, HS)
  AttentionSizes sizes;
  double scale;
  AttentionMask<T> mask;
  DropoutArguments dropout;   // of the probabilities
  bool tf32 = false;          // float32 products may be rounded to TF32 (CUDA)
  void* workspace = nullptr;  // attention_forward_workspace bytes
};

template <typename T>
struct AttentionBackward {
  HeadsView<T> dquery;  // of the shapes of query, key and value
  HeadsView<T> dkey;
  HeadsView<T> dvalue;
  HeadsView<const T> dout;            // (B, NH, Tq, HS)
  const accumulate_t<T>* dlogsumexp;  // (B, NH, Tq), dense, or null: the gradient of logsumexp
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
  void* workspace = nullptr;  // attention_backward_workspace bytes
};

// The factor of dquery and dkey. A softmax over one key is constant: its gradient is 0, without roundings.
template <typename T>
constexpr double gradient_scale(const AttentionBackward<T>& p) {
  return p.sizes.keys == 1 && !p.dlogsumexp ? 0 : p.scale;
}

// Bytes of scratch memory that the launchers want; any alignment that an allocator gives (at least 256 bytes on CUDA).
template <typename T>
int64_t attention_forward_workspace(const AttentionForward<T>& p);
template <typename T>
int64_t attention_backward_workspace(const AttentionBackward<T>& p);

template <typename T>
Status attention_forward(const AttentionForward<T>& p, Stream stream);
template <typename T>
Status attention_backward(const AttentionBackward<T>& p, Stream stream);

// mask (B, NH, Tq, Tk), dense: true where dropout keeps the probability. For tests and for those who want to see it.
Status attention_dropout_mask(bool* mask, const AttentionSizes& sizes, const DropoutArguments& dropout, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
