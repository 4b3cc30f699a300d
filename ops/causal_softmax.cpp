#include "../csrc/causal_softmax.h"

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

void check_square(const char* op, const char* name, const Tensor& t) {
  check_dim_at_least(op, name, t, 2);
  check_floating(op, name, t);
  if (t.size(t.dim() - 1) != t.size(t.dim() - 2))
    fail(op, name, " must have shape (..., T, T), got ", describe(shape_of(t)));
}

int64_t matrices_of(const Tensor& t) {
  int64_t matrices = 1;
  for (int64_t i = 0; i + 2 < t.dim(); ++i) matrices *= t.size(i);
  return matrices;
}

Tensor causal_softmax_op(const Tensor& scores, double scale) {
  constexpr const char* op = "causal_softmax";
  check_square(op, "scores", scores);

  const Launcher launcher(op, scores);
  const Tensor scores_dense = dense(scores);
  Tensor out = allocate(shape_of(scores), scores);
  dispatch_floating(scores, [&]<typename T>() {
    launcher.check(causal_softmax_forward<T>({.out = pointer<T>(out),
                                              .scores = pointer<T>(scores_dense),
                                              .matrices = matrices_of(scores),
                                              .tokens = width_of(scores),
                                              .scale = scale},
                                             launcher.stream()));
  });
  return out;
}

Tensor causal_softmax_backward_op(const Tensor& dout, const Tensor& out, double scale) {
  constexpr const char* op = "causal_softmax_backward";
  check_square(op, "out", out);
  check_like(op, "dout", dout, "out", out);
  check_shape(op, "dout", dout, shape_of(out));

  const Launcher launcher(op, out);
  const Tensor dout_dense = dense(dout);
  const Tensor out_dense = dense(out);
  Tensor dscores = allocate(shape_of(out), out);
  dispatch_floating(out, [&]<typename T>() {
    launcher.check(causal_softmax_backward<T>({.dscores = pointer<T>(dscores),
                                               .dout = pointer<T>(dout_dense),
                                               .out = pointer<T>(out_dense),
                                               .matrices = matrices_of(out),
                                               .tokens = width_of(out),
                                               .scale = scale},
                                              launcher.stream()));
  });
  return dscores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("causal_softmax", TORCH_BOX(&causal_softmax_op));
  m.impl("causal_softmax_backward", TORCH_BOX(&causal_softmax_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
