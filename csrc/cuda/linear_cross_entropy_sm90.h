// The head's logits, loss and gradient of the logits for sm_90a, without a pass over the logits: the product itself
// stores exponentials of the logits, which become the gradient by a factor for each row. bfloat16.
#pragma once

#include "../fused_classifier.h"

namespace gptkernels::cuda {

// With c of a row its target's logit, and E = exp(logit - c),
//   dlogits = factor E   but for the target's column,   factor = dloss / (the sum of E over the V columns).
// E at the target is minus the sum of the others. Padded columns, and all columns of a row without a loss, are 0.
//
// A row whose E overflows (a loss of more than 69) takes its logits and fused_classifier's kernel: E is its
// dlogits then, and its factor 1.
struct ExpClassifier : FusedClassifierForward<bfloat16> {  // dlogits take E, and are its logits for rows done again
  const bfloat16* x = nullptr;                             // (N, C), rows x_stride apart
  const bfloat16* weight = nullptr;                        // (Vp, C), rows weight_stride apart
  int64_t inner = 0;                                       // C
  int64_t x_stride = 0;
  int64_t weight_stride = 0;
  float* factors = nullptr;      // (N); or null: neither E nor factors are wanted, only the losses
  bfloat16* scaled_x = nullptr;  // (N, C), dense: factor x, so that dweight = E^T scaled_x; or null
};

// Whether this is possible, and faster than a product and a pass.
bool exp_classifier_takes(const ExpClassifier& p);

int64_t exp_classifier_workspace(const ExpClassifier& p);  // bytes

cudaError_t exp_classifier(const ExpClassifier& p, void* workspace, Stream stream);

// dx (N, C) = factors times the rows of `product`, which is E weight; both are dense, and aligned to 16 bytes.
cudaError_t exp_classifier_dx(bfloat16* dx, const float* product, const float* factors, int64_t rows, int64_t width,
                              Stream stream);

}  // namespace gptkernels::cuda
