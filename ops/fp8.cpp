#include "fp8.h"

#ifdef GPTKERNELS_CUDA
#include "../csrc/cuda/fp8/sm90_gelu.h"
#include "../csrc/cuda/gemm/fp8.h"
#else
#include "../csrc/cpu/fp8_matmul.h"
#include "../csrc/gelu.h"
#endif

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

bool is_fp8(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2;
}

template <typename T>
void launch_quantize(const Launcher& launcher, Fp8Quantize<T> quantization, const Tensor& x) {
  const Tensor scratch = workspace(fp8_quantize_workspace<T>(quantization.rows, quantization.width), x);
  quantization.workspace = pointer<void>(scratch);
  launcher.check(fp8_quantize<T>(quantization, launcher.stream()));
}

#ifdef GPTKERNELS_CUDA

Fp8Source source_of(const QuantizeOptions& options) {
  if (options.gelu) return Fp8Source::kGelu;
  return options.dgelu_at ? Fp8Source::kGeluGradient : Fp8Source::kValues;
}

// cuBLASLt's float8 matmuls load the bias in packs of 16 bytes.
OptionalTensor aligned(const OptionalTensor& bias) {
  if (!bias || reinterpret_cast<uintptr_t>(pointer<void>(bias)) % kFp8Alignment == 0) return bias;
  Tensor copy = allocate(shape_of(*bias), *bias);
  torch::stable::copy_(copy, *bias);
  return copy;
}

// Null for an empty matrix.
template <typename T>
T* start(const Matrix& m) {
  T* base = pointer<T>(m.tensor);
  return base ? base + m.offset : nullptr;
}

template <typename T>
Fp8Matmul<T> product_of(const Matrix& out, const Fp8Operand& a, const Fp8Operand& b, const Fp8ProductOptions& options) {
  return {.out = start<T>(out),
          .a = start<uint8_t>(a.values),
          .b = start<uint8_t>(b.values),
          .scale_a = pointer<float>(a.scale),
          .scale_b = pointer<float>(b.scale),
          .bias = pointer<T>(options.bias),
          .rows = a.values.rows,
          .columns = b.values.rows,
          .inner = a.values.columns,
          .a_ld = a.values.row_stride,
          .b_ld = b.values.row_stride,
          .a_format = format_of(a.values.tensor.scalar_type()),
          .b_format = format_of(b.values.tensor.scalar_type()),
          .fast_accumulation = options.fast_accumulation,
          .accumulate = options.accumulate,
          .alpha = options.alpha};
}

// A matmul that accumulates is timed with another output, so that out does not change.
template <typename T>
Fp8Plan autotuned_plan(const Launcher& launcher, const Tensor& like, Fp8Matmul<T> p, const Fp8Plan& plan,
                       cublasHandle_t handle) {
  const Tensor scratch = workspace(kLargestWorkspace, like);
  const OptionalTensor other = workspace_if(p.accumulate ? p.rows * p.columns * int64_t(sizeof(T)) : 0, like);
  if (p.accumulate) p.out = pointer<T>(other);
  return fp8_matmul_autotune(p, plan, pointer<void>(scratch), handle, launcher.stream());
}

template <typename T>
void launch_product(const Launcher& launcher, const Tensor& out, const Fp8Matmul<T>& p) {
  const auto handle = static_cast<cublasHandle_t>(cublas_handle());
  Fp8Plan plan = fp8_matmul_plan(p, handle);
  if (!plan.found)
    fail(launcher.op(), "cuBLASLt has no float8 product of (", p.rows, ", ", p.inner, ") and (", p.columns, ", ",
         p.inner, ")^T on this GPU; it needs compute capability 8.9 or newer");
  if (plan.needs_autotune) plan = autotuned_plan(launcher, out, p, plan, handle);
  const Tensor scratch = workspace(plan.workspace, out);
  const MatmulStatus status = fp8_matmul(p, plan, pointer<void>(scratch), handle, launcher.stream());
  launcher.check(status.cuda);
  if (status.cublas != CUBLAS_STATUS_SUCCESS)
    fail(launcher.op(), "cuBLAS error: ", cublasGetStatusString(status.cublas));
}

#else

Tensor source_of(const Launcher& launcher, const Tensor& x, const QuantizeOptions& options) {
  if (!options.gelu && !options.dgelu_at) return x;
  const Tensor out = allocate(shape_of(x), x);
  dispatch_fp8(x, [&]<typename T>() {
    if (options.gelu)
      launcher.check(gelu_forward<T>(
          {.out = pointer<T>(out), .x = pointer<T>(x), .size = x.numel(), .form = GeluForm::kTanh}, launcher.stream()));
    else
      launcher.check(gelu_backward<T>({.dx = pointer<T>(out),
                                       .dout = pointer<T>(x),
                                       .x = pointer<T>(options.dgelu_at),
                                       .size = x.numel(),
                                       .form = GeluForm::kTanh},
                                      launcher.stream()));
  });
  return out;
}

