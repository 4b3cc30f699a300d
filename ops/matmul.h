// Matmuls with an epilogue: a bias, GELU, and their gradients. The matmuls are computed by torch's BLAS on the CPU, by
// cuBLAS on CUDA, or by this package's kernels. The epilogue is fused with the matmul, or computed by separate kernels
// after the matmul.
#pragma once

#include <algorithm>

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// A matrix, or `batches` matrices, in a tensor's memory. Element (i, j) of the first matrix is at offset + i *
// row_stride + j * column_stride, and one of the two strides is 1. A transposed matrix is the same memory with the
// strides exchanged.
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

// Returns a tensor as a matrix: the last dimension is the columns, and the other dimensions together are the rows.
// 2-dimensional views with contiguous rows or columns (a slice of columns, a transpose) are not copied, because a BLAS
// supports any distance between rows or columns. Other layouts are copied.
inline Matrix matrix(const Tensor& t) {
  if (t.dim() == 2) {
    const auto rows = t.size(0), columns = t.size(1), down = t.stride(0), right = t.stride(1);
    if (right == 1 && down >= std::max<int64_t>(columns, 1)) return {t, rows, columns, down, right};
    if (down == 1 && right >= std::max<int64_t>(rows, 1)) return {t, rows, columns, down, right};
  }
  return {dense(t), rows_of(t), width_of(t), std::max<int64_t>(width_of(t), 1), 1};
}

// Allocates the gradient of a 2-dimensional weight. The gradient's columns are contiguous if the weight's columns are,
// and otherwise its rows are contiguous. If the weight is a transposed view, as for Hugging Face's Conv1D, autograd
// then passes the gradient to the parameter without a copy.
inline Tensor allocate_gradient_if(bool wanted, const Tensor& weight) {
  if (!wanted) return absent(weight);
  const bool transposed = matrix(weight).column_stride != 1 && weight.stride(0) == 1;
  if (!transposed) return allocate(shape_of(weight), weight);
  return allocate_strided(shape_of(weight), {1, std::max<int64_t>(weight.size(0), 1)}, weight.scalar_type(), weight);
}

// Operations on a @ b before it is stored. dgelu_at excludes bias and pre_gelu. All tensors are dense.
struct Epilogue {
  double alpha = 1;                 // factor of a @ b; must be 1 if a tensor below is given
  OptionalTensor bias = {};         // (columns): added to every row
  OptionalTensor pre_gelu = {};     // (rows, columns): receives a @ b + bias; out is then the GELU (tanh) of pre_gelu
  OptionalTensor dgelu_at = {};     // (rows, columns): a @ b is multiplied by GELU's derivative at these values
  OptionalTensor column_sums = {};  // (columns), with dgelu_at: receives the sums over out's rows
  bool accumulate = false;          // add alpha * a @ b to out; excludes the tensors above
};

// Allocates the output of a @ b for the case that only other matmuls read the output. The output's rows may be padded.
// The matmul that writes the output must not have bias or pre_gelu in its epilogue.
Matrix allocate_intermediate(const Matrix& a, const Matrix& b);

// Returns whether torch allows float32 matmuls on this device to use TF32 (torch.backends.cuda.matmul).
bool tf32_allowed();

// Computes out = alpha * a @ b and the epilogue, for which out's rows must be contiguous. For bfloat16 and float16
// operands, a dense out without bias and GELU may be float32. On CUDA the result of such a matmul is not rounded to 16
// bits. On the CPU the result is rounded, once per call, because torch's BLAS has no matmul of 16-bit operands with a
// float32 output.
void matmul(const Launcher& launcher, const Matrix& out, const Matrix& a, const Matrix& b,
            const Epilogue& epilogue = {});

// Computes out (M), the sums of x (N, M) over the rows of x. x is dense. If x is the gradient of an output, `out` is
// the gradient of a bias that was added to every row.
void column_sums(const Launcher& launcher, const Tensor& out, const Matrix& x);

}  // namespace gptkernels::GPTKERNELS_DEVICE
