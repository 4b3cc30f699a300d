// Matmuls by torch's BLAS on the CPU, cuBLAS on CUDA, or this package's kernels, with an epilogue (a bias, GELU, and
// their gradients) that is fused or computed by separate kernels.
#pragma once

#include <algorithm>

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// Element (i, j) of the first of `batches` matrices is at offset + i * row_stride + j * column_stride, and one of the
// two strides is 1.
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

// The last dimension is the columns, all others together are the rows. 2-dimensional views with contiguous rows or
// columns (a slice of columns, a transpose) are not copied, because a BLAS supports any distance between contiguous
// rows or columns.
inline Matrix matrix(const Tensor& t) {
  if (t.dim() == 2) {
    const auto rows = t.size(0), columns = t.size(1), down = t.stride(0), right = t.stride(1);
    if (right == 1 && down >= std::max<int64_t>(columns, 1)) return {t, rows, columns, down, right};
    if (down == 1 && right >= std::max<int64_t>(rows, 1)) return {t, rows, columns, down, right};
  }
  return {dense(t), rows_of(t), width_of(t), std::max<int64_t>(width_of(t), 1), 1};
}

// The gradient of a 2-dimensional weight has contiguous columns if the weight does. For a transposed view, as in
// Hugging Face's Conv1D, autograd then passes the gradient to the parameter without a copy.
inline Tensor allocate_gradient_if(bool wanted, const Tensor& weight) {
  if (!wanted) return absent(weight);
  const bool transposed = matrix(weight).column_stride != 1 && weight.stride(0) == 1;
  if (!transposed) return allocate(shape_of(weight), weight);
  return allocate_strided(shape_of(weight), {1, std::max<int64_t>(weight.size(0), 1)}, weight.scalar_type(), weight);
}

// dgelu_at excludes bias and pre_gelu. All tensors are dense.
struct Epilogue {
  double alpha = 1;  // must be 1 with any of the tensors
  OptionalTensor bias = {};
  OptionalTensor pre_gelu = {};     // (rows, columns): a @ b + bias; out is its GELU (tanh)
  OptionalTensor dgelu_at = {};     // (rows, columns): a @ b is multiplied by GELU' of this
  OptionalTensor column_sums = {};  // (columns), with dgelu_at
  bool accumulate = false;          // adds to out; excludes the tensors above
};

// Allocates the output of a matmul a @ b that is read only by other matmuls, so its rows may be padded. The matmul must
// not have bias or pre_gelu in its epilogue.
Matrix allocate_intermediate(const Matrix& a, const Matrix& b);

bool tf32_allowed();

// Returns torch's cublasHandle_t. Its math mode says whether float32 matmuls may use TF32
// (torch.backends.cuda.matmul), which the stable ABI shows in no other way. At each call torch sets the handle's
// workspace, math mode and stream, which takes host time. Only on CUDA.
void* cublas_handle();

// out = alpha * a @ b, followed by the epilogue, for which out's rows must be contiguous. With bfloat16 or float16
// operands, and without bias and GELU, a dense out may be float32. On the CPU each call then rounds the product to 16
// bits, because torch's BLAS has no such matmul.
void matmul(const Launcher& launcher, const Matrix& out, const Matrix& a, const Matrix& b,
            const Epilogue& epilogue = {});

void column_sums(const Launcher& launcher, const Tensor& out, const Matrix& x);

}  // namespace gptkernels::GPTKERNELS_DEVICE
