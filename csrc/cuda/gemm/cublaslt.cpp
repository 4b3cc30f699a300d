// Matmuls by cuBLAS and cuBLASLt, and the dispatch to our own kernel (sm90_gelu.h). cuBLAS is column-major and sees our
// matrices transposed, so out = a @ b is computed as out^T = b^T @ a^T: cuBLAS's A is our b, its B is our a, and its
// rows are our columns.
#include <algorithm>
#include <map>
#include <mutex>
#include <type_traits>

#include "../../gelu.h"
#include "algorithm_cache.h"
#include "bias.h"
#include "matmul.h"
#include "sm90_gelu.h"

namespace gptkernels::cuda {
namespace {

constexpr cublasOperation_t operation(bool transposed) {
  return transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

// torch sets the handle's mode from torch.backends.cuda.matmul whenever it returns the handle.
cublasMath_t math_mode(cublasHandle_t handle) {
  cublasMath_t mode = CUBLAS_DEFAULT_MATH;
  cublasGetMathMode(handle, &mode);
  return mode;
}

template <typename T>
cublasComputeType_t compute_type(cublasHandle_t handle) {
  if (std::is_same_v<T, double>) return CUBLAS_COMPUTE_64F;
  const bool tf32 = std::is_same_v<T, float> && (math_mode(handle) & 0x3) == CUBLAS_TF32_TENSOR_OP_MATH;
  return tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// ---------------------------------------------------------------------------------------------------------------
// Matmuls without an epilogue, by cublasGemmStridedBatchedEx.

// Forbids cuBLAS to round split-K's partial sums to 16 bits. The destructor restores the mode, because the handle is
// torch's.
template <typename T>
class WideSums {
 public:
  explicit WideSums(cublasHandle_t handle) : handle_(handle), before_(math_mode(handle)) {
    if (sizeof(T) == 2) cublasSetMathMode(handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
  }
  ~WideSums() {
    if (sizeof(T) == 2) cublasSetMathMode(handle_, before_);
  }
  WideSums(const WideSums&) = delete;
  WideSums& operator=(const WideSums&) = delete;

 private:
  cublasHandle_t handle_;
  cublasMath_t before_;
};

template <typename Out, typename T>
MatmulStatus zero(Out* out, const Matmul<T>& p, Stream stream) {
  if (p.accumulate) return {};
  for (int64_t batch = 0; batch < p.batches; ++batch) {
    const cudaError_t error = cudaMemset2DAsync(out + batch * p.out_stride, p.out_ld * sizeof(Out), 0,
                                                p.columns * sizeof(Out), p.rows, stream);
    if (error != cudaSuccess) return {.cuda = error};
  }
  return {};
}

template <typename Out, typename T>
MatmulStatus product_into(Out* out, const Matmul<T>& p, cublasHandle_t handle, Stream stream) {
  if (p.rows == 0 || p.columns == 0 || p.batches == 0) return {};
  if (p.inner == 0) return zero(out, p, stream);
  using A = accumulate_t<T>;
  const A alpha = static_cast<A>(p.alpha);
  const A beta = p.accumulate ? 1 : 0;
  constexpr cudaDataType_t type = kDataType<T>;
  const WideSums<T> wide(handle);
  return {.cublas = cublasGemmStridedBatchedEx_64(
              handle, operation(p.b_transposed), operation(p.a_transposed), p.columns, p.rows, p.inner, &alpha, p.b,
              type, p.b_ld, p.b_stride, p.a, type, p.a_ld, p.a_stride, &beta, out, kDataType<Out>, p.out_ld,
              p.out_stride, p.batches, compute_type<T>(handle), CUBLAS_GEMM_DEFAULT)};
}

template <typename T>
MatmulStatus product(const Matmul<T>& p, cublasHandle_t handle, Stream stream) {
  return p.wide_out ? product_into(p.wide_out, p, handle, stream) : product_into(p.out, p, handle, stream);
}

// ---------------------------------------------------------------------------------------------------------------
// Matmuls by cuBLASLt: those with an epilogue, and those in which cuBLAS may drop terms of sums.

template <typename T>
cublasLtEpilogue_t epilogue(const Matmul<T>& p) {
  if (p.dgelu_at) return CUBLASLT_EPILOGUE_DGELU;
  if (p.pre_gelu) return p.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  return p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

template <typename T>
const void* gelu_matrix(const Matmul<T>& p) {
  return p.dgelu_at ? p.dgelu_at : p.pre_gelu;
}

// The leading dimension of cuBLASLt's GELU matrix must be divisible by 8. The accuracy of cuBLASLt's tanh is
// undocumented, but sufficient for 16-bit results. In float32 the MLP's backward took 12 % longer with cuBLASLt's GELU
// epilogues than with a TF32 matmul followed by our kernels.
template <typename T>
bool supports_gelu_epilogue(const Matmul<T>& p) {
  return sizeof(T) == 2 && p.columns % 8 == 0 && alignment(gelu_matrix(p)) >= 16;
}

// If an operand is not aligned, cuBLASLt may have no kernel that includes the epilogue. It then rounds the sums to 16
// bits, and a second kernel adds the bias, as with split-K (rounds_once() in algorithm_cache.cpp).
template <typename T>
bool adds_bias_before_rounding(const Matmul<T>& p) {
  if (sizeof(T) != 2 || !p.bias) return true;
  // Whether every row of a matrix of 16-bit elements begins at a multiple of 16 bytes.
  const auto aligned = [](const void* matrix, int64_t ld) { return alignment(matrix) >= 16 && ld % 8 == 0; };
  return aligned(p.a, p.a_ld) && aligned(p.b, p.b_ld) && aligned(p.out, p.out_ld) &&
         (gelu_matrix(p) == nullptr || alignment(p.bias) >= 16);
}

// `p` has an epilogue.
template <typename T>
bool supports_epilogue(const Matmul<T>& p) {
  if (std::is_same_v<T, double> || p.rows == 0 || p.columns == 0 || p.inner == 0) return false;
  return adds_bias_before_rounding(p) && (gelu_matrix(p) == nullptr || supports_gelu_epilogue(p));
}

template <typename T>
bool on_tensor_cores(cublasComputeType_t compute) {
  return sizeof(T) == 2 || compute == CUBLAS_COMPUTE_32F_FAST_TF32;
}

// cuBLAS does not report which algorithm it uses, so it may be any. An algorithm that drops terms (adds_all_terms() in
// algorithm_cache.cpp) drops at least `rest` terms, or at least a whole step if `rest` is 0. It drops fewer terms than
// there are splits, and there are at most as many splits as whole steps.
template <typename T>
bool may_drop_terms(const Matmul<T>& p, cublasComputeType_t compute) {
  if (!on_tensor_cores<T>(compute) || p.rows == 0 || p.columns == 0 || p.batches == 0) return false;
  const int64_t step = terms_per_step(kDataType<T>), rest = p.inner % step;
  return p.inner / step > (rest > 0 ? rest : step);
}

template <typename T>
cudaDataType_t out_type(const Matmul<T>& p) {
  return p.wide_out ? kDataType<accumulate_t<T>> : kDataType<T>;
}

template <typename T>
void* out_of(const Matmul<T>& p) {
  return p.wide_out ? static_cast<void*>(p.wide_out) : p.out;
}

template <typename T>
LtProblem lt_problem(const Matmul<T>& p, cublasComputeType_t compute) {
  constexpr cudaDataType_t type = kDataType<T>;
  LtProblem problem;
  problem.check(cublasLtMatmulDescInit_internal(&problem.operation, sizeof(problem.operation), compute,
                                                kDataType<accumulate_t<T>>));
  problem.set(CUBLASLT_MATMUL_DESC_TRANSA, operation(p.b_transposed));
  problem.set(CUBLASLT_MATMUL_DESC_TRANSB, operation(p.a_transposed));
  problem.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(p));
  if (const void* bias = p.bias) problem.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  if (const void* matrix = gelu_matrix(p)) {
    problem.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, matrix);
    problem.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.columns);
  }
  const auto layout = [&](auto& to, cudaDataType_t type, bool transposed, int64_t rows, int64_t columns, int64_t ld,
                          int64_t stride) {
    problem.check(cublasLtMatrixLayoutInit_internal(&to, sizeof(to), type, transposed ? rows : columns,
                                                    transposed ? columns : rows, ld));
    if (p.batches == 1) return;
    const auto batches = static_cast<int32_t>(p.batches);
    problem.check(cublasLtMatrixLayoutSetAttribute(&to, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches, sizeof(batches)));
    problem.check(
        cublasLtMatrixLayoutSetAttribute(&to, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)));
  };
  layout(problem.a, type, p.b_transposed, p.inner, p.columns, p.b_ld, p.b_stride);
  layout(problem.b, type, p.a_transposed, p.rows, p.inner, p.a_ld, p.a_stride);
  layout(problem.out, out_type(p), false, p.rows, p.columns, p.out_ld, p.out_stride);
  return problem;
}

template <typename T>
ProductKey product_key(const Matmul<T>& p, cublasComputeType_t compute) {
  int device = 0;
  cudaGetDevice(&device);
  // The smallest alignment of the batches' matrices.
  const auto aligned = [&](const void* pointer, int64_t stride, size_t size) {
    return std::min(alignment(pointer), p.batches == 1 ? 256 : alignment(reinterpret_cast<void*>(stride * size)));
  };
  return {.device = device,
          .type = kDataType<T>,
          .b_type = kDataType<T>,
          .out_type = out_type(p),
          .compute = compute,
          .epilogue = epilogue(p),
          .rows = p.rows,
          .columns = p.columns,
          .inner = p.inner,
          .out_ld = p.out_ld,
          .a_ld = p.a_ld,
          .b_ld = p.b_ld,
          .a_transposed = p.a_transposed,
          .b_transposed = p.b_transposed,
          .accumulate = p.accumulate,
          .fast_accumulation = false,
          .out_alignment = aligned(out_of(p), p.out_stride, p.wide_out ? sizeof(accumulate_t<T>) : sizeof(T)),
          .a_alignment = aligned(p.a, p.a_stride, sizeof(T)),
          .b_alignment = aligned(p.b, p.b_stride, sizeof(T)),
          .bias_alignment = alignment(p.bias),
          .gelu_alignment = alignment(gelu_matrix(p)),
          .batches = p.batches};
}

constexpr int kCandidates = 8;  // the first of these that adds all terms and rounds once is used

std::mutex plans_mutex;
std::map<ProductKey, MatmulPlan> plans;

template <typename T>
MatmulPlan first_plan(const Matmul<T>& p, const ProductKey& key, cublasLtHandle_t handle) {
  const auto algorithms = heuristic_algorithms(lt_problem(p, key.compute), key, handle, kCandidates);
  if (algorithms.empty()) return {};
  return {.cublaslt = true, .algorithm = algorithms[0].algo, .workspace = algorithms[0].workspace};
}

template <typename T>
MatmulPlan lt_plan(const Matmul<T>& p, cublasComputeType_t compute, cublasHandle_t handle) {
  const ProductKey key = product_key(p, compute);
  const std::lock_guard lock(plans_mutex);
  auto known = plans.find(key);
  if (known == plans.end()) known = plans.emplace(key, first_plan(p, key, lt(handle))).first;
  return known->second;
}

template <typename T>
MatmulStatus fused_product(const Matmul<T>& p, const MatmulPlan& plan, void* workspace, cublasHandle_t handle,
                           Stream stream) {
  LtProblem problem = lt_problem(p, compute_type<T>(handle));
  const auto alpha = static_cast<accumulate_t<T>>(p.alpha);
  const accumulate_t<T> beta = p.accumulate ? 1 : 0;
  problem.check(cublasLtMatmul(lt(handle), &problem.operation, &alpha, p.b, &problem.a, p.a, &problem.b, &beta,
                               out_of(p), &problem.out, out_of(p), &problem.out, &plan.algorithm, workspace,
                               plan.workspace, stream));
  return {.cublas = problem.status};
}

// ---------------------------------------------------------------------------------------------------------------
// Our own kernels before and after a matmul.

// The matmul that follows write_bias(). It adds its float32 sums to the bias, and rounds once. (The kernels
// nvjet_*_badd would round twice, but need operands with which cuBLASLt's epilogue is used.)
template <typename T>
Matmul<T> without_bias(Matmul<T> p) {
  p.bias = nullptr;
  p.accumulate = true;
  return p;
}

template <typename T>
Matmul<T> without_gelu(Matmul<T> p) {
  if (p.pre_gelu) p.out = p.pre_gelu;
  p.pre_gelu = nullptr;
  p.dgelu_at = nullptr;
  p.column_sums = nullptr;
  return p;
}

template <typename T>
cudaError_t gelu(const Matmul<T>& p, Stream stream) {
  const int64_t size = p.rows * p.columns;
  if (size == 0) return cudaSuccess;
  if (p.pre_gelu)
    return gelu_forward<T>({.out = p.out, .x = p.pre_gelu, .size = size, .form = GeluForm::kTanh}, stream);
  return gelu_backward<T>({.dx = p.out, .dout = p.out, .x = p.dgelu_at, .size = size, .form = GeluForm::kTanh}, stream);
}

}  // namespace

template <typename T>
MatmulPlan matmul_plan(const Matmul<T>& p, cublasHandle_t handle) {
  if (matmul_sm90_supports(p)) return {.sm90 = true, .workspace = matmul_sm90_workspace(p)};
  const cublasComputeType_t compute = compute_type<T>(handle);
  const bool plain = epilogue(p) == CUBLASLT_EPILOGUE_DEFAULT;
  const bool uses_lt = plain ? may_drop_terms(p, compute) : supports_epilogue(p);
  MatmulPlan plan = uses_lt ? lt_plan(p, compute, handle) : MatmulPlan{};
  if (plan.cublaslt) return plan;
  if (gelu_matrix(p)) {
    plan = matmul_plan(without_gelu(p), handle);
    plan.separate_gelu = true;
  } else if (p.bias) {
    plan = matmul_plan(without_bias(p), handle);
    plan.separate_bias = true;
  }
  return plan;
}

template <typename T>
MatmulStatus matmul(const Matmul<T>& p, const MatmulPlan& plan, void* workspace, cublasHandle_t handle, Stream stream) {
  Matmul<T> first = plan.separate_gelu ? without_gelu(p) : p;
  MatmulStatus status;
  if (plan.separate_bias) {
    status.cuda = write_bias(first.out, first.bias, first.rows, first.columns, first.out_ld, stream);
    if (!status.ok()) return status;
    first = without_bias(first);
  }
  if (plan.sm90)
    status.cuda = matmul_sm90(first, workspace, stream);
  else if (plan.cublaslt)
    status = fused_product(first, plan, workspace, handle, stream);
  else
    status = product(first, handle, stream);
  if (plan.separate_gelu && status.ok()) status.cuda = gelu(p, stream);
  return status;
}

#define GPTKERNELS_INSTANTIATE(T)                                       \
  template MatmulPlan matmul_plan<T>(const Matmul<T>&, cublasHandle_t); \
  template MatmulStatus matmul<T>(const Matmul<T>&, const MatmulPlan&, void*, cublasHandle_t, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
