#pragma once

#include "harness.h"

// Softmax, cross-entropy and its gradient, in place. With p = softmax(logits) over the first V columns of each row,
//   losses = -log p[target],   logits = p - onehot(target).
// The columns V..Vp-1 are padding: their values are ignored, and their gradient is 0.
struct Classifier {
  float* losses;       // (N)
  bfloat16* logits;    // (N, Vp); become dlogits
  const int* targets;  // (N), below V
  int rows;            // N
  int width;           // Vp
  int vocab;           // V
};

constexpr int kWidth = 50304;  // GPT-2's vocabulary, padded to a multiple of 128
constexpr int kVocab = 50257;

void classifier(const Classifier& p);
