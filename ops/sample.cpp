#include "../csrc/sample.h"

#include <limits>

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

constexpr const char* op = "sample_";

void check_numbers(const char* name, const Tensor& t, const Tensor& logits) {
  check_same_device(op, name, t, "logits", logits);
  check_dtype(op, name, t, ScalarType::Long);
  check_no_overlap(op, name, t);
  if (!t.is_contiguous()) fail(op, name, " is written in place and must be contiguous");
}

void sample_op(const Tensor& logits, const OptionalTensor& noise, const Tensor& sequences, const Tensor& lengths,
               double temperature, std::optional<int64_t> top_k, std::optional<double> top_p) {
  check_floating(op, "logits", logits);
  if (logits.dim() != 2 || logits.size(1) == 0)
    fail(op, "logits must have shape (B, V) with V at least 1, got ", describe(shape_of(logits)));
  const int64_t B = logits.size(0), V = logits.size(1);
  if (V > std::numeric_limits<int32_t>::max()) fail(op, "logits must have fewer than 2^31 columns, got ", V);
  if (noise) {
    check_same_device(op, "noise", *noise, "logits", logits);
    check_dtype(op, "noise", *noise, ScalarType::Float);
    check_shape(op, "noise", *noise, {B, V});
    if (!(temperature > 0)) fail(op, "temperature must be above 0 with noise, got ", temperature);
  }
  check_numbers("sequences", sequences, logits);
  check_numbers("lengths", lengths, logits);
  if (sequences.dim() != 2 || sequences.size(0) != B)
    fail(op, "sequences must have shape (", B, ", T), got ", describe(shape_of(sequences)));
  check_shape(op, "lengths", lengths, {B});
  if (top_k && *top_k < 1) fail(op, "top_k must be at least 1, got ", *top_k);
  if (top_p && !(*top_p > 0 && *top_p <= 1)) fail(op, "top_p must be above 0 and at most 1, got ", *top_p);

  const Launcher launcher(op, logits);
  const bool rows = logits.stride(1) == 1 || V == 1;
  const Tensor logits_rows = rows ? logits : torch::stable::contiguous(logits);
  const OptionalTensor noise_dense = dense(noise);
  dispatch_floating(logits, [&]<typename T>() {
    launcher.check(sample<T>({.sequences = pointer<int64_t>(sequences),
                              .lengths = pointer<int64_t>(lengths),
                              .logits = pointer<T>(logits_rows),
                              .noise = pointer<float>(noise_dense),
                              .batch = B,
                              .vocabulary = V,
                              .logits_stride = logits_rows.stride(0),
                              .sequence_length = sequences.size(1),
                              .temperature = temperature,
                              .top_k = std::min(top_k.value_or(V), V),
                              .top_p = top_p.value_or(1.0)},
                             launcher.stream()));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("sample_", TORCH_BOX(&sample_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
