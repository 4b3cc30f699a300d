#include <compare>
#include <map>
#include <mutex>

#include "common/launch.cuh"
#include "common/packed.cuh"
#include "fp8_matmul.h"

// cuBLASLt is column-major: our a @ b^T is its out^T = b @ a^T with A = our b, transposed, and B = our a. Of float8
// matrices this is the one layout that it has on Hopper: the terms of each sum lie together in both.

namespace gptkernels::cuda {
namespace {

template <typename T>
constexpr cudaDataType_t kType = CUDA_R_32F;
template <>
constexpr cudaDataType_t kType<bfloat16> = CUDA_R_16BF;
template <>
constexpr cudaDataType_t kType<float16> = CUDA_R_16F;

constexpr cudaDataType_t type_of(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

// cuBLASLt adds a bias of bfloat16 to a float32 product: ours is float32, and added afterwards.
template <typename T>
constexpr bool kFusesBias = sizeof(T) == 2;

struct Key {
  int device;
  cudaDataType_t out, a, b;
  bool bias, fast;
  int64_t rows, columns, inner;

  auto operator<=>(const Key&) const = default;
};

// The arguments of cublasLtMatmul, on the stack.
template <typename T>
struct Problem {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t out;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;

  explicit Problem(const Fp8Matmul<T>& p) {
    first(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.scale_b);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.scale_a);
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(p.fast_accumulation));
    if (kFusesBias<T> && p.bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, kType<T>);
    }
    first(cublasLtMatrixLayoutInit(&a, type_of(p.b_format), p.inner, p.columns, p.inner));
    first(cublasLtMatrixLayoutInit(&b, type_of(p.a_format), p.inner, p.rows, p.inner));
    first(cublasLtMatrixLayoutInit(&out, kType<T>, p.columns, p.rows, p.columns));
  }

  void first(cublasStatus_t next) {
    if (status == CUBLAS_STATUS_SUCCESS) status = next;
  }

  template <typename V>
  void set(cublasLtMatmulDescAttributes_t attribute, V value) {
    first(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)));
  }
};

template <typename T>
Fp8Plan ask_heuristic(const Fp8Matmul<T>& p, cublasLtHandle_t handle) {
  constexpr uint64_t kMaxWorkspace = kMatmulTimingWorkspace;
  Problem<T> problem(p);
  cublasLtMatmulPreferenceOpaque_t preference;
  problem.first(cublasLtMatmulPreferenceInit(&preference));
  problem.first(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &kMaxWorkspace, sizeof(kMaxWorkspace)));
  const uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  problem.first(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme,
                                                     sizeof(scheme)));
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  problem.first(cublasLtMatmulAlgoGetHeuristic(handle, &problem.operation, &problem.a, &problem.b, &problem.out,
                                               &problem.out, &preference, 1, &found, &count));
  if (problem.status != CUBLAS_STATUS_SUCCESS || count == 0 || found.state != CUBLAS_STATUS_SUCCESS) return {};
  return {.found = true, .algorithm = found.algo, .workspace = static_cast<int64_t>(found.workspaceSize)};
}

std::mutex plans_mutex;
std::map<Key, Fp8Plan> plans;

template <typename T>
__global__ void fp8_matmul_bias_kernel(T* out, const T* bias, int64_t size, int64_t columns) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += stride)
    out[i] = narrow<T>(widen(out[i]) + widen(bias[i % columns]));
}

template <typename T>
cudaError_t add_bias(const Fp8Matmul<T>& p, Stream stream) {
  constexpr int kThreads = 256;
  const int64_t size = p.rows * p.columns;
  fp8_matmul_bias_kernel<T>
      <<<grid_size(ceil_div(size, kThreads)), kThreads, 0, stream>>>(p.out, p.bias, size, p.columns);
  return cudaGetLastError();
}

template <typename T>
bool is_empty(const Fp8Matmul<T>& p) {
  return p.rows == 0 || p.columns == 0;
}

}  // namespace

template <typename T>
Fp8Plan fp8_matmul_plan(const Fp8Matmul<T>& p, cublasHandle_t handle) {
  if (is_empty(p) || p.inner == 0) return {.found = true};
  int device = 0;
  cudaGetDevice(&device);
  const Key key = {.device = device,
                   .out = kType<T>,
                   .a = type_of(p.a_format),
                   .b = type_of(p.b_format),
                   .bias = p.bias != nullptr,
                   .fast = p.fast_accumulation,
                   .rows = p.rows,
                   .columns = p.columns,
                   .inner = p.inner};
  const std::lock_guard lock(plans_mutex);
  auto known = plans.find(key);
  // A cuBLAS handle is a cuBLASLt handle (cuBLAS documentation, cublasLtHandle_t).
  if (known == plans.end())
    known = plans.emplace(key, ask_heuristic(p, reinterpret_cast<cublasLtHandle_t>(handle))).first;
  return known->second;
}

template <typename T>
MatmulStatus fp8_matmul(const Fp8Matmul<T>& p, const Fp8Plan& plan, void* workspace, cublasHandle_t handle,
                        Stream stream) {
  if (is_empty(p)) return {};
  MatmulStatus status;
  if (p.inner == 0) {
    status.cuda = cudaMemsetAsync(p.out, 0, p.rows * p.columns * sizeof(T), stream);
  } else {
    Problem<T> problem(p);
    const float alpha = 1, beta = 0;
    problem.first(cublasLtMatmul(reinterpret_cast<cublasLtHandle_t>(handle), &problem.operation, &alpha, p.b,
                                 &problem.a, p.a, &problem.b, &beta, p.out, &problem.out, p.out, &problem.out,
                                 &plan.algorithm, workspace, plan.workspace, stream));
    status.cublas = problem.status;
  }
  if (p.bias && (p.inner == 0 || !kFusesBias<T>) && status.ok()) status.cuda = add_bias(p, stream);
  return status;
}

#define GPTKERNELS_INSTANTIATE(T)                                           \
  template Fp8Plan fp8_matmul_plan<T>(const Fp8Matmul<T>&, cublasHandle_t); \
  template MatmulStatus fp8_matmul<T>(const Fp8Matmul<T>&, const Fp8Plan&, void*, cublasHandle_t, Stream);
GPTKERNELS_FOR_FP8(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