Tensor widened(const Launcher& launcher, const Matrix& x) {
  const Tensor wide = allocate({x.rows, x.columns}, ScalarType::Float, x.tensor);
  launcher.check(fp8_widen(pointer<float>(wide), pointer<uint8_t>(x.tensor) + x.offset, x.rows, x.columns, x.row_stride,
                           format_of(x.tensor.scalar_type()), launcher.stream()));
  return wide;
}

#endif

Shape product_shape(const Tensor& a, const Tensor& b) {
  Shape shape = shape_of(a);
  shape.back() = b.size(0);
  return shape;
}

void check_scale(const char* op, const char* name, const Tensor& scale, const Tensor& like) {
  check_dtype(op, name, scale, ScalarType::Float);
  check_shape(op, name, scale, {});
  check_same_device(op, name, scale, "a", like);
}

std::tuple<Tensor, Tensor, Tensor> fp8_quantize_op(const Tensor& x, const OptionalTensor& history, ScalarType dtype,
                                                   bool transposed) {
  constexpr const char* op = "fp8_quantize";
  check_dim_at_least(op, "x", x, 1);
  check_quantizable(op, "x", x);
  if (!is_fp8(dtype)) fail(op, "dtype must be float8_e4m3fn or float8_e5m2, got ", describe(dtype));
  check_history(op, "history", history, "x", x);
  const Launcher launcher(op, x);
  const Quantized out = quantize(launcher, dense(x), history, dtype, {.transposed = transposed});
  return {out.values, out.transposed, out.scale};
}

Tensor fp8_matmul_op(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                     const OptionalTensor& bias, ScalarType dtype, bool fast_accumulation) {
  constexpr const char* op = "fp8_matmul";
  check_dim_at_least(op, "a", a, 1);
  check_fp8(op, "a", a);
  check_fp8(op, "b", b);
  check_same_device(op, "b", b, "a", a);
  if (b.dim() != 2 || b.size(1) != width_of(a))
    fail(op, "b must have shape (columns, ", width_of(a), "), got ", describe(shape_of(b)));
  if (a.scalar_type() == ScalarType::Float8_e5m2 && b.scalar_type() == ScalarType::Float8_e5m2)
    fail(op, "one of a and b must be float8_e4m3fn, got two of float8_e5m2");
  check_features(op, "the last dimension of a and b", b.size(1));
  check_features(op, "the first dimension of b", b.size(0));
  check_scale(op, "scale_a", scale_a, a);
  check_scale(op, "scale_b", scale_b, a);
  if (dtype != ScalarType::Float && dtype != ScalarType::BFloat16 && dtype != ScalarType::Half)
    fail(op, "dtype must be float32, bfloat16 or float16, got ", describe(dtype));
  if (bias) {
    check_dtype(op, "bias", *bias, dtype);
    check_same_device(op, "bias", *bias, "a", a);
    check_shape(op, "bias", bias, {b.size(0)});
  }
  const Launcher launcher(op, a);
  const Tensor out = allocate(product_shape(a, b), dtype, a);
  const Tensor a_dense = dense(a), b_dense = dense(b);
  check_fp8_aligned(op, "a", a_dense);
  check_fp8_aligned(op, "b", b_dense);
  fp8_product(launcher, flat(out), {a_dense, scale_a}, {b_dense, scale_b},
              {.bias = dense(bias), .fast_accumulation = fast_accumulation});
  return out;
}

}  // namespace

void check_quantizable(const char* op, const char* name, const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::BFloat16 && dtype != ScalarType::Half)
    fail(op, name, " must be float32, bfloat16 or float16, got ", describe(dtype));
}

void check_fp8(const char* op, const char* name, const Tensor& t) {
  if (!is_fp8(t.scalar_type()))
    fail(op, name, " must be float8_e4m3fn or float8_e5m2, got ", describe(t.scalar_type()));
}

void check_history(const char* op, const char* name, const OptionalTensor& history, const char* like_name,
                   const Tensor& like) {
  if (!history) return;
  check_dtype(op, name, *history, ScalarType::Int);
  check_shape(op, name, *history, {kFp8History});
  check_same_device(op, name, *history, like_name, like);
  if (!history->is_contiguous()) fail(op, name, " is written in place and must be contiguous");
}

void check_features(const char* op, const char* name, int64_t features) {
  if (features % kFp8Alignment != 0)
    fail(op, name, " must be a multiple of ", kFp8Alignment, " for float8 products, got ", features);
}

void check_fp8_aligned(const char* op, const char* name, const Tensor& t) {
  if (reinterpret_cast<uintptr_t>(pointer<void>(t)) % kFp8Alignment != 0)
    fail(op, name, " must begin at a multiple of ", kFp8Alignment, " bytes");
}

