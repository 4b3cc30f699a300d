// cross_entropy(x @ weight^T, targets) in chunks of rows, without materializing all logits. A chunk's logits are
// overwritten by their gradient, or by exponentials, which a factor per row turns into the gradient. The host reads no
// tensor's values, so a CUDA graph can replay the op.

#include "linear_cross_entropy.h"

#include "../csrc/linear_cross_entropy.h"
#ifdef GPTKERNELS_CUDA
#include "../csrc/cuda/loss/sm90_linear_cross_entropy.h"
#endif

namespace gptkernels::GPTKERNELS_DEVICE {

// ---- arguments ------------------------------------------------------------------------------------------------------

Reduction reduction_of(const char* op, const std::string& name) {
  if (name == "mean") return Reduction::kMean;
  if (name == "sum") return Reduction::kSum;
  if (name == "none") return Reduction::kNone;
  fail(op, "reduction must be 'mean', 'sum' or 'none', got '", name, "'");
}

Reduction reduction_to_number(const char* op, const std::string& name) {
  const Reduction reduction = reduction_of(op, name);
  if (reduction == Reduction::kNone) fail(op, "reduction must be 'mean' or 'sum', got 'none'");
  return reduction;
}

namespace {

// Returns the number of rows of a chunk. Chunks have about equal sizes, at most 2^28 logits (512 MiB in bfloat16), and
// a multiple of 128 rows for efficient matmuls. Each chunk costs a pass over the float32 gradient of the weight, so a
// few large chunks are best. With GPT-2's vocabulary a chunk has at most 5248 rows, and the pass takes 5 % of the time
// of the chunk's three matmuls.
int64_t default_chunk(int64_t rows, int64_t columns) {
  constexpr int64_t kMaxLogits = int64_t(1) << 28;
  constexpr int64_t kMultiple = 128;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t most = std::max(kMaxLogits / columns / kMultiple * kMultiple, kMultiple);
  const int64_t chunks = ceil_div(rows, most);
  return chunks < 2 ? most : ceil_div(ceil_div(rows, chunks), kMultiple) * kMultiple;
}

}  // namespace

CrossEntropy checked_cross_entropy(const char* op, const Tensor& x, const Tensor& weight, const Tensor& targets,
                                   int64_t vocab_size, int64_t ignore_index, int64_t chunk_size) {
  check_dim_at_least(op, "x", x, 1);
  check_floating(op, "x", x);
  check_like(op, "weight", weight, "x", x);
  if (weight.dim() != 2 || weight.size(1) != width_of(x))
    fail(op, "weight must have shape (vocabulary, ", width_of(x), "), got ", describe(shape_of(weight)));
  check_index(op, "targets", targets);
  check_same_device(op, "targets", targets, "x", x);
  check_shape(op, "targets", targets, leading_shape(x));
  const int64_t columns = weight.size(0);
  if (columns == 0) fail(op, "weight must have at least 1 row, got shape ", describe(shape_of(weight)));
  if (vocab_size != -1 && (vocab_size < 1 || vocab_size > columns))
    fail(op, "vocab_size must be from 1 to ", columns, " (the rows of weight), or -1 for all of them, got ",
         vocab_size);
  if (chunk_size != -1 && chunk_size < 1)
    fail(op, "chunk_size must be at least 1, or -1 for a size chosen here, got ", chunk_size);
  const Matrix rows = matrix(x);
  return {.op = op,
          .x = rows,
          .weight = matrix(weight),
          .targets = dense(targets),
          .vocab_size = vocab_size == -1 ? columns : vocab_size,
          .ignore_index = ignore_index,
          .chunk = chunk_size == -1 ? default_chunk(rows.rows, columns) : chunk_size};
}

// ---- one chunk ------------------------------------------------------------------------------------------------------

Matrix part(Matrix m, int64_t begin, int64_t count) {
  m.offset += begin * m.row_stride;
  m.rows = count;
  return m;
}

void chunk_logits(const Launcher& launcher, const CrossEntropy& p, const Matrix& logits, int64_t begin, int64_t count) {
  matmul(launcher, logits, part(p.x, begin, count), p.weight.transposed());
}

namespace {

void classify(const Launcher& launcher, const CrossEntropy& p, const Tensor& losses, const Matrix& logits,
              const Matrix& dlogits, const OptionalTensor& dlosses, int64_t begin, int64_t count) {
  chunk_logits(launcher, p, logits, begin, count);
  const bool per_row = dlosses && dlosses->dim() != 0;
  dispatch_floating(logits.tensor, [&]<typename T>() {
    auto classifier = chunk_classifier<T>(p, losses, logits, begin, count);
    classifier.dlogits = pointer<T>(dlogits.tensor) + dlogits.offset;
    classifier.dlosses = advance(pointer<accumulate_t<T>>(dlosses), per_row ? begin : 0);
    classifier.dlosses_per_row = per_row;
    launcher.check(fused_classifier_forward(classifier, launcher.stream()));
  });
}

// ---- all chunks -----------------------------------------------------------------------------------------------------

struct Gradients {
  bool want_x;
  bool want_weight;
  Tensor dx;       // of x's shape
  Tensor dweight;  // (Vp, C), in the dtype of weight or of the sums

