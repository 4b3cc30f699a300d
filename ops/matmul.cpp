#include "matmul.h"

#include <array>

#include "../csrc/column_sum.h"
#include "../csrc/gelu.h"

#ifdef GPTKERNELS_CUDA
#include "../csrc/cuda/gemm/matmul.h"
#else
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "../csrc/cpu/matmul.h"
#endif

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

#ifdef GPTKERNELS_CUDA

cublasHandle_t cublas() {
  return static_cast<cublasHandle_t>(cublas_handle());
}

// cuBLASLt receives stream and workspace with each matmul and reads no math mode, so torch need not set up the handle
// at each call. torch has one handle for each thread and device, and never destroys it.
cublasHandle_t cublas_lt(const Tensor& like) {
  constexpr size_t kMaxDevices = 64;
  thread_local std::array<cublasHandle_t, kMaxDevices> known = {};
  const auto device = static_cast<size_t>(like.get_device_index());
  if (device >= kMaxDevices) return cublas();
  if (!known[device]) known[device] = cublas();
  return known[device];
}

// Null for an empty matrix.
template <typename T>
T* start(const Matrix& m) {
  T* base = pointer<T>(m.tensor);
  return base ? base + m.offset : nullptr;
}

// BLAS reads a matrix whose rows are contiguous and `ld` elements apart, or its transpose. A matrix with one row may
// have any row stride, but BLAS requires an `ld` of at least the row's length.
bool is_transposed(const Matrix& m) {
  return m.column_stride != 1;
}

int64_t leading_dimension(const Matrix& m) {
  return is_transposed(m) ? std::max(m.column_stride, m.rows) : std::max(m.row_stride, m.columns);
}

#else

Tensor strided(const Matrix& m) {
  const int64_t sizes[] = {m.batches, m.rows, m.columns};
  const int64_t strides[] = {m.batch_stride, m.row_stride, m.column_stride};
  const int skip = m.batches == 1 ? 1 : 0;
  AtenTensorHandle handle;
  check_shim(aoti_torch__reinterpret_tensor(m.tensor.get(), 3 - skip, sizes + skip, strides + skip, m.offset, &handle));
  return Tensor(handle);
}

// On processors with AMX, oneDNN loads 32 16-bit elements of a row at a time, and multiplies those beyond `columns` by
// 0. Most of them belong to the next row. A NaN or an infinity among them would make this row's results NaN. Rows whose
// length is not a multiple of 32 are therefore copied and followed by zeros.
Tensor first_operand(const Matrix& a) {
  constexpr int64_t kUnit = 32;
  const Tensor x = strided(a);
  if (a.tensor.element_size() != 2 || a.column_stride != 1 || a.columns % kUnit == 0) return x;
  const int64_t ld = (a.columns / kUnit + 1) * kUnit;
  const Tensor padded = allocate({a.batches, a.rows, ld}, a.tensor);
  check_shim(aoti_torch_zero_(padded.get()));
  Tensor rows = strided({padded, a.rows, a.columns, ld, 1, 0, a.batches, a.rows * ld});
  torch::stable::copy_(rows, x);
  return rows;
}

// Calls torch's BLAS below the dispatcher, so that the caller's autocast and autograd do not apply. If beta is 0, `out`
// is not read. For an alpha of 0, oneDNN, which torch calls for 16-bit matrices, would leave `out` unwritten.
AOTITorchError product(const Matrix& out, const Matrix& a, const Matrix& b, double alpha, double beta) {
  const Tensor o = strided(out), x = first_operand(a), y = strided(b);
  if (alpha == 0 && beta == 0) return aoti_torch_zero_(o.get());
  if (out.batches == 1) {
    if (alpha == 1 && beta == 0) return aoti_torch_cpu_mm_out(o.get(), x.get(), y.get());
    return aoti_torch_cpu_addmm_out(o.get(), o.get(), x.get(), y.get(), beta, alpha);
  }
  if (alpha == 1 && beta == 0) return aoti_torch_cpu_bmm_out(o.get(), x.get(), y.get());
  return aoti_torch_cpu_baddbmm_out(o.get(), o.get(), x.get(), y.get(), beta, alpha);
}

