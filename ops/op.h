// Common code of all operators. An op's file is compiled once for each device; GPTKERNELS_CUDA selects the kernels'
// namespace and the dispatch key.
//
// Only LibTorch's stable ABI is used (torch/csrc/stable, torch/headeronly and the C shims), so one build supports torch
// >= 2.10. Only std::runtime_error crosses that ABI, so all errors have this type.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../csrc/device.h"
#include "../csrc/philox.h"

#ifdef GPTKERNELS_CUDA
#define GPTKERNELS_KEY CUDA
#else
#define GPTKERNELS_KEY CPU
#endif

namespace gptkernels::GPTKERNELS_DEVICE {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

// ---- error messages -------------------------------------------------------------------------------------------------

// Error messages are not written to a C++ stream. A stream would use the process's locale, which a libstdc++ that is
// linked statically into this library cannot access.
inline void append(std::string& text, const std::string& part) {
  text += part;
}
inline void append(std::string& text, const char* part) {
  text += part;
}
inline void append(std::string& text, char part) {
  text += part;
}
template <typename Number>
  requires(std::is_integral_v<Number>)
void append(std::string& text, Number part) {
  text += std::to_string(part);
}
inline void append(std::string& text, double part) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%g", part);
  text += digits;
}

inline std::string describe(const Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ')';
}

inline const char* describe(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Short: return "int16";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Bool: return "bool";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    default: return "an unsupported dtype";
  }
}

inline std::string describe_device(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

inline Shape shape_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return Shape(sizes.begin(), sizes.end());
}

template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::string text = std::string("gptkernels::") + op + ": ";
  (append(text, parts), ...);
  throw std::runtime_error(text);
}

// Null before torch 2.13.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

// Replaces torch's macro for this check, whose name is not the same in all releases.
inline void check_shim(AOTITorchError error) {
  if (error == AOTI_TORCH_SUCCESS) return;
  const bool has_message = torch_exception_get_what_without_backtrace != nullptr;
  throw std::runtime_error(std::string("gptkernels: a call into LibTorch failed") +
                           (has_message ? std::string(": ") + torch_exception_get_what_without_backtrace() : ""));
}

// ---- checks ---------------------------------------------------------------------------------------------------------

inline bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Float || dtype == ScalarType::BFloat16 ||
         dtype == ScalarType::Half;
}

inline void check_floating(const char* op, const char* name, const Tensor& t) {
  if (!is_floating(t.scalar_type()))
    fail(op, name, " must be float64, float32, bfloat16 or float16, got ", describe(t.scalar_type()));
}

inline void check_index(const char* op, const char* name, const Tensor& t) {
  if (t.scalar_type() != ScalarType::Long && t.scalar_type() != ScalarType::Int)
    fail(op, name, " must be int64 or int32, got ", describe(t.scalar_type()));
}

inline void check_dtype(const char* op, const char* name, const Tensor& t, ScalarType wanted) {
  if (t.scalar_type() != wanted) fail(op, name, " must be ", describe(wanted), ", got ", describe(t.scalar_type()));
}

inline void check_same_device(const char* op, const char* name, const Tensor& t, const char* other_name,
                              const Tensor& other) {
  if (t.is_cpu() != other.is_cpu() || (!t.is_cpu() && t.get_device_index() != other.get_device_index()))
    fail(op, name, " is on ", describe_device(t), " but ", other_name, " is on ", describe_device(other));
}

inline void check_like(const char* op, const char* name, const Tensor& t, const char* other_name, const Tensor& other) {
  check_same_device(op, name, t, other_name, other);
  if (t.scalar_type() != other.scalar_type())
    fail(op, name, " must have the dtype of ", other_name, " (", describe(other.scalar_type()), "), got ",
         describe(t.scalar_type()));
}

inline void check_like(const char* op, const char* name, const OptionalTensor& t, const char* other_name,
                       const Tensor& other) {
  if (t) check_like(op, name, *t, other_name, other);
}

// The order of writes in place would be undefined if elements shared memory.
inline void check_no_overlap(const char* op, const char* name, const Tensor& t) {
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.numel() > 0 && t.size(i) > 1 && t.stride(i) == 0)
      fail(op, name, " is written in place, but several of its elements share memory (dimension ", i, " is expanded)");
}

inline void check_shape(const char* op, const char* name, const Tensor& t, const Shape& wanted) {
  const auto sizes = t.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), wanted.begin(), wanted.end()))
    fail(op, name, " must have shape ", describe(wanted), ", got ", describe(shape_of(t)));
}

inline void check_shape(const char* op, const char* name, const OptionalTensor& t, const Shape& wanted) {
  if (t) check_shape(op, name, *t, wanted);
}

inline void check_dim_at_least(const char* op, const char* name, const Tensor& t, int64_t dims) {
  if (t.dim() < dims)
    fail(op, name, " must have at least ", dims, dims == 1 ? " dimension" : " dimensions", ", got shape ",
         describe(shape_of(t)));
}

