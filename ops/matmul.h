// Matrix products for both devices: torch's BLAS on the CPU, cuBLAS on CUDA, and what is fused to a product or else
// done by our own kernels right after it: a bias, GELU, their gradients.
#pragma once

#include <algorithm>

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// A matrix in a tensor's memory, or `batches` of them: element (i, j) of the first is at offset + i * row_stride +
// j * column_stride, and one of the two strides is 1. So a transposed matrix is the same memory with strides swapped.
struct Matrix {
  Tensor tensor;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t column_stride;
  int64_t offset = 0;
  int64_t batches = 1;
  int64_t batch_stride = 0;

  Matrix transposed() const {
    return {tensor, columns, rows, column_stride, row_stride, offset, batches, batch_stride};
  }
};

// A tensor's last dimension as columns, all others as rows. A BLAS takes rows or columns that lie apart, so such
// 2-dimensional views (a slice of columns, a transpose) are not copied; other layouts are.
inline Matrix matrix(const Tensor& t) {
  if (t.dim() == 2) {
    const auto rows = t.size(0), columns = t.size(1), down = t.stride(0), right = t.stride(1);
    if (right == 1 && down >= std::max<int64_t>(columns, 1)) return {t, rows, columns, down, right};
    if (down == 1 && right >= std::max<int64_t>(rows, 1)) return {t, rows, columns, down, right};
  }
  return {dense(t), rows_of(t), width_of(t), std::max<int64_t>(width_of(t), 1), 1};
}

// A gradient of a 2-dimensional weight: rows or columns lie together as the weight's do. Of a transposed view, as
// Hugging Face's Conv1D is served by, autograd then hands the gradient on to the parameter without a copy.
inline Tensor allocate_gradient_if(bool wanted, const Tensor& weight) {
  if (!wanted) return absent(weight);
  const bool transposed = matrix(weight).column_stride != 1 && weight.stride(0) == 1;
  if (!transposed) return allocate(shape_of(weight), weight);
  return allocate_strided(shape_of(weight), {1, std::max<int64_t>(weight.size(0), 1)}, weight.scalar_type(), weight);
}

// What is done with a product besides storing it. dgelu_at goes without the two above; the vector and the matrices are
// dense.
struct Epilogue {
  double alpha = 1;                 // the product is multiplied by it; 1 where anything below is given
  OptionalTensor bias = {};         // (columns): added to every row
  OptionalTensor pre_gelu = {};     // (rows, columns): takes the product, and out becomes GELU of it
  OptionalTensor dgelu_at = {};     // (rows, columns): the product is multiplied by the derivative of GELU there
  OptionalTensor column_sums = {};  // (columns), beside dgelu_at: takes the sums over out's rows
  bool accumulate = false;          // add the product to what is in out; without any of the above
};

// Whether torch lets float32 products on this device be rounded to TF32 (torch.backends.cuda.matmul).
bool tf32_allowed();

// out = alpha * a @ b, and the epilogue, for which out's rows lie together. A float32 out of bfloat16 or float16
// operands, which has no bias or GELU and is dense, takes the sums as they are: on CUDA unrounded, on the CPU rounded
// to the operands' dtype once a call, since torch's BLAS has no such product there.
void matmul(const Launcher& launcher, const Matrix& out, const Matrix& a, const Matrix& b,
            const Epilogue& epilogue = {});

// out (M) = the sums over the rows of x (N, M), which is dense: the gradient of a bias that was added to every row.
void column_sums(const Launcher& launcher, const Tensor& out, const Matrix& x);

}  // namespace gptkernels::GPTKERNELS_DEVICE
