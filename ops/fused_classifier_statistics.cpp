#include "../csrc/fused_classifier_statistics.h"

#include "fp8.h"
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

void check_statistics(const char* op, const Tensor& statistics, const Tensor& logits) {
  check_same_device(op, "statistics", statistics, "logits", logits);
  check_dtype(op, "statistics", statistics, accumulate_dtype(logits));
  check_shape(op, "statistics", statistics,
              {std::max<int64_t>(statistics.dim() ? statistics.size(0) : 0, 1), 3, rows_of(logits)});
}

template <typename T, typename Out>
void from_statistics(const Launcher& launcher, const ClassifierShard& shard, const Tensor& losses,
                     const Tensor& dlogits, const Tensor& logits, const Tensor& statistics,
                     const OptionalTensor& dlosses) {
  using A = accumulate_t<T>;
  launcher.check(fused_classifier_from_statistics<T, Out>(
      {shard, pointer<A>(losses), pointer<Out>(dlogits), pointer<T>(logits), pointer<A>(statistics), statistics.size(0),
       pointer<A>(dlosses), dlosses && dlosses->dim() != 0},
      launcher.stream()));
}

Tensor fused_classifier_from_statistics_inplace_op(Tensor logits, const Tensor& targets, const Tensor& statistics,
                                                   int64_t first_column, int64_t vocab_size, int64_t ignore_index,
                                                   const OptionalTensor& dlosses) {
  constexpr const char* op = "fused_classifier_from_statistics_";
  ClassifierShard shard = checked_shard(op, logits, targets, first_column, vocab_size, ignore_index);
  check_no_overlap(op, "logits", logits);
  check_statistics(op, statistics, logits);
  check_dlosses(op, dlosses, "logits", logits);

  const Launcher launcher(op, logits);
  const Tensor logits_dense = dense(logits), targets_dense = dense(targets), statistics_dense = dense(statistics);
  const OptionalTensor dlosses_dense = dense(dlosses);
  shard.targets = pointer<void>(targets_dense);
  Tensor losses = allocate(leading_shape(logits), accumulate_dtype(logits), logits);
  dispatch_floating(logits, [&]<typename T>() {
    from_statistics<T, T>(launcher, shard, losses, logits_dense, logits_dense, statistics_dense, dlosses_dense);
  });
  if (!logits.is_contiguous()) torch::stable::copy_(logits, logits_dense);
  return losses;
}

std::tuple<Tensor, Tensor> fp8_classifier_from_statistics_op(const Tensor& logits, const Tensor& targets,
                                                             const Tensor& statistics, int64_t first_column,
                                                             int64_t vocab_size, int64_t ignore_index) {
  constexpr const char* op = "fp8_classifier_from_statistics";
  check_quantizable(op, "logits", logits);
  ClassifierShard shard = checked_shard(op, logits, targets, first_column, vocab_size, ignore_index);
  check_statistics(op, statistics, logits);

  const Launcher launcher(op, logits);
  const Tensor logits_dense = dense(logits), targets_dense = dense(targets), statistics_dense = dense(statistics);
  check_fp8_aligned(op, "logits", logits_dense);
  shard.targets = pointer<void>(targets_dense);
  const Tensor losses = allocate(leading_shape(logits), ScalarType::Float, logits);
  const Tensor dlogits = allocate(shape_of(logits), ScalarType::Float8_e5m2, logits);
  dispatch_fp8(logits, [&]<typename T>() {
    from_statistics<T, Fp8Dlogit>(launcher, shard, losses, dlogits, logits_dense, statistics_dense, std::nullopt);
  });
  return {losses, dlogits};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("fused_classifier_statistics", TORCH_BOX(&fused_classifier_statistics_op));
  m.impl("fused_classifier_from_statistics_", TORCH_BOX(&fused_classifier_from_statistics_inplace_op));
  m.impl("fp8_classifier_from_statistics", TORCH_BOX(&fp8_classifier_from_statistics_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
