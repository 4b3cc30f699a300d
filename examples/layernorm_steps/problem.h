#pragma once

#include "harness.h"

// out = (x - mean) * rstd * weight + bias, with rstd = 1 / sqrt(variance + eps), for each of N rows of C columns.
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

constexpr int kWidth = 768;  // the steps that keep a row in registers are compiled for this width

// Each step defines this function.
void layernorm(const Layernorm& p);
