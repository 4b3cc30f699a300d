#pragma once

#include "../../fused_classifier.h"

namespace gptkernels::cuda {

// Let E = exp(logit - c), where c is the logit of the row's target. Then
//
//   dlogits = factor * E in all columns but the target's,   factor = dloss / (sum of E over the V columns)
//
// E at the target is stored as minus the sum of E over the other columns, so that dlogits = factor * E there, too.
// Padded columns, and all columns of a row without a loss, are 0.
//
// `dlogits` (N, Vp) receives E. If E is out of range (a loss of more than 69), the row receives its gradient from
// fused_classifier's kernel instead, and the factor 1.
//
// dlosses must be null or one number for all rows (dlosses_per_row is false).
struct ExpClassifier : FusedClassifierForward<bfloat16> {
  const bfloat16* x = nullptr;       // (N, C)
  const bfloat16* weight = nullptr;  // (Vp, C)
  int64_t inner = 0;                 // C
  int64_t x_stride = 0;
  int64_t weight_stride = 0;
  float* factors = nullptr;      // (N); if null, only the losses are wanted, and E is not stored
  bfloat16* scaled_x = nullptr;  // (N, C), contiguous, or null: factor * x, so that dweight = E^T * scaled_x
};

// Whether exp_classifier() supports these arguments, and is faster than a matmul and a separate pass. The environment
// variable GPTKERNELS_MATMUL overrides the second condition (gemm/backend.h).
bool exp_classifier_supports(const ExpClassifier& p);

// Returns the size in bytes.
int64_t exp_classifier_workspace(const ExpClassifier& p);

cudaError_t exp_classifier(const ExpClassifier& p, void* workspace, Stream stream);

// dx (N, C) = factors * product, row by row. dx and product (E * weight) are contiguous and 16-byte aligned.
cudaError_t exp_classifier_dx(bfloat16* dx, const float* product, const float* factors, int64_t rows, int64_t width,
                              Stream stream);

}  // namespace gptkernels::cuda
