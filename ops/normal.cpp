#include "../csrc/normal.h"

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

void normal_op(const Tensor& x, double mean, double std, int64_t seed, int64_t stream, int64_t first_index,
               int64_t row_stride) {
  constexpr const char* op = "normal_";
  check_floating(op, "x", x);
  check_no_overlap(op, "x", x);
  if (!(std >= 0)) fail(op, "std must be at least 0, got ", std);
  if (first_index < 0) fail(op, "first_index must be at least 0, got ", first_index);
  const int64_t columns = x.dim() == 0 ? 1 : x.size(-1);
  if (row_stride != -1 && row_stride < columns)
    fail(op, "row_stride must be -1 or at least the number of columns (", columns, "), got ", row_stride);

  const Launcher launcher(op, x);
  if (x.numel() == 0) return;
  const bool flat = row_stride == -1 || row_stride == columns;
  Tensor out = x.is_contiguous() ? x : allocate(shape_of(x), x);
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(normal<T>({.out = pointer<T>(out),
                              .rows = flat ? 1 : x.numel() / columns,
                              .columns = flat ? x.numel() : columns,
                              .first_index = first_index,
                              .row_stride = row_stride,
                              .mean = mean,
                              .std = std,
                              .seed = static_cast<uint64_t>(seed),
                              .stream = static_cast<uint64_t>(stream)},
                             launcher.stream()));
  });
  if (x.is_contiguous()) return;
  Tensor target = x;
  torch::stable::copy_(target, out);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("normal_", TORCH_BOX(&normal_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
