// If the operator were part of gptkernels, its ops/library.cpp would have the two m.def lines.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(gptkernels, m) {
  m.def("squared_relu(Tensor x) -> Tensor");
  m.def("squared_relu_backward(Tensor dout, Tensor x) -> Tensor");
}
