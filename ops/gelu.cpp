#include "../csrc/gelu.h"

#include "calls.h"
#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

GeluForm gelu_form(const char* op, const std::string& approximate) {
  if (approximate == "tanh") return GeluForm::kTanh;
  if (approximate == "none") return GeluForm::kErf;
  fail(op, "approximate must be 'tanh' or 'none', got '", approximate, "'");
}

}  // namespace

Tensor gelu_op(const Tensor& x, const std::string& approximate) {
  constexpr const char* op = "gelu";
  check_floating(op, "x", x);
  const GeluForm form = gelu_form(op, approximate);

  const Launcher launcher(op, x);
  const Tensor x_dense = dense(x);
  Tensor out = allocate(shape_of(x), x);
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(gelu_forward<T>(
        {.out = pointer<T>(out), .x = pointer<T>(x_dense), .size = x_dense.numel(), .form = form}, launcher.stream()));
  });
  return out;
}

Tensor gelu_backward_op(const Tensor& dout, const Tensor& x, const std::string& approximate) {
  constexpr const char* op = "gelu_backward";
  check_floating(op, "x", x);
  check_like(op, "dout", dout, "x", x);
  check_shape(op, "dout", dout, shape_of(x));
  const GeluForm form = gelu_form(op, approximate);

  const Launcher launcher(op, x);
  const Tensor dout_dense = dense(dout);
  const Tensor x_dense = dense(x);
  Tensor dx = allocate(shape_of(x), x);
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(gelu_backward<T>({.dx = pointer<T>(dx),
                                     .dout = pointer<T>(dout_dense),
                                     .x = pointer<T>(x_dense),
                                     .size = x_dense.numel(),
                                     .form = form},
                                    launcher.stream()));
  });
  return dx;
}

namespace {

Tensor gelu_boxed(const Tensor& x, StringHandle approximate) {
  return gelu_op(x, take_string(approximate));
}

Tensor gelu_backward_boxed(const Tensor& dout, const Tensor& x, StringHandle approximate) {
  return gelu_backward_op(dout, x, take_string(approximate));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("gelu", TORCH_BOX(&gelu_boxed));
  m.impl("gelu_backward", TORCH_BOX(&gelu_backward_boxed));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
