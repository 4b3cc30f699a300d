#pragma once

#include "../csrc/fp8.h"
#include "matmul.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// `values` has the tensor's shape, and `transposed` is (C, N rounded up to a multiple of 16). Members that are not
// needed have no elements.
struct Quantized {
  Tensor values;
  Tensor transposed;
  Tensor scale;  // 0-dim float32
};

struct QuantizeOptions {
  bool transposed = false;
  bool values = true;  // if false, only `transposed` is written (on CUDA)
  bool gelu = false;
  OptionalTensor dgelu_at = {};     // quantises x * GELU'(dgelu_at)
  OptionalTensor column_sums = {};  // (C): sums over the rows before quantisation
};

void check_quantizable(const char* op, const char* name, const Tensor& t);
void check_fp8(const char* op, const char* name, const Tensor& t);
void check_history(const char* op, const char* name, const OptionalTensor& history, const char* like_name,
                   const Tensor& like);

void check_features(const char* op, const char* name, int64_t features);

// cuBLASLt and packed stores require this alignment, which tensors from torch's allocator have.
void check_fp8_aligned(const char* op, const char* name, const Tensor& t);

Quantized allocate_quantized(const Tensor& x, ScalarType dtype, bool transposed, bool values = true);

Quantized quantize(const Launcher& launcher, const Tensor& x, const OptionalTensor& history, ScalarType dtype,
                   const QuantizeOptions& options = {});

inline Fp8Format format_of(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn ? Fp8Format::kE4M3 : Fp8Format::kE5M2;
}

template <typename Fn>
void dispatch_fp8(const Tensor& t, const Fn& fn) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return fn.template operator()<float>();
    case ScalarType::BFloat16: return fn.template operator()<bfloat16>();
    default: return fn.template operator()<float16>();
  }
}

// Without a workspace.
template <typename T>
Fp8Quantize<T> quantize_arguments(const Quantized& out, const Tensor& x, const OptionalTensor& history,
                                  const QuantizeOptions& options = {}, Fp8Source source = Fp8Source::kValues) {
  return {.out = pointer<uint8_t>(out.values),
          .out_transposed = pointer<uint8_t>(out.transposed),
          .scale = pointer<float>(out.scale),
          .column_sums = pointer<T>(options.column_sums),
          .x = pointer<T>(x),
          .u = pointer<T>(options.dgelu_at),
          .history = pointer<int32_t>(history),
          .workspace = nullptr,
          .rows = rows_of(x),
          .width = width_of(x),
          .format = format_of(out.values.scalar_type()),
          .source = source};
}

inline Matrix flat(const Tensor& t) {
  return {t, rows_of(t), width_of(t), width_of(t), 1};
}

// A (rows, inner) matrix with contiguous rows, and its optional scale.
struct Fp8Operand {
  Matrix values;
  OptionalTensor scale;

  Fp8Operand(const Matrix& values, const OptionalTensor& scale) : values(values), scale(scale) {}
  Fp8Operand(const Tensor& values, const Tensor& scale) : values(flat(values)), scale(scale) {}  // dense
};

struct Fp8ProductOptions {
  OptionalTensor bias = {};
  bool fast_accumulation = false;  // sums with 14 bits of significand
  bool accumulate = false;         // adds to out, which is float32; excludes bias
  float alpha = 1;
};

// out (rows, columns) = alpha * scale_a * scale_b * a @ b^T + bias. The rows of out are dense.
void fp8_product(const Launcher& launcher, const Matrix& out, const Fp8Operand& a, const Fp8Operand& b,
                 const Fp8ProductOptions& options);

// dweight = dout^T @ x, as fp8_product() computes it. dout is the beginning of a dense tensor, x_t is
// x transposed and padded, and dout_t has space for dout transposed and padded.
void fp8_weight_gradient(const Launcher& launcher, const Matrix& dweight, const Fp8Operand& dout, const Tensor& dout_t,
                         const Fp8Operand& x_t, const Fp8ProductOptions& options);

// Computes `out` as fp8_product() does, and quantises it as quantize() does, in one kernel if a kernel supports the
// arguments. With dgelu_at, that kernel may leave `out` unwritten.
Quantized quantize_product(const Launcher& launcher, const Tensor& out, const Fp8Operand& a, const Fp8Operand& b,
                           const Fp8ProductOptions& product, const OptionalTensor& history, ScalarType dtype,
                           const QuantizeOptions& options);

}  // namespace gptkernels::GPTKERNELS_DEVICE