Quantized allocate_quantized(const Tensor& x, ScalarType dtype, bool transposed, bool values) {
  const Shape shape = transposed ? Shape{width_of(x), fp8_padded(rows_of(x))} : Shape{0};
  return {allocate(values ? shape_of(x) : Shape{0}, dtype, x), allocate(shape, dtype, x),
          allocate({}, ScalarType::Float, x)};
}

Quantized quantize(const Launcher& launcher, const Tensor& x, const OptionalTensor& history, ScalarType dtype,
                   const QuantizeOptions& options) {
#ifdef GPTKERNELS_CUDA
  const Quantized out = allocate_quantized(x, dtype, options.transposed, options.values);
  dispatch_fp8(x, [&]<typename T>() {
    launch_quantize<T>(launcher, quantize_arguments<T>(out, x, history, options, source_of(options)), x);
  });
#else
  const Quantized out = allocate_quantized(x, dtype, options.transposed);
  const Tensor values = source_of(launcher, x, options);
  dispatch_fp8(x, [&]<typename T>() {
    launch_quantize<T>(launcher, quantize_arguments<T>(out, values, history, {}, Fp8Source::kValues), x);
  });
  if (options.column_sums)
    column_sums(launcher, *options.column_sums,
                {values, rows_of(x), width_of(x), std::max<int64_t>(width_of(x), 1), 1});
#endif
  return out;
}

void fp8_product(const Launcher& launcher, const Matrix& out, const Fp8Operand& a, const Fp8Operand& b,
                 const Fp8ProductOptions& options) {
#ifdef GPTKERNELS_CUDA
  Fp8ProductOptions added = options;
  added.bias = aligned(options.bias);
  dispatch_fp8(out.tensor,
               [&]<typename T>() { launch_product<T>(launcher, out.tensor, product_of<T>(out, a, b, added)); });
#else
  const int64_t rows = a.values.rows, columns = b.values.rows;
  const Tensor product = allocate({rows, columns}, ScalarType::Float, out.tensor);
  matmul(launcher, matrix(product), matrix(widened(launcher, a.values)),
         matrix(widened(launcher, b.values)).transposed());
  dispatch_fp8(out.tensor, [&]<typename T>() {
    launcher.check(fp8_epilogue<T>({.out = pointer<T>(out.tensor) + out.offset,
                                    .product = pointer<float>(product),
                                    .scale_a = pointer<float>(a.scale),
                                    .scale_b = pointer<float>(b.scale),
                                    .bias = pointer<T>(options.bias),
                                    .rows = rows,
                                    .columns = columns,
                                    .alpha = options.alpha,
                                    .accumulate = options.accumulate},
                                   launcher.stream()));
  });
#endif
}

void fp8_weight_gradient(const Launcher& launcher, const Matrix& dweight, const Fp8Operand& dout, const Tensor& dout_t,
                         const Fp8Operand& x_t, const Fp8ProductOptions& options) {
  const int64_t width = dout.values.columns, padded = fp8_padded(dout.values.rows);
  launcher.check(fp8_transpose({.out = pointer<uint8_t>(dout_t),
                                .x = pointer<uint8_t>(dout.values.tensor),
                                .rows = dout.values.rows,
                                .width = width,
                                .out_stride = padded},
                               launcher.stream()));
  fp8_product(launcher, dweight, {Matrix{dout_t, width, padded, padded, 1}, dout.scale}, x_t, options);
}

Quantized quantize_product(const Launcher& launcher, const Tensor& out, const Fp8Operand& a, const Fp8Operand& b,
                           const Fp8ProductOptions& product, const OptionalTensor& history, ScalarType dtype,
                           const QuantizeOptions& options) {
#ifdef GPTKERNELS_CUDA
  const Quantized quantized = allocate_quantized(out, dtype, options.transposed);
  Fp8ProductOptions added = product;
  added.bias = aligned(product.bias);
  dispatch_fp8(out, [&]<typename T>() {
    const Fp8Matmul<T> p = product_of<T>(flat(out), a, b, added);
    Fp8Quantize<T> quantization = quantize_arguments<T>(quantized, out, history, options, source_of(options));
    if (!fp8_gelu_sm90_supports(p, quantization)) {
      launch_product(launcher, out, p);
      launch_quantize(launcher, quantization, out);
      return;
    }
    const Tensor scratch = workspace(fp8_gelu_sm90_workspace(p), out);
    quantization.workspace = pointer<void>(scratch);
    launcher.check(fp8_gelu_sm90(p, quantization, launcher.stream()));
  });
  return quantized;
#else
  fp8_product(launcher, flat(out), a, b, product);
  return quantize(launcher, out, history, dtype, options);
#endif
}

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("fp8_quantize", TORCH_BOX(&fp8_quantize_op));
  m.impl("fp8_matmul", TORCH_BOX(&fp8_matmul_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
