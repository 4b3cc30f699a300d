#include "../csrc/fused_classifier_statistics.h"

#include "fused_classifier.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

ClassifierShard checked_shard(const char* op, const Tensor& logits, const Tensor& targets, int64_t first_column,
                              int64_t vocab_size, int64_t ignore_index) {
  check_logits_and_targets(op, logits, targets);
  if (first_column < 0) fail(op, "first_column must not be negative, got ", first_column);
  if (vocab_size < 1) fail(op, "vocab_size must be at least 1, got ", vocab_size);
  return {.targets = nullptr,
          .targets_are_int64 = targets.scalar_type() == ScalarType::Long,
          .rows = rows_of(logits),
          .width = width_of(logits),
          .first_column = first_column,
          .vocab_size = vocab_size,
          .ignore_index = ignore_index};
}

Tensor fused_classifier_statistics_op(const Tensor& logits, const Tensor& targets, int64_t first_column,
                                      int64_t vocab_size, int64_t ignore_index) {
  constexpr const char* op = "fused_classifier_statistics";
  ClassifierShard shard = checked_shard(op, logits, targets, first_column, vocab_size, ignore_index);

  const Launcher launcher(op, logits);
  const Tensor logits_dense = dense(logits), targets_dense = dense(targets);
  shard.targets = pointer<void>(targets_dense);
  Tensor statistics = allocate({3, shard.rows}, accumulate_dtype(logits), logits);
  dispatch_floating(logits, [&]<typename T>() {
    launcher.check(fused_classifier_statistics<T>(
        {shard, pointer<accumulate_t<T>>(statistics), pointer<T>(logits_dense)}, launcher.stream()));
  });
  return statistics;
}

Tensor fused_classifier_from_statistics_inplace_op(Tensor logits, const Tensor& targets, const Tensor& statistics,
                                                   int64_t first_column, int64_t vocab_size, int64_t ignore_index,
                                                   const OptionalTensor& dlosses) {
  constexpr const char* op = "fused_classifier_from_statistics_";
  ClassifierShard shard = checked_shard(op, logits, targets, first_column, vocab_size, ignore_index);
  check_no_overlap(op, "logits", logits);
  check_same_device(op, "statistics", statistics, "logits", logits);
  check_dtype(op, "statistics", statistics, accumulate_dtype(logits));
  check_shape(op, "statistics", statistics,
              {std::max<int64_t>(statistics.dim() ? statistics.size(0) : 0, 1), 3, shard.rows});
  check_dlosses(op, dlosses, "logits", logits);

  const Launcher launcher(op, logits);
  const Tensor logits_dense = dense(logits), targets_dense = dense(targets), statistics_dense = dense(statistics);
  const OptionalTensor dlosses_dense = dense(dlosses);
  shard.targets = pointer<void>(targets_dense);
  Tensor losses = allocate(leading_shape(logits), accumulate_dtype(logits), logits);
  dispatch_floating(logits, [&]<typename T>() {
    using A = accumulate_t<T>;
    launcher.check(fused_classifier_from_statistics<T>(
        {shard, pointer<A>(losses), pointer<T>(logits_dense), pointer<A>(statistics_dense), statistics.size(0),
         pointer<A>(dlosses_dense), dlosses && dlosses->dim() != 0},
        launcher.stream()));
  });
  if (!logits.is_contiguous()) torch::stable::copy_(logits, logits_dense);
  return losses;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("fused_classifier_statistics", TORCH_BOX(&fused_classifier_statistics_op));
  m.impl("fused_classifier_from_statistics_", TORCH_BOX(&fused_classifier_from_statistics_inplace_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