// a @ b of 16-bit operands is rounded to their dtype, and then written or added to the float32 `out`.
void wide_product(const Launcher& launcher, const Matrix& out, const Matrix& a, const Matrix& b, double alpha,
                  bool accumulate) {
  const Matrix narrow = matrix(allocate({out.rows, out.columns}, a.tensor));
  check_shim(product(narrow, a, b, alpha, 0));
  dispatch_floating(narrow.tensor, [&]<typename T>() {
    float* to = pointer<float>(out.tensor);
    const T* from = pointer<T>(narrow.tensor);
    const int64_t size = narrow.tensor.numel();
    accumulate ? add_widened(to, from, size, launcher.stream()) : widen(to, from, size, launcher.stream());
  });
}

AOTITorchError product_plus_bias(const Matrix& out, const Matrix& a, const Matrix& b, const Tensor& bias) {
  const Tensor o = strided(out), x = first_operand(a), y = strided(b);
  return aoti_torch_cpu_addmm_out(o.get(), bias.get(), x.get(), y.get(), 1, 1);
}

void gelu(const Launcher& launcher, const Tensor& out, const Tensor& x) {
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(gelu_forward<T>(
        {.out = pointer<T>(out), .x = pointer<T>(x), .size = x.numel(), .form = GeluForm::kTanh}, launcher.stream()));
  });
}

// In place.
void dgelu(const Launcher& launcher, const Tensor& out, const Tensor& x) {
  dispatch_floating(x, [&]<typename T>() {
    launcher.check(gelu_backward<T>({.dx = pointer<T>(out),
                                     .dout = pointer<T>(out),
                                     .x = pointer<T>(x),
                                     .size = x.numel(),
                                     .form = GeluForm::kTanh},
                                    launcher.stream()));
  });
}

#endif

}  // namespace

#ifdef GPTKERNELS_CUDA

void* cublas_handle() {
  static const char* const missing = missing_cublas_function();
  if (missing)
    throw std::runtime_error(std::string("gptkernels: torch has loaded no cuBLAS of CUDA 12 or 13 with the function ") +
                             missing);
  void* handle;
  check_shim(torch_get_current_cuda_blas_handle(&handle));
  return handle;
}

Matrix allocate_intermediate(const Matrix& a, const Matrix& b) {
  return matrix(allocate({a.rows, b.columns}, a.tensor));
}

bool tf32_allowed() {
  cublasMath_t mode = CUBLAS_DEFAULT_MATH;
  return cublasGetMathMode(cublas(), &mode) == CUBLAS_STATUS_SUCCESS && (mode & 0x3) == CUBLAS_TF32_TENSOR_OP_MATH;
}

void matmul(const Launcher& launcher, const Matrix& out, const Matrix& a, const Matrix& b, const Epilogue& epilogue) {
  if (is_transposed(out)) return matmul(launcher, out.transposed(), b.transposed(), a.transposed(), epilogue);
  const bool wide = out.tensor.scalar_type() != a.tensor.scalar_type();
  dispatch_floating(a.tensor, [&]<typename T>() {
    const Matmul<T> p = {.out = wide ? nullptr : start<T>(out),
                         .a = start<T>(a),
                         .b = start<T>(b),
                         .rows = out.rows,
                         .columns = out.columns,
                         .inner = a.columns,
                         .out_ld = leading_dimension(out),
                         .a_ld = leading_dimension(a),
                         .b_ld = leading_dimension(b),
                         .a_transposed = is_transposed(a),
                         .b_transposed = is_transposed(b),
                         .batches = out.batches,
                         .out_stride = out.batch_stride,
                         .a_stride = a.batch_stride,
                         .b_stride = b.batch_stride,
                         .alpha = epilogue.alpha,
                         .bias = pointer<T>(epilogue.bias),
                         .pre_gelu = pointer<T>(epilogue.pre_gelu),
                         .dgelu_at = pointer<T>(epilogue.dgelu_at),
                         .wide_out = wide ? start<accumulate_t<T>>(out) : nullptr,
                         .accumulate = epilogue.accumulate,
                         .column_sums = pointer<T>(epilogue.column_sums)};
    constexpr bool k16Bits = sizeof(T) == 2;  // no math mode
    cublasHandle_t handle = k16Bits ? cublas_lt(out.tensor) : cublas();
    const MatmulPlan plan = matmul_plan(p, handle);
    if (k16Bits && plan.needs_cublas()) handle = cublas();
    const OptionalTensor scratch = workspace_if(plan.workspace, out.tensor);
    const MatmulStatus status = matmul(p, plan, pointer<void>(scratch), handle, launcher.stream());
    launcher.check(status.cuda);
    if (status.cublas != CUBLAS_STATUS_SUCCESS)
      fail(launcher.op(), "cuBLAS error: ", cublasGetStatusString(status.cublas));
    if (epilogue.column_sums && !plan.sm90) column_sums(launcher, *epilogue.column_sums, out);
  });
}

