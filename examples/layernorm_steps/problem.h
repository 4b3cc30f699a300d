#pragma once

#include "harness.h"

// out = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + eps), row by row.
struct Layernorm {
  bfloat16* out;           // (N, C)
  float* mean;             // (N)
  float* rstd;             // (N)
  const bfloat16* x;       // (N, C)
  const bfloat16* weight;  // (C)
  const bfloat16* bias;    // (C)
  int rows;                // N
  int width;               // C
  float eps;
};

constexpr int kWidth = 768;  // for steps that keep a row in registers

void layernorm(const Layernorm& p);
