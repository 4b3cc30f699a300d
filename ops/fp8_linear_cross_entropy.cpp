// linear_cross_entropy with float8 matmuls in its gradients and, with fp8_logits, for the logits (docs/fp8.md).

#include "../csrc/linear_cross_entropy.h"
#include "fp8.h"
#include "linear_cross_entropy.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

constexpr ScalarType kOperand = ScalarType::Float8_e4m3fn;  // x and weight
constexpr ScalarType kGradient = ScalarType::Float8_e5m2;   // dlogits

CrossEntropy checked(const char* op, const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t vocab_size,
                     int64_t ignore_index, int64_t chunk_size) {
  check_quantizable(op, "x", x);
  const CrossEntropy p = checked_cross_entropy(op, x, weight, targets, vocab_size, ignore_index, chunk_size);
  check_features(op, "the last dimension of x", p.x.columns);
  check_features(op, "the first dimension of weight", p.columns());
  return p;
}

std::optional<Quantized> operand(const Launcher& launcher, const Tensor& t, bool transposed, bool values) {
  if (!transposed && !values) return std::nullopt;
  return quantize(launcher, dense(t), std::nullopt, kOperand, {.transposed = transposed, .values = values});
}

// The gradient of a float16 tensor is float32, because a float16 gradient could underflow before the backward
// multiplies it by the loss scale.
Tensor gradient_if(bool wanted, const Tensor& t) {
  const ScalarType dtype = t.scalar_type() == ScalarType::Half ? ScalarType::Float : t.scalar_type();
  return allocate(wanted ? shape_of(t) : Shape{0}, dtype, t);
}

struct Gradients {
  bool want_x, want_weight;
  bool logits;                      // whether the logits are computed from the float8 operands
  OptionalTensor scale;             // of dlogits, without kMultiplier
  Tensor dx;                        // of x's shape
  Tensor dweight;                   // (Vp, C)
  Tensor sum;                       // dweight, or its float32 sum over chunks
  std::optional<Quantized> weight;  // (Vp, C) and (C, Vp)
  std::optional<Quantized> x;       // (N, C) and (C, N rounded up to a multiple of 16)
  Tensor dlogits;
  Tensor dlogits_t;  // (Vp, rows of a chunk rounded up to a multiple of 16)

  Gradients(const Launcher& launcher, const Tensor& x, const Tensor& weight, const OptionalTensor& scale, int64_t chunk,
            bool logits, bool want_x, bool want_weight)
      : want_x(want_x),
        want_weight(want_weight),
        logits(logits),
        scale(scale),
        dx(gradient_if(want_x, x)),
        dweight(gradient_if(want_weight, weight)),
        sum(want_weight && rows_of(x) > chunk && dweight.scalar_type() != ScalarType::Float
                ? allocate(shape_of(weight), ScalarType::Float, weight)
                : dweight),
        weight(operand(launcher, weight, want_x, logits)),
        x(operand(launcher, x, want_weight, logits)),
        dlogits(allocate({chunk, weight.size(0)}, kGradient, x)),
        dlogits_t(allocate(want_weight ? Shape{weight.size(0), fp8_padded(chunk)} : Shape{0}, kGradient, x)) {}
};

// The logits are sums of C terms, few enough for fast accumulation.
void rounded_logits(const Launcher& launcher, const Gradients& g, const Matrix& logits, int64_t begin, int64_t count) {
  fp8_product(launcher, logits, {part(flat(g.x->values), begin, count), g.x->scale},
              {g.weight->values, g.weight->scale}, {.fast_accumulation = true});
}

void classify(const Launcher& launcher, const CrossEntropy& p, const Tensor& losses, const Matrix& logits,
              const Gradients& g, int64_t begin, int64_t count) {
  if (g.logits)
    rounded_logits(launcher, g, logits, begin, count);
  else
    chunk_logits(launcher, p, logits, begin, count);
  dispatch_fp8(logits.tensor, [&]<typename T>() {
    auto classifier = chunk_classifier<T, Fp8Dlogit>(p, losses, logits, begin, count);
    classifier.dlogits = pointer<Fp8Dlogit>(g.dlogits);
    launcher.check(fused_classifier_forward(classifier, launcher.stream()));
  });
}

