// Matrix products, by torch's BLAS on the CPU, by cuBLAS on CUDA, or by our own kernels, and what follows a product: a
// bias, GELU, their gradients. These are fused to the product, or done by our own kernels after it.
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

// A tensor as a matrix: the last dimension is its columns, the others together are its rows. 2-dimensional views whose
// rows or columns are contiguous (a slice of columns, a transpose) are not copied, because a BLAS takes the distance
// between them; other layouts are copied.
inline Matrix matrix(const Tensor& t) {
  if (t.dim() == 2) {
    const auto rows = t.size(0), columns = t.size(1), down = t.stride(0), right = t.stride(1);
    if (right == 1 && down >= std::max<int64_t>(columns, 1)) return {t, rows, columns, down, right};
    if (down == 1 && right >= std::max<int64_t>(rows, 1)) return {t, rows, columns, down, right};
  }
  return {dense(t), rows_of(t), width_of(t), std::max<int64_t>(width_of(t), 1), 1};
}

// A gradient of a 2-dimensional weight: its rows are contiguous or its columns are, as the weight's. If the weight is a
// transposed view, as for Hugging Face's Conv1D, autograd then passes the gradient to the parameter without a copy.
inline Tensor allocate_gradient_if(bool wanted, const Tensor& weight) {
  if (!wanted) return absent(weight);
  const bool transposed = matrix(weight).column_stride != 1 && weight.stride(0) == 1;
  if (!transposed) return allocate(shape_of(weight), weight);
  return allocate_strided(shape_of(weight), {1, std::max<int64_t>(weight.size(0), 1)}, weight.scalar_type(), weight);
}

// What is done with a product besides storing it. dgelu_at excludes bias and pre_gelu. All tensors are dense.
struct Epilogue {
  double alpha = 1;                 // the product is multiplied by it; 1 where anything below is given
  OptionalTensor bias = {};         // (columns): added to every row
  OptionalTensor pre_gelu = {};     // (rows, columns): takes the product, and out becomes GELU of it
  OptionalTensor dgelu_at = {};     // (rows, columns): the product is multiplied by the derivative of GELU there
  OptionalTensor column_sums = {};  // (columns), beside dgelu_at: takes the sums over out's rows
  bool accumulate = false;          // add the product to what is in out; without any of the above
};

// A matrix for a @ b with an epilogue without bias and GELU, which products alone read: its rows may be apart.
Matrix allocate_intermediate(const Matrix& a, const Matrix& b);

// Whether torch lets float32 products on this device be rounded to TF32 (torch.backends.cuda.matmul).
bool tf32_allowed();

// out = alpha * a @ b, then the epilogue, for which out's rows must be contiguous. For bfloat16 and float16 operands a
// dense out without bias and GELU may be float32. On CUDA the sums are then not rounded to 16 bits. On the CPU they
// are, once a call, because torch's BLAS has no such product.
void matmul(const Launcher& launcher, const Matrix& out, const Matrix& a, const Matrix& b,
            const Epilogue& epilogue = {});

// out (M) = the sums of x (N, M) over its rows; x is dense. This is the gradient of a bias added to every row.
void column_sums(const Launcher& launcher, const Tensor& out, const Matrix& x);

}  // namespace gptkernels::GPTKERNELS_DEVICE
