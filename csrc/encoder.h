// Token and position embeddings: out[b, t] = wte[tokens[b, t]] + wpe[t]; without wpe, a plain embedding.
//
// A token outside the vocabulary is never used as an index. The CPU's launchers answer with an error before they write;
// on CUDA, where the host does not see the tokens, a device-side assertion says it and ends the kernel.
#pragma once

#include "device.h"

namespace gptkernels::GPTKERNELS_DEVICE {

template <typename T, typename Token>
struct EncoderForward {
  T* out;               // (B, T, C)
  const Token* tokens;  // (B, T)
  const T* wte;         // (V, C)
  const T* wpe;         // (P, C), P >= T; or null: no positions
  int64_t batch;        // B
  int64_t length;       // T
  int64_t vocabulary;   // V
  int64_t width;        // C
};

template <typename T, typename Token>
struct EncoderBackward {
  T* dwte;              // (V, C)
  T* dwpe;              // (P, C) or null: not wanted
  const T* dout;        // (B, T, C)
  const Token* tokens;  // (B, T)
  void* workspace;      // encoder_backward_workspace<T, Token>(...) bytes
  int64_t batch;        // B
  int64_t length;       // T
  int64_t vocabulary;   // V
  int64_t positions;    // P
  int64_t width;        // C
};

template <typename T, typename Token>
Status encoder_forward(const EncoderForward<T, Token>& p, Stream stream);

// The most that a backward takes. CUDA's counts rows and their columns in 32 bits, and keeps sqrt(V) counters a warp in
// shared memory.
#ifdef GPTKERNELS_CUDA
constexpr int64_t kEncoderMostRows = int64_t(1) << 30;  // B * T, and P
constexpr int64_t kEncoderMostWords = int64_t(1) << 24;
constexpr int64_t kEncoderMostColumns = int64_t(1) << 27;
#else
constexpr int64_t kEncoderMostRows = INT64_MAX;
constexpr int64_t kEncoderMostWords = INT64_MAX;
constexpr int64_t kEncoderMostColumns = INT64_MAX;
#endif

// The bytes of scratch that a backward needs: the positions sorted by token and, on CUDA, partial sums of rows.
template <typename T, typename Token>
int64_t encoder_backward_workspace(int64_t batch, int64_t length, int64_t vocabulary, int64_t width);

template <typename T, typename Token>
Status encoder_backward(const EncoderBackward<T, Token>& p, Stream stream);

}  // namespace gptkernels::GPTKERNELS_DEVICE
