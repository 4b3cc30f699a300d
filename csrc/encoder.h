// Token and position embeddings: out[b, t] = wte[tokens[b, t]] + wpe[t]. Without wpe the op is a plain embedding.
//
// wte may be a shard of a larger table, with the rows of tokens first_token, first_token + 1, ... The rows of `out` of
// other shards' tokens are then 0. Only one shard contributes to a row of `out`, so the sum over the shards is exact.
//
// The CPU launchers check all tokens before they write anything, and return an error if one is outside the vocabulary.
// On CUDA the host does not read the tokens: the kernel prints the error and fails a device-side assertion.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T, typename Token>
struct EncoderForward {
  T* out;               // (B, T, C)
  const Token* tokens;  // (B, T)
  const T* wte;         // (R, C), the rows of tokens first_token to first_token + R - 1
  const T* wpe;         // (P, C), P >= T, or null
  int64_t batch;        // B
  int64_t length;       // T
  int64_t vocabulary;   // V; tokens must be in [0, V)
  int64_t width;        // C
  int64_t first_token;
  int64_t table_rows;  // R
};

template <typename T, typename Token>
struct EncoderBackward {
  T* dwte;              // (R, C), the rows of tokens first_token to first_token + R - 1
  T* dwpe;              // (P, C), P >= T, or null
  const T* dout;        // (B, T, C)
  const Token* tokens;  // (B, T)
  void* workspace;
  int64_t batch;       // B
  int64_t length;      // T
  int64_t vocabulary;  // R
  int64_t positions;   // P
  int64_t width;       // C
  bool accumulate;     // adds to dwte, whose rows for tokens that do not occur stay unchanged
  int64_t first_token;
  bool is_shard;  // other tokens are left out of dwte, instead of being an error; dwpe is the sum over all tokens
};

// Code that does not read the tokens has this argument, and so is compiled once for both dtypes of tokens.
template <typename T>
using EncoderSums = EncoderBackward<T, void>;

template <typename T, typename Token>
Status encoder_forward(const EncoderForward<T, Token>& p, Stream stream);

// Limits of the backward. On CUDA, its row and column indices have 32 bits, and each warp of its sort keeps about
// sqrt(Vp) counters in shared memory.
#ifdef GPTKERNELS_CUDA
constexpr int64_t kEncoderMaxRows = int64_t(1) << 30;  // of B * T and of P
constexpr int64_t kEncoderMaxVocabulary = int64_t(1) << 24;
constexpr int64_t kEncoderMaxColumns = int64_t(1) << 27;
#else
constexpr int64_t kEncoderMaxRows = INT64_MAX;
constexpr int64_t kEncoderMaxVocabulary = INT64_MAX;
constexpr int64_t kEncoderMaxColumns = INT64_MAX;
#endif

// Returns the size in bytes.
template <typename T, typename Token>
int64_t encoder_backward_workspace(int64_t batch, int64_t length, int64_t vocabulary, int64_t width);

template <typename T, typename Token>
Status encoder_backward(const EncoderBackward<T, Token>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
