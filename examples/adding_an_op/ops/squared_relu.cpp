#include "../csrc/squared_relu.h"

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

Tensor squared_relu_op(const Tensor& x) {
  constexpr const char* op = "squared_relu";
  check_floating(op, "x", x);

  const Launcher launcher(op, x);
  const Tensor x_dense = dense(x);
  Tensor out = allocate(shape_of(x), x);
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(squared_relu_forward<T>({.out = pointer<T>(out), .x = pointer<T>(x_dense), .size = x_dense.numel()},
                                           launcher.stream()));
  });
  return out;
}

Tensor squared_relu_backward_op(const Tensor& dout, const Tensor& x) {
  constexpr const char* op = "squared_relu_backward";
  check_floating(op, "x", x);
  check_like(op, "dout", dout, "x", x);
  check_shape(op, "dout", dout, shape_of(x));

  const Launcher launcher(op, x);
  const Tensor dout_dense = dense(dout);
  const Tensor x_dense = dense(x);
  Tensor dx = allocate(shape_of(x), x);
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(squared_relu_backward<T>(
        {.dx = pointer<T>(dx), .dout = pointer<T>(dout_dense), .x = pointer<T>(x_dense), .size = x_dense.numel()},
        launcher.stream()));
  });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("squared_relu", TORCH_BOX(&squared_relu_op));
  m.impl("squared_relu_backward", TORCH_BOX(&squared_relu_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
