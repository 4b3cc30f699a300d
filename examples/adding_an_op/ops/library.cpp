// In gptkernels itself, the two m.def lines would be in ops/library.cpp.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(gptkernels, m) {
  m.def("squared_relu(Tensor x) -> Tensor");
  m.def("squared_relu_backward(Tensor dout, Tensor x) -> Tensor");
}