inline void check_dropout(const char* op, const char* name, double probability, const OptionalTensor& seed,
                          const OptionalTensor& offset, const char* like_name, const Tensor& like) {
  if (!(probability >= 0 && probability <= 1)) fail(op, name, " must be from 0 to 1, got ", probability);
  const auto check = [&](const char* number, const OptionalTensor& t) {
    if (!t && probability > 0)
      fail(op, number, " must be given for ", name, " ", probability, ": a 0-dim int64 tensor");
    if (!t) return;
    check_dtype(op, number, *t, ScalarType::Long);
    check_shape(op, number, *t, {});
    check_same_device(op, number, *t, like_name, like);
  };
  check("seed", seed);
  check("offset", offset);
}

inline void check_first_index(const char* op, int64_t first_index) {
  if (first_index < 0 || first_index % kDenseGroup != 0)
    fail(op, "first_index must be a multiple of ", int64_t{kDenseGroup}, ", got ", first_index);
}

// ---- tensors --------------------------------------------------------------------------------------------------------

inline Tensor allocate_strided(const Shape& shape, const Shape& strides, ScalarType dtype, const Tensor& like) {
  const auto shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  int32_t device_type;
  check_shim(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  check_shim(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), shim_dtype,
                                      device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor allocate(const Shape& shape, ScalarType dtype, const Tensor& like) {
  Shape strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
  return allocate_strided(shape, strides, dtype, like);
}

inline Tensor allocate(const Shape& shape, const Tensor& like) {
  return allocate(shape, like.scalar_type(), like);
}

// Returns the text of an operator's string argument, and frees the argument, so it must be called once per argument.
// torch's own conversion to std::string, at least up to 2.13, leaks the string, and small blocks that are never freed
// fragment the heap between the large blocks that a training step frees.
inline std::string take_string(StringHandle handle) {
  size_t length = 0;
  const char* text = nullptr;
  check_shim(torch_string_length(handle, &length));
  check_shim(torch_string_c_str(handle, &text));
  std::string taken(text, length);
  check_shim(torch_delete_string(handle));
  return taken;
}

// Takes the place of an output that is not computed. The Python rules replace it by None if it is a backward's output.
inline Tensor absent(const Tensor& like) {
  return allocate({0}, like);
}

inline bool is_absent(const Tensor& t) {
  return t.dim() == 1 && t.size(0) == 0;
}

inline Tensor allocate_if(bool wanted, const Shape& shape, const Tensor& like) {
  return wanted ? allocate(shape, like) : absent(like);
}

// The caller may release scratch memory as soon as the kernels that use it are queued, because the allocator reuses the
// memory only for kernels that are queued later on the same stream.
inline Tensor workspace(int64_t bytes, const Tensor& like) {
  return allocate({bytes}, ScalarType::Byte, like);
}

inline OptionalTensor workspace_if(int64_t bytes, const Tensor& like) {
  return bytes > 0 ? OptionalTensor(workspace(bytes, like)) : std::nullopt;
}

inline Tensor dense(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

inline OptionalTensor dense(const OptionalTensor& t) {
  return t ? OptionalTensor(dense(*t)) : t;
}

template <typename T>
T* pointer(const Tensor& t) {
  return t.numel() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

template <typename T>
T* pointer(const OptionalTensor& t) {
  return t ? pointer<T>(*t) : nullptr;
}

inline ScalarType accumulate_dtype(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline int64_t width_of(const Tensor& t) {
  return t.size(t.dim() - 1);
}

inline int64_t rows_of(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) rows *= t.size(i);
  return rows;
}

inline Shape leading_shape(const Tensor& t) {
  Shape shape = shape_of(t);
  shape.pop_back();
  return shape;
}

// ---- dispatch and launch --------------------------------------------------------------------------------------------

template <typename Fn>
void dispatch_floating(const Tensor& t, const Fn& fn) {
  switch (t.scalar_type()) {
    case ScalarType::Double: return fn.template operator()<double>();
    case ScalarType::Float: return fn.template operator()<float>();
    case ScalarType::BFloat16: return fn.template operator()<bfloat16>();
    default: return fn.template operator()<float16>();
  }
}

template <typename Fn>
void dispatch_index(const Tensor& t, const Fn& fn) {
  if (t.scalar_type() == ScalarType::Int) return fn.template operator()<int32_t>();
  return fn.template operator()<int64_t>();
}

#ifdef GPTKERNELS_CUDA

class Launcher {
 public:
  Launcher(const char* op, const Tensor& t) : op_(op) {
    const auto device = t.get_device_index();
    int current = -1;
    if (cudaGetDevice(&current) != cudaSuccess || current != device) guard_.emplace(device);
    void* stream;
    check_shim(aoti_torch_get_current_cuda_stream(device, &stream));
    stream_ = static_cast<Stream>(stream);
  }
  const char* op() const { return op_; }
  Stream stream() const { return stream_; }
  void check(Status status) const {
    if (status != cudaSuccess) fail(op_, "CUDA error: ", cudaGetErrorString(status));
  }

 private:
  const char* op_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;  // only if another device was current
  Stream stream_;
};

#else

class Launcher {
 public:
  Launcher(const char* op, const Tensor&) : op_(op) {}
  const char* op() const { return op_; }
  Stream stream() const {
    return {[](int64_t begin, int64_t end, int64_t grain, Stream::Body body, void* context) {
      check_shim(torch_parallel_for(begin, end, grain, body, context));
    }};
  }
  void check(const Status& status) const {
    if (!status.ok()) fail(op_, status.error);
  }

 private:
  const char* op_;
};

#endif

}  // namespace gptkernels::GPTKERNELS_DEVICE
