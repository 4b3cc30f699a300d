// The LM head's loss and the gradient of its logits, in bfloat16 for sm_90a, without a separate pass over the logits:
// the matmul stores exponentials of the logits, and one factor per row turns them into the gradient.
#pragma once

#include "../../fused_classifier.h"

namespace gptkernels::cuda {

// Let E = exp(logit - c), where c is the logit of the row's target. Then
//
//   dlogits = factor * E in all columns but the target's,   factor = dloss / (sum of E over the V columns)
//
// E at the target is set to minus the sum of E over the other columns, so that dlogits = factor * E there, too. Padded
// columns, and all columns of a row without a loss, are 0.
//
// `dlogits` (N, Vp) receives E. If E overflows in a row (a loss of more than 69), the row of `dlogits` receives the
// logits again, which fused_classifier's kernel replaces by the gradient. The factor of this row is 1.
//
// dlosses must be null or one number for all rows (dlosses_per_row is false).
struct ExpClassifier : FusedClassifierForward<bfloat16> {
  const bfloat16* x = nullptr;       // (N, C), row stride x_stride
  const bfloat16* weight = nullptr;  // (Vp, C), row stride weight_stride
  int64_t inner = 0;                 // C
  int64_t x_stride = 0;
  int64_t weight_stride = 0;
  float* factors = nullptr;      // (N), or null if only the losses are wanted; E is then not stored
  bfloat16* scaled_x = nullptr;  // (N, C), contiguous: factor * x, so that dweight = E^T * scaled_x; or null
};

// Returns whether exp_classifier() supports these arguments and is faster than a matmul and a separate pass.
bool exp_classifier_supports(const ExpClassifier& p);

// Returns the size of exp_classifier's workspace in bytes.
int64_t exp_classifier_workspace(const ExpClassifier& p);

// Computes losses, E, factors and scaled_x.
cudaError_t exp_classifier(const ExpClassifier& p, void* workspace, Stream stream);

// Computes dx (N, C) = factors * product, row by row, where `product` is E * weight. dx and product are contiguous and
// 16-byte aligned.
cudaError_t exp_classifier_dx(bfloat16* dx, const float* product, const float* factors, int64_t rows, int64_t width,
                              Stream stream);

}  // namespace gptkernels::cuda
