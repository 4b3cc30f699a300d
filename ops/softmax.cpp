#include "../csrc/softmax.h"

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

Tensor softmax_op(const Tensor& x) {
  constexpr const char* op = "softmax";
  check_dim_at_least(op, "x", x, 1);
  check_floating(op, "x", x);

  const Launcher launcher(op, x);
  const Tensor x_dense = dense(x);
  Tensor out = allocate(shape_of(x), x);
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(
        softmax_forward<T>({.out = pointer<T>(out), .x = pointer<T>(x_dense), .rows = rows_of(x), .width = width_of(x)},
                           launcher.stream()));
  });
  return out;
}

Tensor softmax_backward_op(const Tensor& dout, const Tensor& out) {
  constexpr const char* op = "softmax_backward";
  check_dim_at_least(op, "out", out, 1);
  check_floating(op, "out", out);
  check_like(op, "dout", dout, "out", out);
  check_shape(op, "dout", dout, shape_of(out));

  const Launcher launcher(op, out);
  const Tensor dout_dense = dense(dout);
  const Tensor out_dense = dense(out);
  Tensor dx = allocate(shape_of(out), out);
  dispatch_floating(out, [&]<typename T>() {
    launcher.check(softmax_backward<T>({.dx = pointer<T>(dx),
                                        .dout = pointer<T>(dout_dense),
                                        .out = pointer<T>(out_dense),
                                        .rows = rows_of(out),
                                        .width = width_of(out)},
                                       launcher.stream()));
  });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("softmax", TORCH_BOX(&softmax_op));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