#else

bool tf32_allowed() {
  return false;
}

Matmul own_product(const Matrix& a, const Matrix& b) {
  const auto strided = [](const Matrix& m) {
    return Strided{pointer<float>(m.tensor) + m.offset, m.row_stride, m.column_stride};
  };
  return {.a = strided(a), .b = strided(b), .rows = a.rows, .columns = b.columns, .inner = a.columns};
}

bool uses_own_kernels(const Matrix& a, const Matrix& b, double alpha = 1) {
  return a.tensor.scalar_type() == ScalarType::Float && a.batches == 1 && b.batches == 1 && alpha == 1 &&
         matmul_supports(own_product(a, b));
}

void own_matmul(const Launcher& launcher, const Matrix& out, const Matrix& a, const Matrix& b,
                const Epilogue& epilogue) {
  Matmul p = own_product(a, b);
  p.out = pointer<float>(out.tensor) + out.offset;
  p.out_ld = out.row_stride;
  p.accumulate = epilogue.accumulate;
  p.bias = pointer<float>(epilogue.bias);
  p.pre_gelu = pointer<float>(epilogue.pre_gelu);
  p.dgelu_at = pointer<float>(epilogue.dgelu_at);
  p.column_sums = pointer<float>(epilogue.column_sums);
  const int64_t bytes = matmul_workspace(p);
  const OptionalTensor scratch = workspace_if(bytes, out.tensor);
  p.workspace = pointer<void>(scratch);
  launcher.check(matmul(p, launcher.stream()));
}

Matrix allocate_intermediate(const Matrix& a, const Matrix& b) {
  const int64_t ld = uses_own_kernels(a, b) ? matmul_ld(b.columns) : b.columns;
  const Tensor out = allocate_strided({a.rows, b.columns}, {ld, 1}, a.tensor.scalar_type(), a.tensor);
  return {out, a.rows, b.columns, ld, 1};
}

void matmul_by_blas(const Launcher& launcher, const Matrix& out, const Matrix& a, const Matrix& b,
                    const Epilogue& epilogue) {
  const Matrix first = epilogue.pre_gelu ? matrix(*epilogue.pre_gelu) : out;
  check_shim(epilogue.bias ? product_plus_bias(first, a, b, *epilogue.bias)
                           : product(first, a, b, epilogue.alpha, epilogue.accumulate));
  if (epilogue.pre_gelu) gelu(launcher, out.tensor, first.tensor);
  if (epilogue.dgelu_at) dgelu(launcher, out.tensor, *epilogue.dgelu_at);
  if (epilogue.column_sums) column_sums(launcher, *epilogue.column_sums, out);
}

void matmul(const Launcher& launcher, const Matrix& out, const Matrix& a, const Matrix& b, const Epilogue& epilogue) {
  if (out.tensor.scalar_type() != a.tensor.scalar_type())
    return wide_product(launcher, out, a, b, epilogue.alpha, epilogue.accumulate);
  if (out.column_stride != 1) return matmul(launcher, out.transposed(), b.transposed(), a.transposed(), epilogue);
  uses_own_kernels(a, b, epilogue.alpha) ? own_matmul(launcher, out, a, b, epilogue)
                                         : matmul_by_blas(launcher, out, a, b, epilogue);
}

#endif

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

}  // namespace gptkernels::GPTKERNELS_DEVICE