  Gradients(const Tensor& x, const Tensor& weight, bool want_x, bool want_weight)
      : Gradients(x, weight, want_x, want_weight, weight.scalar_type()) {}

  Gradients(const Tensor& x, const Tensor& weight, bool want_x, bool want_weight, ScalarType dweight_dtype)
      : want_x(want_x),
        want_weight(want_weight),
        dx(allocate_if(want_x, shape_of(x), x)),
        dweight(allocate(want_weight ? shape_of(weight) : Shape{0}, dweight_dtype, weight)) {}
};

#ifdef GPTKERNELS_CUDA

// Computes the losses and dx of rows [begin, begin + count). dlogits receives the gradient of the logits, divided by a
// factor for each row. Returns the rows of x times these factors, for dweight, or nullopt if no kernel supports the
// arguments.
std::optional<Matrix> exponentials(const Launcher& launcher, const CrossEntropy& p, const Tensor& losses,
                                   const Matrix& dlogits, const OptionalTensor& dloss, const Gradients& gradients,
                                   int64_t begin, int64_t count) {
  const Matrix x = part(p.x, begin, count);
  const bool rows_only = x.column_stride == 1 && p.weight.column_stride == 1 && !(dloss && dloss->dim() != 0);
  if (x.tensor.scalar_type() != ScalarType::BFloat16 || !rows_only) return std::nullopt;
  ExpClassifier classifier = {chunk_classifier<bfloat16>(p, losses, dlogits, begin, count)};
  classifier.dlogits = pointer<bfloat16>(dlogits.tensor) + dlogits.offset;
  classifier.dlosses = pointer<float>(dloss);
  classifier.x = pointer<bfloat16>(x.tensor) + x.offset;
  classifier.weight = pointer<bfloat16>(p.weight.tensor) + p.weight.offset;
  classifier.inner = x.columns;
  classifier.x_stride = x.row_stride;
  classifier.weight_stride = p.weight.row_stride;
  if (!exp_classifier_supports(classifier)) return std::nullopt;
  OptionalTensor factors;
  if (gradients.want_x || gradients.want_weight) factors = allocate({count}, ScalarType::Float, x.tensor);
  const Matrix scaled = gradients.want_weight ? matrix(allocate({count, x.columns}, x.tensor)) : x;
  classifier.factors = pointer<float>(factors);
  classifier.scaled_x = gradients.want_weight ? pointer<bfloat16>(scaled.tensor) : nullptr;
  const Tensor scratch = workspace(exp_classifier_workspace(classifier), x.tensor);
  launcher.check(exp_classifier(classifier, pointer<void>(scratch), launcher.stream()));
  if (gradients.want_x) {
    const Matrix dx = part(matrix(gradients.dx), begin, count);
    // The product is float32, so that dx is rounded only once, after the factors are applied.
    const Tensor product = allocate({dx.rows, dx.columns}, ScalarType::Float, dx.tensor);
    matmul(launcher, matrix(product), dlogits, p.weight);
    launcher.check(exp_classifier_dx(pointer<bfloat16>(dx.tensor) + dx.offset, pointer<float>(product),
                                     pointer<float>(factors), dx.rows, dx.columns, launcher.stream()));
  }
  return scaled;
}

#else

std::optional<Matrix> exponentials(const Launcher&, const CrossEntropy&, const Tensor&, const Matrix&,
                                   const OptionalTensor&, const Gradients&, int64_t, int64_t) {
  return std::nullopt;
}

#endif

// With several chunks, the matmuls add to a float32 sum of dlogits^T @ x (float64 if x is float64), which is rounded to
// dweight's dtype at the end. On the CPU, each chunk's 16-bit product is rounded before it is added (matmul.h). If
// `logits` (N, Vp) is given, the logits are kept there.
void run(const Launcher& launcher, const CrossEntropy& p, const Tensor& losses, const OptionalTensor& dlosses,
         const Gradients& gradients, const OptionalTensor& logits = std::nullopt) {
  const int64_t most = std::min(p.chunk, p.rows());
  const Matrix chunk = matrix(allocate({most, p.columns()}, p.x.tensor));
  const Tensor sum = gradients.want_weight && p.rows() > most
                         ? allocate(shape_of(gradients.dweight), p.accumulate(), p.x.tensor)
                         : gradients.dweight;
  int64_t begin = 0;
  do {  // once even without rows, so that the sum becomes 0
    const int64_t count = std::min(most, p.rows() - begin);
    const Matrix here = part(chunk, 0, count);
    std::optional<Matrix> x;
    if (!logits) x = exponentials(launcher, p, losses, here, dlosses, gradients, begin, count);
    if (!x) {
      x = part(p.x, begin, count);
      classify(launcher, p, losses, logits ? part(matrix(*logits), begin, count) : here, here, dlosses, begin, count);
      if (gradients.want_x) matmul(launcher, part(matrix(gradients.dx), begin, count), here, p.weight);
    }
    if (gradients.want_weight) matmul(launcher, matrix(sum), here.transposed(), *x, {.accumulate = begin > 0});
    begin += count;
  } while (begin < p.rows());
  if (gradients.want_weight && sum.get() != gradients.dweight.get()) {
    Tensor rounded = gradients.dweight;
    torch::stable::copy_(rounded, sum);
  }
}

}  // namespace

OptionalTensor row_gradient(const Launcher& launcher, const CrossEntropy& p, Reduction reduction,
                            const OptionalTensor& dloss, const OptionalTensor& finite) {
  if (reduction != Reduction::kMean) return dloss;
  const Tensor scale = allocate({}, p.accumulate(), p.x.tensor);
  dispatch_floating(scale, [&]<typename A>() {
    if constexpr (std::is_same_v<A, accumulate_t<A>>)
      launcher.check(mean_scale<A>({.scale = pointer<A>(scale),
                                    .finite = pointer<A>(finite),
                                    .dloss = pointer<A>(dloss),
                                    .targets = pointer<void>(p.targets),
                                    .targets_are_int64 = p.targets.scalar_type() == ScalarType::Long,
                                    .rows = p.rows(),
                                    .ignore_index = p.ignore_index},
                                   launcher.stream()));
  });
  return scale;
}

Tensor total(const Launcher& launcher, const CrossEntropy& p, const Tensor& losses, const OptionalTensor& scale) {
  const Tensor loss = allocate({}, p.accumulate(), p.x.tensor);
  dispatch_floating(loss, [&]<typename A>() {
    if constexpr (std::is_same_v<A, accumulate_t<A>>)
      launcher.check(loss_sum<A>(
          {.loss = pointer<A>(loss), .losses = pointer<A>(losses), .scale = pointer<A>(scale), .rows = p.rows()},
          launcher.stream()));
  });
  return loss;
}

Tensor cross_entropy_loss(const CrossEntropy& p, Reduction reduction) {
  const Launcher launcher(p.op, p.x.tensor);
  const Tensor losses = allocate(shape_of(p.targets), p.accumulate(), p.x.tensor);
  run(launcher, p, losses, std::nullopt, Gradients(p.x.tensor, p.weight.tensor, false, false));
  if (reduction == Reduction::kNone) return losses;
  return total(launcher, p, losses, row_gradient(launcher, p, reduction, std::nullopt));
}

// ---- the operators --------------------------------------------------------------------------------------------------

namespace {

Tensor linear_cross_entropy_op(const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t vocab_size,
                               int64_t ignore_index, StringHandle reduction_name, int64_t chunk_size) {
  constexpr const char* op = "linear_cross_entropy";
  const Reduction reduction = reduction_of(op, take_string(reduction_name));
  return cross_entropy_loss(checked_cross_entropy(op, x, weight, targets, vocab_size, ignore_index, chunk_size),
                            reduction);
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_with_gradients_op(
    const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t vocab_size, int64_t ignore_index,
    StringHandle reduction_name, int64_t chunk_size, const std::vector<bool>& output_mask) {
  constexpr const char* op = "linear_cross_entropy_with_gradients";
  const Reduction reduction = reduction_to_number(op, take_string(reduction_name));
  const CrossEntropy p = checked_cross_entropy(op, x, weight, targets, vocab_size, ignore_index, chunk_size);

  const Launcher launcher(op, x);
  const Tensor losses = allocate(shape_of(targets), p.accumulate(), x);
  const Gradients gradients(x, weight, output_mask[0], output_mask[1]);
  const OptionalTensor scale = row_gradient(launcher, p, reduction, std::nullopt);
  run(launcher, p, losses, scale, gradients);
  return {total(launcher, p, losses, scale), gradients.dx, gradients.dweight};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_with_logits_op(
    const Tensor& x, const Tensor& weight, const Tensor& targets, const OptionalTensor& scale, int64_t vocab_size,
    int64_t ignore_index, int64_t chunk_size, const std::vector<bool>& output_mask) {
  constexpr const char* op = "linear_cross_entropy_with_logits";
  const CrossEntropy p = checked_cross_entropy(op, x, weight, targets, vocab_size, ignore_index, chunk_size);
  if (scale) {
    check_same_device(op, "scale", *scale, "x", x);
    check_dtype(op, "scale", *scale, p.accumulate());
    check_shape(op, "scale", *scale, {});
  }

  const Launcher launcher(op, x);
  Shape shape = leading_shape(x);
  shape.push_back(p.columns());
  const Tensor logits = allocate(shape, x);
  const Tensor losses = allocate(shape_of(targets), p.accumulate(), x);
  const Gradients gradients(x, weight, output_mask[0], output_mask[1], p.accumulate());
  const OptionalTensor factor = scale ? scale : row_gradient(launcher, p, Reduction::kMean, std::nullopt);
  run(launcher, p, losses, factor, gradients, logits);
  return {logits, total(launcher, p, losses, factor), gradients.dx, gradients.dweight};
}

// The logits are computed a second time, because dloss was not known in the forward.
std::tuple<Tensor, Tensor> linear_cross_entropy_backward_op(const Tensor& dloss, const Tensor& x, const Tensor& weight,
                                                            const Tensor& targets, int64_t vocab_size,
                                                            int64_t ignore_index, StringHandle reduction_name,
                                                            int64_t chunk_size, const std::vector<bool>& output_mask) {
  constexpr const char* op = "linear_cross_entropy_backward";
  const Reduction reduction = reduction_of(op, take_string(reduction_name));
  const CrossEntropy p = checked_cross_entropy(op, x, weight, targets, vocab_size, ignore_index, chunk_size);
  check_same_device(op, "dloss", dloss, "x", x);
  check_dtype(op, "dloss", dloss, p.accumulate());
  check_shape(op, "dloss", dloss, reduction == Reduction::kNone ? shape_of(targets) : Shape{});

  const Launcher launcher(op, x);
  const Tensor losses = allocate(shape_of(targets), p.accumulate(), x);
  const Gradients gradients(x, weight, output_mask[0], output_mask[1]);
  run(launcher, p, losses, row_gradient(launcher, p, reduction, dense(dloss)), gradients);
  return {gradients.dx, gradients.dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy_op));
  m.impl("linear_cross_entropy_with_gradients", TORCH_BOX(&linear_cross_entropy_with_gradients_op));
  m.impl("linear_cross_entropy_with_logits", TORCH_BOX(&linear_cross_entropy_with_logits_op));
  m.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
