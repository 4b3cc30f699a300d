// Float8 matmuls by column-major cuBLASLt: out = a @ b^T is computed as out^T = b @ a^T, where cuBLASLt's A is our b,
// transposed, and its B is our a. On Hopper, cuBLASLt supports no other layout of float8.
#include "fp8.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "algorithm_cache.h"
#include "autotune.h"
#include "bias.h"

namespace gptkernels::cuda {
namespace {

constexpr cudaDataType_t type_of(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

// cuBLASLt adds only bfloat16 biases to float32 results. Our bias has the dtype of the result, so a separate kernel
// writes a float32 bias to out, and the matmul accumulates.
template <typename T>
constexpr bool kFusesBias = sizeof(T) == 2;

// Whether the matmul adds to out.
template <typename T>
bool adds(const Fp8Matmul<T>& p) {
  return p.accumulate || (p.bias && !kFusesBias<T>);
}

template <typename T>
LtProblem lt_problem(const Fp8Matmul<T>& p) {
  LtProblem problem;
  problem.check(
      cublasLtMatmulDescInit_internal(&problem.operation, sizeof(problem.operation), CUBLAS_COMPUTE_32F, CUDA_R_32F));
  problem.set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  problem.set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  problem.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.scale_b);
  problem.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.scale_a);
  problem.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(p.fast_accumulation));
  if (kFusesBias<T> && p.bias) {
    problem.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    problem.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    problem.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, kDataType<T>);
  }
  problem.check(cublasLtMatrixLayoutInit_internal(&problem.a, sizeof(problem.a), type_of(p.b_format), p.inner,
                                                  p.columns, p.b_ld));
  problem.check(
      cublasLtMatrixLayoutInit_internal(&problem.b, sizeof(problem.b), type_of(p.a_format), p.inner, p.rows, p.a_ld));
  problem.check(
      cublasLtMatrixLayoutInit_internal(&problem.out, sizeof(problem.out), kDataType<T>, p.columns, p.rows, p.columns));
  return problem;
}

template <typename T>
ProductKey key_of(const Fp8Matmul<T>& p) {
  int device = 0;
  cudaGetDevice(&device);
  return {.device = device,
          .type = type_of(p.a_format),
          .b_type = type_of(p.b_format),
          .out_type = kDataType<T>,
          .compute = CUBLAS_COMPUTE_32F,
          .epilogue = kFusesBias<T> && p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT,
          .rows = p.rows,
          .columns = p.columns,
          .inner = p.inner,
          .out_ld = p.columns,
          .a_ld = p.a_ld,
          .b_ld = p.b_ld,
          .a_transposed = false,
          .b_transposed = true,
          .accumulate = adds(p),
          .fast_accumulation = p.fast_accumulation,
          .out_alignment = alignment(p.out),
          .a_alignment = alignment(p.a),
          .b_alignment = alignment(p.b),
          .bias_alignment = alignment(p.bias),
          .gelu_alignment = alignment(nullptr)};
}

constexpr int kCandidates = 24;  // with a bias, the first 8 algorithms are all slow (docs/notes/fp8.md)

Fp8Plan plan_of(const LtAlgorithm& algorithm) {
  return {.found = true, .algorithm = algorithm.algo, .workspace = algorithm.workspace};
}

template <typename T>
Fp8Plan first_plan(const Fp8Matmul<T>& p, const ProductKey& key, cublasHandle_t handle) {
  constexpr double kMinFlops = 4e9;  // a few microseconds
  const bool timed = autotune_enabled() && 2.0 * p.rows * p.columns * p.inner >= kMinFlops;
  if (timed)
    if (const auto algorithm = cached_algorithm(key); algorithm && supports(lt_problem(p), key, *algorithm, lt(handle)))
      return plan_of(*algorithm);
  const auto algorithms = heuristic_algorithms(lt_problem(p), key, lt(handle), kCandidates);
  if (algorithms.empty()) return {};
  Fp8Plan plan = plan_of(algorithms[0]);
  plan.needs_autotune = timed;
  return plan;
}

std::mutex plans_mutex;
std::map<ProductKey, Fp8Plan> plans;

template <typename T>
MatmulStatus product(const Fp8Matmul<T>& p, const Fp8Plan& plan, void* workspace, cublasHandle_t handle,
                     Stream stream) {
  LtProblem problem = lt_problem(p);
  const float alpha = p.alpha, beta = adds(p) ? 1 : 0;
  problem.check(cublasLtMatmul(lt(handle), &problem.operation, &alpha, p.b, &problem.a, p.a, &problem.b, &beta, p.out,
                               &problem.out, p.out, &problem.out, &plan.algorithm, workspace, plan.workspace, stream));
  return {.cublas = problem.status};
}

template <typename T>
bool is_empty(const Fp8Matmul<T>& p) {
  return p.rows == 0 || p.columns == 0;
}

}  // namespace

template <typename T>
Fp8Plan fp8_matmul_plan(const Fp8Matmul<T>& p, cublasHandle_t handle) {
  if (is_empty(p) || p.inner == 0) return {.found = true};
  const ProductKey key = key_of(p);
  const std::lock_guard lock(plans_mutex);
  auto known = plans.find(key);
  if (known == plans.end()) known = plans.emplace(key, first_plan(p, key, handle)).first;
  return known->second;
}

template <typename T>
Fp8Plan fp8_matmul_autotune(const Fp8Matmul<T>& p, const Fp8Plan& plan, void* workspace, cublasHandle_t handle,
                            Stream stream) {
  if (is_captured(stream)) return plan;
  const ProductKey key = key_of(p);
  const auto fastest = autotune(
      heuristic_algorithms(lt_problem(p), key, lt(handle), kCandidates), stream,
      [&](const LtAlgorithm& algorithm) { return product(p, plan_of(algorithm), workspace, handle, stream).ok(); });
  Fp8Plan timed = fastest ? plan_of(*fastest) : plan;
  timed.needs_autotune = false;
  if (fastest) cache_algorithm(key, *fastest);
  const std::lock_guard lock(plans_mutex);
  plans[key] = timed;
  return timed;
}

template <typename T>
MatmulStatus fp8_matmul(const Fp8Matmul<T>& p, const Fp8Plan& plan, void* workspace, cublasHandle_t handle,
                        Stream stream) {
  if (is_empty(p)) return {};
  if (p.bias && (p.inner == 0 || !kFusesBias<T>)) {
    const cudaError_t error = write_bias(p.out, p.bias, p.rows, p.columns, p.columns, stream);
    if (error != cudaSuccess) return {.cuda = error};
  }
  if (p.inner > 0) return product(p, plan, workspace, handle, stream);
  if (p.bias || p.accumulate) return {};
  return {.cuda = cudaMemsetAsync(p.out, 0, p.rows * p.columns * sizeof(T), stream)};
}

#define GPTKERNELS_INSTANTIATE(T)                                                                              \
  template Fp8Plan fp8_matmul_plan<T>(const Fp8Matmul<T>&, cublasHandle_t);                                    \
  template Fp8Plan fp8_matmul_autotune<T>(const Fp8Matmul<T>&, const Fp8Plan&, void*, cublasHandle_t, Stream); \
  template MatmulStatus fp8_matmul<T>(const Fp8Matmul<T>&, const Fp8Plan&, void*, cublasHandle_t, Stream);
GPTKERNELS_FOR_FP8(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
