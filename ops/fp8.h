// Matrices of float8 numbers: quantisation, and their products. See docs/fp8.md.
#pragma once

#include "../csrc/fp8.h"
#include "matmul.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// A quantised tensor. values has its shape; transposed is (C, N rounded up to a multiple of 16). Either may have no
// elements.
struct Quantized {
  Tensor values;
  Tensor transposed;
  Tensor scale;  // 0-dim float32
};

// What is quantised besides the values of a tensor, and what else the pass writes.
struct QuantizeOptions {
  bool transposed = false;
  bool values = true;               // CUDA: else the transposed copy alone
  bool gelu = false;                // quantise GELU (tanh) of x
  OptionalTensor dgelu_at = {};     // quantise x times GELU's derivative there
  OptionalTensor column_sums = {};  // (C), of x's dtype: takes the sums over all rows of what is quantised
};

void check_quantizable(const char* op, const char* name, const Tensor& t);
void check_fp8(const char* op, const char* name, const Tensor& t);
void check_history(const char* op, const char* name, const OptionalTensor& history, const char* like_name,
                   const Tensor& like);

// Features that a layer multiplies by on the tensor cores: a multiple of 16.
void check_features(const char* op, const char* name, int64_t features);

// The tensors without data, for a tensor like x.
Quantized allocate_quantized(const Tensor& x, ScalarType dtype, bool transposed, bool values = true);

Quantized quantize(const Launcher& launcher, const Tensor& x, const OptionalTensor& history, ScalarType dtype,
                   const QuantizeOptions& options = {});

inline Fp8Format format_of(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn ? Fp8Format::kE4M3 : Fp8Format::kE5M2;
}

// fn with the kernels' type for a tensor's dtype, which has been checked.
template <typename Fn>
void dispatch_fp8(const Tensor& t, const Fn& fn) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return fn.template operator()<float>();
    case ScalarType::BFloat16: return fn.template operator()<bfloat16>();
    default: return fn.template operator()<float16>();
  }
}

// The kernel's arguments, without a workspace.
template <typename T>
Fp8Quantize<T> pass_of(const Quantized& out, const Tensor& x, const OptionalTensor& history,
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

// A dense tensor as a matrix: all dimensions but the last are its rows.
inline Matrix flat(const Tensor& t) {
  return {t, rows_of(t), width_of(t), width_of(t), 1};
}

// A matrix (rows, inner), its rows contiguous, whose numbers are to be multiplied by the scale, if there is one.
struct Fp8Operand {
  Matrix values;
  OptionalTensor scale;

  Fp8Operand(const Matrix& values, const OptionalTensor& scale) : values(values), scale(scale) {}
  Fp8Operand(const Tensor& values, const Tensor& scale) : values(flat(values)), scale(scale) {}  // dense
};

struct Fp8ProductOptions {
  OptionalTensor bias = {};
  bool fast_accumulation = false;  // it has 14 bits of significand
  bool accumulate = false;         // add the product to what is in out, which is float32; without a bias
  float alpha = 1;
};

// out (rows, columns) = alpha * a @ b^T + bias; out's rows are dense.
void fp8_product(const Launcher& launcher, const Matrix& out, const Fp8Operand& a, const Fp8Operand& b,
                 const Fp8ProductOptions& options);

// fp8_product, then quantise what it gives, with a history, in one kernel where there is one. With dgelu_at out may be
// left unwritten.
Quantized quantize_product(const Launcher& launcher, const Tensor& out, const Fp8Operand& a, const Fp8Operand& b,
                           const Fp8ProductOptions& product, const OptionalTensor& history, ScalarType dtype,
                           const QuantizeOptions& options);

}  // namespace gptkernels::GPTKERNELS_DEVICE
