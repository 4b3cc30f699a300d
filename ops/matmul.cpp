#include "matmul.h"

#include "../csrc/column_sum.h"

#ifdef GPTKERNELS_CUDA
#include "../csrc/cuda/matmul.h"
#else
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#endif

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

void column_sums(const Launcher& launcher, const Tensor& out, const Matrix& x) {
  dispatch_floating(out, [&]<typename T>() {
    const Tensor partials = workspace(column_sum_workspace<T>(x.rows, x.columns), out);
    launcher.check(column_sum<T>({.out = pointer<T>(out),
                                  .x = pointer<T>(x.tensor),
                                  .workspace = pointer<void>(partials),
                                  .rows = x.rows,
                                  .width = x.columns},
                                 launcher.stream()));
  });
}

#ifndef GPTKERNELS_CUDA

// The matrix, or batch of them, as a tensor of its own over the same memory.
Tensor strided(const Matrix& m) {
  const int64_t sizes[] = {m.batches, m.rows, m.columns};
  const int64_t strides[] = {m.batch_stride, m.row_stride, m.column_stride};
  const int skip = m.batches == 1 ? 1 : 0;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(m.tensor.get(), 3 - skip, sizes + skip, strides + skip, m.offset, &handle));
  return Tensor(handle);
}

// torch's own BLAS, called below the dispatcher, so that no autocast or autograd of the caller's thread has a say.
// Where beta is 0, what is in out is not read.
AOTITorchError product(const Matrix& out, const Matrix& a, const Matrix& b, double alpha) {
  const Tensor o = strided(out), x = strided(a), y = strided(b);
  if (out.batches == 1) {
    if (alpha == 1) return aoti_torch_cpu_mm_out(o.get(), x.get(), y.get());
    return aoti_torch_cpu_addmm_out(o.get(), o.get(), x.get(), y.get(), 0, alpha);
  }
  if (alpha == 1) return aoti_torch_cpu_bmm_out(o.get(), x.get(), y.get());
  return aoti_torch_cpu_baddbmm_out(o.get(), o.get(), x.get(), y.get(), 0, alpha);
}

AOTITorchError product_plus_bias(const Matrix& out, const Matrix& a, const Matrix& b, const Tensor& bias) {
  const Tensor o = strided(out), x = strided(a), y = strided(b);
  return aoti_torch_cpu_addmm_out(o.get(), bias.get(), x.get(), y.get(), 1, 1);
}

#endif

}  // namespace

#ifndef GPTKERNELS_CUDA

void matmul(const Launcher& launcher, const Matrix& out, const Matrix& a, const Matrix& b, const Epilogue& epilogue) {
  STABLE_TORCH_ERROR_CODE_CHECK(epilogue.bias ? product_plus_bias(out, a, b, *epilogue.bias)
                                              : product(out, a, b, epilogue.alpha));
  if (epilogue.column_sums) column_sums(launcher, *epilogue.column_sums, out);
  if (epilogue.a_sums) column_sums(launcher, *epilogue.a_sums, a.transposed());
}

#endif

void weight_gradient(const Launcher& launcher, const OptionalTensor& dweight, const OptionalTensor& dbias,
                     const Matrix& dout, const Matrix& x) {
  if (dweight)
    matmul(launcher, matrix(*dweight), dout.transposed(), x, {.a_sums = dbias});
  else if (dbias)
    column_sums(launcher, *dbias, dout);
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