// Fast accumulation would lose many small terms next to a few large terms.
void add_dx(const Launcher& launcher, const Gradients& g, int64_t begin, int64_t count) {
  fp8_product(launcher, part(flat(g.dx), begin, count), {part(flat(g.dlogits), 0, count), g.scale},
              {g.weight->transposed, g.weight->scale}, {.alpha = 1 / Fp8Dlogit::kMultiplier});
}

void add_dweight(const Launcher& launcher, const Gradients& g, int64_t begin, int64_t count) {
  Matrix x_t = flat(g.x->transposed);
  x_t.offset = begin;
  x_t.columns = fp8_padded(count);
  fp8_weight_gradient(launcher, flat(g.sum), {part(flat(g.dlogits), 0, count), g.scale}, g.dlogits_t, {x_t, g.x->scale},
                      {.accumulate = begin > 0, .alpha = 1 / Fp8Dlogit::kMultiplier});
}

// `chunk` is a multiple of 16 if there are several chunks: cuBLASLt requires that a chunk's columns of x^T begin at a
// multiple of 16.
void run(const Launcher& launcher, const CrossEntropy& p, const Tensor& losses, const Gradients& g, int64_t chunk) {
  const Tensor logits = allocate({chunk, p.columns()}, p.x.tensor);
  int64_t begin = 0;
  do {  // once even without rows, so that the sum becomes 0
    const int64_t count = std::min(chunk, p.rows() - begin);
    classify(launcher, p, losses, part(flat(logits), 0, count), g, begin, count);
    if (g.want_x) add_dx(launcher, g, begin, count);
    if (g.want_weight) add_dweight(launcher, g, begin, count);
    begin += count;
  } while (begin < p.rows());
  if (g.sum.get() == g.dweight.get()) return;
  Tensor rounded = g.dweight;
  torch::stable::copy_(rounded, g.sum);
}

// ---- the operators --------------------------------------------------------------------------------------------------

Tensor fp8_linear_cross_entropy_op(const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t vocab_size,
                                   int64_t ignore_index, StringHandle reduction_name, int64_t chunk_size, bool) {
  constexpr const char* op = "fp8_linear_cross_entropy";
  const Reduction reduction = reduction_to_number(op, take_string(reduction_name));
  return cross_entropy_loss(checked(op, x, weight, targets, vocab_size, ignore_index, chunk_size), reduction);
}

std::tuple<Tensor, Tensor, Tensor> fp8_linear_cross_entropy_with_gradients_op(
    const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t vocab_size, int64_t ignore_index,
    StringHandle reduction_name, int64_t chunk_size, bool fp8_logits, const std::vector<bool>& output_mask) {
  constexpr const char* op = "fp8_linear_cross_entropy_with_gradients";
  const Reduction reduction = reduction_to_number(op, take_string(reduction_name));
  const CrossEntropy p = checked(op, x, weight, targets, vocab_size, ignore_index, chunk_size);

  const Launcher launcher(op, x);
  const bool mean = reduction == Reduction::kMean;
  const OptionalTensor finite = mean ? OptionalTensor(allocate({}, ScalarType::Float, x)) : std::nullopt;
  const OptionalTensor scale = row_gradient(launcher, p, reduction, std::nullopt, finite);
  const Tensor losses = allocate(shape_of(targets), p.accumulate(), x);
  const int64_t chunk = std::min(fp8_padded(p.chunk), p.rows());
  const Gradients gradients(launcher, x, weight, finite, chunk, fp8_logits, output_mask[0], output_mask[1]);
  run(launcher, p, losses, gradients, chunk);
  return {total(launcher, p, losses, scale), gradients.dx, gradients.dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("fp8_linear_cross_entropy", TORCH_BOX(&fp8_linear_cross_entropy_op));
  m.impl("fp8_linear_cross_entropy_with_gradients", TORCH_BOX(&fp8_linear_cross_entropy_with_gradients_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
