#include <cmath>

#include "../csrc/causal_softmax.h"
#include "matmul.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

struct Sizes {
  int64_t batches;   // B
  int64_t tokens;    // T
  int64_t channels;  // C
  int64_t heads;     // NH
  int64_t head;      // HS

  Shape out() const { return {batches, tokens, channels}; }
  Shape probabilities() const { return {batches, heads, tokens, tokens}; }
};

Sizes sizes(const char* op, const Tensor& qkv, int64_t num_heads) {
  check_floating(op, "qkv", qkv);
  if (num_heads < 1) fail(op, "num_heads must be at least 1, got ", num_heads);
  if (qkv.dim() != 3 || qkv.size(2) == 0 || qkv.size(2) % (3 * num_heads) != 0)
    fail(op, "qkv must have shape (B, T, 3 * C) with C a multiple of num_heads (", num_heads, "), got ",
         describe(shape_of(qkv)));
  const int64_t channels = qkv.size(2) / 3;
  return {qkv.size(0), qkv.size(1), channels, num_heads, channels / num_heads};
}

double scale_or_default(std::optional<double> scale, const Sizes& s) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(s.head)));
}

struct Heads {
  Matrix first;
  int64_t batch_step;
  int64_t head_step;

  Heads transposed() const { return {first.transposed(), batch_step, head_step}; }
};

enum Part { kQuery, kKey, kValue };

// (T, HS), rows 3C apart.
Heads part(const Tensor& qkv, Part which, const Sizes& s) {
  return {{.tensor = qkv,
           .rows = s.tokens,
           .columns = s.head,
           .row_stride = 3 * s.channels,
           .column_stride = 1,
           .offset = which * s.channels},
          s.tokens * 3 * s.channels,
          s.head};
}

// (T, HS), rows C apart.
Heads parts_of_out(const Tensor& out, const Sizes& s) {
  return {{.tensor = out, .rows = s.tokens, .columns = s.head, .row_stride = s.channels, .column_stride = 1},
          s.tokens * s.channels,
          s.head};
}

Heads squares(const Tensor& probabilities, const Sizes& s) {
  return {{.tensor = probabilities, .rows = s.tokens, .columns = s.tokens, .row_stride = s.tokens, .column_stride = 1},
          s.heads * s.tokens * s.tokens,
          s.tokens * s.tokens};
}

// A batched BLAS call supports one stride between matrices, but sequences and heads have different strides. A call
// therefore computes all heads of a sequence or, if there are at least as many sequences as heads, one head of all
// sequences.
void matmul_heads(const Launcher& launcher, const Sizes& s, const Heads& out, const Heads& a, const Heads& b,
                  double alpha = 1) {
  const bool loop_over_batches = s.batches < s.heads;
  const auto together = [&](const Heads& h, int64_t i) {
    Matrix m = h.first;
    m.offset += i * (loop_over_batches ? h.batch_step : h.head_step);
    m.batches = loop_over_batches ? s.heads : s.batches;
    m.batch_stride = loop_over_batches ? h.head_step : h.batch_step;
    return m;
  };
  for (int64_t i = 0; i < std::min(s.batches, s.heads); ++i)
    matmul(launcher, together(out, i), together(a, i), together(b, i), {.alpha = alpha});
}

std::tuple<Tensor, Tensor> attention_probabilities_op(const Tensor& qkv, int64_t num_heads,
                                                      std::optional<double> scale) {
  constexpr const char* op = "attention_probabilities";
  const Sizes s = sizes(op, qkv, num_heads);

  const Launcher launcher(op, qkv);
  const Tensor qkv_dense = dense(qkv);
  Tensor out = allocate(s.out(), qkv);
  Tensor probabilities = allocate(s.probabilities(), qkv);
  if (qkv.numel() == 0) return {out, probabilities};

  // The matmul applies the scale before it rounds the scores, because unscaled scores may overflow in float16.
  const Heads scores = squares(probabilities, s);
  matmul_heads(launcher, s, scores, part(qkv_dense, kQuery, s), part(qkv_dense, kKey, s).transposed(),
               scale_or_default(scale, s));
  dispatch_floating(qkv, [&]<typename T>() {
    launcher.check(causal_softmax_forward<T>({.out = pointer<T>(probabilities),
                                              .scores = pointer<T>(probabilities),
                                              .matrices = s.batches * s.heads,
                                              .tokens = s.tokens,
                                              .scale = 1},
                                             launcher.stream()));
  });
  matmul_heads(launcher, s, parts_of_out(out, s), squares(probabilities, s), part(qkv_dense, kValue, s));
  return {out, probabilities};
}

// Let P be the probabilities, and S = scale * q k^T the scores. Then dP = dout v^T, dv = P^T dout, dq = scale * dS k
// and dk = scale * dS^T q, where causal_softmax_backward computes dS from dP.
Tensor attention_probabilities_backward_op(const Tensor& dout, const Tensor& qkv, const Tensor& probabilities,
                                           int64_t num_heads, std::optional<double> scale) {
  constexpr const char* op = "attention_probabilities_backward";
  const Sizes s = sizes(op, qkv, num_heads);
  check_like(op, "dout", dout, "qkv", qkv);
  check_like(op, "probabilities", probabilities, "qkv", qkv);
  check_shape(op, "dout", dout, s.out());
  check_shape(op, "probabilities", probabilities, s.probabilities());

  const Launcher launcher(op, qkv);
  const Tensor dout_dense = dense(dout);
  const Tensor qkv_dense = dense(qkv);
  const Tensor probabilities_dense = dense(probabilities);
  Tensor dqkv = allocate(shape_of(qkv), qkv);
  if (qkv.numel() == 0) return dqkv;

  const double factor = scale_or_default(scale, s);
  const Tensor scratch = allocate(s.probabilities(), qkv);
  const Heads p = squares(probabilities_dense, s);
  const Heads ds = squares(scratch, s);
  const Heads d = parts_of_out(dout_dense, s);
  matmul_heads(launcher, s, part(dqkv, kValue, s), p.transposed(), d);
  matmul_heads(launcher, s, ds, d, part(qkv_dense, kValue, s).transposed());
  dispatch_floating(qkv, [&]<typename T>() {
    launcher.check(causal_softmax_backward<T>({.dscores = pointer<T>(scratch),
                                               .dout = pointer<T>(scratch),
                                               .out = pointer<T>(probabilities_dense),
                                               .matrices = s.batches * s.heads,
                                               .tokens = s.tokens,
                                               .scale = 1},
                                              launcher.stream()));
  });
  matmul_heads(launcher, s, part(dqkv, kQuery, s), ds, part(qkv_dense, kKey, s), factor);
  matmul_heads(launcher, s, part(dqkv, kKey, s), ds.transposed(), part(qkv_dense, kQuery, s), factor);
  return dqkv;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("attention_probabilities", TORCH_BOX(&attention_probabilities_op));
  m.impl("attention_probabilities_backward", TORCH_BOX(&attention_probabilities_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
