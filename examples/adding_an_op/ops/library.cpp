// In the source tree, these are two lines of ops/library.cpp.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(gptkernels, m) {
  m.def("squared_relu(Tensor x) -> Tensor");
  m.def("squared_relu_backward(Tensor dout, Tensor x) -> Tensor");
}
