#pragma once

#include <string>

#include "../csrc/fused_classifier.h"
#include "matmul.h"

namespace gptkernels::GPTKERNELS_DEVICE {

enum class Reduction { kMean, kSum, kNone };

Reduction reduction_of(const char* op, const std::string& name);

// Accepts only 'mean' and 'sum'. With these, the forward can compute the gradients, and the backward only multiplies
// them by one number.
Reduction reduction_to_number(const char* op, const std::string& name);

struct CrossEntropy {
  const char* op;
  Matrix x;        // (N, C)
  Matrix weight;   // (Vp, C)
  Tensor targets;  // (N), dense
  int64_t vocab_size;
  int64_t ignore_index;
  int64_t chunk;  // rows of a chunk

  int64_t rows() const { return x.rows; }
  int64_t columns() const { return weight.rows; }
  ScalarType accumulate() const { return accumulate_dtype(x.tensor); }
};

CrossEntropy checked_cross_entropy(const char* op, const Tensor& x, const Tensor& weight, const Tensor& targets,
                                   int64_t vocab_size, int64_t ignore_index, int64_t chunk_size);

Tensor cross_entropy_loss(const CrossEntropy& p, Reduction reduction);

Matrix part(Matrix m, int64_t begin, int64_t count);

void chunk_logits(const Launcher& launcher, const CrossEntropy& p, const Matrix& logits, int64_t begin, int64_t count);

template <typename T>
T* advance(T* p, int64_t offset) {
  return p ? p + offset : nullptr;
}

// dlogits and dlosses are left null.
template <typename T, typename Out = T>
FusedClassifierForward<T, Out> chunk_classifier(const CrossEntropy& p, const Tensor& losses, const Matrix& logits,
                                                int64_t begin, int64_t count) {
  const bool wide = p.targets.scalar_type() == ScalarType::Long;
  const int64_t bytes = wide ? sizeof(int64_t) : sizeof(int32_t);
  return {.losses = advance(pointer<accumulate_t<T>>(losses), begin),
          .dlogits = nullptr,
          .logits = pointer<T>(logits.tensor) + logits.offset,
          .targets = advance(pointer<const char>(p.targets), begin * bytes),
          .targets_are_int64 = wide,
          .dlosses = nullptr,
          .dlosses_per_row = false,
          .rows = count,
          .width = p.columns(),
          .vocab_size = p.vocab_size,
          .ignore_index = p.ignore_index,
          .first_row = begin};
}

// The gradient of a row's loss: (dloss or 1) / (the number of rows that are not ignored) for "mean", otherwise dloss.
// For "mean", `finite` receives the same value, but 0 if all rows are ignored.
OptionalTensor row_gradient(const Launcher& launcher, const CrossEntropy& p, Reduction reduction,
                            const OptionalTensor& dloss, const OptionalTensor& finite = std::nullopt);

// Times scale.
Tensor total(const Launcher& launcher, const CrossEntropy& p, const Tensor& losses, const OptionalTensor& scale);

}  // namespace gptkernels::GPTKERNELS_DEVICE
