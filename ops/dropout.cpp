#include "../csrc/dropout.h"

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

Tensor dropout_op(const Tensor& x, double p, const Tensor& seed, const Tensor& offset, int64_t first_index) {
  constexpr const char* op = "dropout";
  check_floating(op, "x", x);
  check_dropout(op, "p", p, seed, offset, "x", x);
  check_first_index(op, first_index);

  const Launcher launcher(op, x);
  const Tensor x_dense = dense(x);
  Tensor out = allocate(shape_of(x), x);
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(dropout_forward<T>({.out = pointer<T>(out),
                                       .x = pointer<T>(x_dense),
                                       .size = x_dense.numel(),
                                       .arguments = {p, pointer<int64_t>(seed), pointer<int64_t>(offset), first_index}},
                                      launcher.stream()));
  });
  return out;
}

Tensor dropout_mask_op(int64_t size, double p, const Tensor& seed, const Tensor& offset, int64_t first_index) {
  constexpr const char* op = "dropout_mask";
  if (size < 0) fail(op, "size must be at least 0, got ", size);
  check_dropout(op, "p", p, seed, offset, "seed", seed);
  check_first_index(op, first_index);

  const Launcher launcher(op, seed);
  Tensor mask = allocate({size}, ScalarType::Bool, seed);
  launcher.check(dropout_mask(pointer<bool>(mask), size,
                              {p, pointer<int64_t>(seed), pointer<int64_t>(offset), first_index}, launcher.stream()));
  return mask;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("dropout", TORCH_BOX(&dropout_op));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
