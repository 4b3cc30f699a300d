#include "../csrc/global_norm.h"

#include <algorithm>
#include <string>

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

template <typename T>
double* squares(const Launcher& launcher, const std::vector<Tensor>& tensors, const Tensor& like, double* partials) {
  std::vector<const T*> pointers;
  std::vector<int64_t> sizes;
  int64_t count = 0;
  for (const Tensor& t : tensors) {
    if (t.scalar_type() != like.scalar_type()) continue;
    pointers.push_back(pointer<T>(t));
    sizes.push_back(t.numel());
    count += global_norm_partials(t.numel());
  }
  launcher.check(global_norm_squares<T>({.partials = partials,
                                         .tensors = pointers.data(),
                                         .sizes = sizes.data(),
                                         .count = static_cast<int64_t>(sizes.size())},
                                        launcher.stream()));
  return partials + count;
}

// An empty list has no device, so the Python rule returns its norm.
Tensor global_norm_op(const std::vector<Tensor>& tensors) {
  constexpr const char* op = "global_norm";
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    if (!is_floating(t.scalar_type()) || t.get_device_index() != tensors[0].get_device_index() ||
        t.is_cpu() != tensors[0].is_cpu()) {
      const std::string name = "tensors[" + std::to_string(i) + "]";
      check_floating(op, name.c_str(), t);
      check_same_device(op, name.c_str(), t, "tensors[0]", tensors[0]);
    }
  }

  const Tensor& first = tensors.at(0);
  const Launcher launcher(op, first);
  std::vector<Tensor> inputs;
  inputs.reserve(tensors.size());
  int64_t count = 0;
  for (const Tensor& t : tensors) {
    inputs.push_back(dense(t));
    count += global_norm_partials(t.numel());
  }
  const Tensor partials = allocate({count}, ScalarType::Double, first);
  Tensor norm = allocate({}, ScalarType::Float, first);
  double* next = pointer<double>(partials);
  std::vector<ScalarType> seen;
  for (const Tensor& t : inputs) {
    if (std::find(seen.begin(), seen.end(), t.scalar_type()) != seen.end()) continue;
    seen.push_back(t.scalar_type());
    dispatch_floating(t, [&]<typename T>() { next = squares<T>(launcher, inputs, t, next); });
  }
  launcher.check(global_norm_sum(pointer<float>(norm), pointer<double>(partials), count, launcher.stream()));
  return norm;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("global_norm", TORCH_BOX(&global_norm_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
