#include "fused_classifier.h"

#include "../csrc/fused_classifier.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

int64_t check(const char* op, const Tensor& logits, const Tensor& targets, int64_t vocab_size,
              const OptionalTensor& dlosses) {
  check_logits_and_targets(op, logits, targets);
  const int64_t width = width_of(logits);
  if (width == 0) fail(op, "logits must have at least 1 column, got shape ", describe(shape_of(logits)));
  if (vocab_size != -1 && (vocab_size < 1 || vocab_size > width))
    fail(op, "vocab_size must be from 1 to ", width, " (the columns of logits), or -1 for all of them, got ",
         vocab_size);
  check_dlosses(op, dlosses, "logits", logits);
  return vocab_size == -1 ? width : vocab_size;
}

Tensor forward(const char* op, const Tensor& dlogits, const Tensor& logits, const Tensor& targets, int64_t vocab_size,
               int64_t ignore_index, const OptionalTensor& dlosses) {
  const Launcher launcher(op, logits);
  const Tensor targets_dense = dense(targets);
  const OptionalTensor dlosses_dense = dense(dlosses);
  Tensor losses = allocate(leading_shape(logits), accumulate_dtype(logits), logits);
  dispatch_floating(logits, [&]<typename T>() {
    launcher.check(fused_classifier_forward<T>({.losses = pointer<accumulate_t<T>>(losses),
                                                .dlogits = pointer<T>(dlogits),
                                                .logits = pointer<T>(logits),
                                                .targets = pointer<void>(targets_dense),
                                                .targets_are_int64 = targets.scalar_type() == ScalarType::Long,
                                                .dlosses = pointer<accumulate_t<T>>(dlosses_dense),
                                                .dlosses_per_row = dlosses && dlosses->dim() != 0,
                                                .rows = rows_of(logits),
                                                .width = width_of(logits),
                                                .vocab_size = vocab_size,
                                                .ignore_index = ignore_index},
                                               launcher.stream()));
  });
  return losses;
}

std::tuple<Tensor, Tensor> fused_classifier_op(const Tensor& logits, const Tensor& targets, int64_t vocab_size,
                                               int64_t ignore_index, const OptionalTensor& dlosses) {
  constexpr const char* op = "fused_classifier";
  const int64_t vocabulary = check(op, logits, targets, vocab_size, dlosses);
  Tensor dlogits = allocate(shape_of(logits), logits);
  Tensor losses = forward(op, dlogits, dense(logits), targets, vocabulary, ignore_index, dlosses);
  return {losses, dlogits};
}

Tensor fused_classifier_inplace_op(Tensor logits, const Tensor& targets, int64_t vocab_size, int64_t ignore_index,
                                   const OptionalTensor& dlosses) {
  constexpr const char* op = "fused_classifier_";
  const int64_t vocabulary = check(op, logits, targets, vocab_size, dlosses);
  check_no_overlap(op, "logits", logits);
  const Tensor logits_dense = dense(logits);
  Tensor losses = forward(op, logits_dense, logits_dense, targets, vocabulary, ignore_index, dlosses);
  if (!logits.is_contiguous()) torch::stable::copy_(logits, logits_dense);
  return losses;
}

void check_backward(const char* op, const Tensor& dlosses, const Tensor& dlogits) {
  check_dim_at_least(op, "dlogits", dlogits, 1);
  check_floating(op, "dlogits", dlogits);
  check_dlosses(op, dlosses, "dlogits", dlogits);
}

void backward(const char* op, const Tensor& scaled, const Tensor& dlosses, const Tensor& dlogits) {
  const Launcher launcher(op, dlogits);
  const Tensor dlosses_dense = dense(dlosses);
  dispatch_floating(dlogits, [&]<typename T>() {
    launcher.check(fused_classifier_backward<T>({.scaled = pointer<T>(scaled),
                                                 .dlogits = pointer<T>(dlogits),
                                                 .dlosses = pointer<accumulate_t<T>>(dlosses_dense),
                                                 .dlosses_per_row = dlosses.dim() != 0,
                                                 .rows = rows_of(dlogits),
                                                 .width = width_of(dlogits)},
                                                launcher.stream()));
  });
}

Tensor fused_classifier_backward_op(const Tensor& dlosses, const Tensor& dlogits) {
  constexpr const char* op = "fused_classifier_backward";
  check_backward(op, dlosses, dlogits);
  Tensor scaled = allocate(shape_of(dlogits), dlogits);
  backward(op, scaled, dlosses, dense(dlogits));
  return scaled;
}

void fused_classifier_backward_inplace_op(const Tensor& dlosses, Tensor dlogits) {
  constexpr const char* op = "fused_classifier_backward_";
  check_backward(op, dlosses, dlogits);
  check_no_overlap(op, "dlogits", dlogits);
  const Tensor dlogits_dense = dense(dlogits);
  backward(op, dlogits_dense, dlosses, dlogits_dense);
  if (!dlogits.is_contiguous()) torch::stable::copy_(dlogits, dlogits_dense);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("fused_classifier", TORCH_BOX(&fused_classifier_op));
  m.impl("fused_classifier_", TORCH_BOX(&fused_classifier_inplace_op));
  m.impl("fused_classifier_backward", TORCH_BOX(&fused_classifier_backward_op));
  m.impl("fused_classifier_backward_", TORCH_BOX(&fused_classifier_backward_inplace_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
