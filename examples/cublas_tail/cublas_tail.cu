// Prints which of cuBLASLt's algorithms leave out the last terms of the sums in D = A @ B. README.md has the findings.
//
//     nvcc -std=c++17 -o cublas_tail cublas_tail.cu -lcublasLt
//     ./cublas_tail [m n k [transa transb]]
#include <cublasLt.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call) \
  if (int status = int(call)) std::printf("%s: error %d\n", #call, status), std::exit(1)

// The last 8 terms of each sum are 1, and all earlier terms are 0.
__global__ void fill(__nv_bfloat16* out, int64_t down, int64_t across, bool terms_are_down, int64_t terms) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < down * across; i += gridDim.x * blockDim.x) {
    const int64_t term = terms_are_down ? i % down : i / down;
    out[i] = __float2bfloat16(term >= terms - 8 ? 1 : 0);
  }
}

template <typename V>
V config(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  V value = 0;
  size_t written = 0;
  cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), &written);
  return value;
}

int main(int count, char** arguments) {
  const auto argument = [&](int i, int64_t otherwise) { return i < count ? std::atoll(arguments[i]) : otherwise; };
  const int64_t m = argument(1, 1600), n = argument(2, 104), k = argument(3, 24645);
  const bool transa = argument(4, 0), transb = argument(5, 1);
  const int64_t lda = transa ? k : m, ldb = transb ? n : k;

  __nv_bfloat16 *a, *b, *d;
  void* workspace;
  const size_t workspace_bytes = 32 << 20;
  CHECK(cudaMalloc(&a, m * k * sizeof(*a)));
  CHECK(cudaMalloc(&b, k * n * sizeof(*b)));
  CHECK(cudaMalloc(&d, m * n * sizeof(*d)));
  CHECK(cudaMalloc(&workspace, workspace_bytes));
  fill<<<1024, 256>>>(a, lda, m * k / lda, transa, k);
  fill<<<1024, 256>>>(b, ldb, k * n / ldb, !transb, k);

  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t layout_a, layout_b, layout_d;
  cublasLtMatmulPreference_t preference;
  const cublasOperation_t operations[] = {CUBLAS_OP_N, CUBLAS_OP_T};
  CHECK(cublasLtCreate(&handle));
  CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &operations[transa], sizeof(int)));
  CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &operations[transb], sizeof(int)));
  CHECK(cublasLtMatrixLayoutCreate(&layout_a, CUDA_R_16BF, lda, m * k / lda, lda));
  CHECK(cublasLtMatrixLayoutCreate(&layout_b, CUDA_R_16BF, ldb, k * n / ldb, ldb));
  CHECK(cublasLtMatrixLayoutCreate(&layout_d, CUDA_R_16BF, m, n, m));
  CHECK(cublasLtMatmulPreferenceCreate(&preference));
  CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                             sizeof(workspace_bytes)));
  cublasLtMatmulHeuristicResult_t found[32];
  int algorithms = 0;
  CHECK(cublasLtMatmulAlgoGetHeuristic(handle, desc, layout_a, layout_b, layout_d, layout_d, preference, 32, found,
                                       &algorithms));

  std::printf("cuBLASLt %zu, bfloat16, m %lld, n %lld, k %lld, %c%c\n", cublasLtGetVersion(), (long long)m,
              (long long)n, (long long)k, transa ? 'T' : 'N', transb ? 'T' : 'N');
  std::printf("rank  id  tile  stages  splits  of the last 8 terms\n");
  const float one = 1, zero = 0;
  std::vector<__nv_bfloat16> host(m * n);
  for (int i = 0; i < algorithms; ++i) {
    const cublasLtMatmulAlgo_t& algorithm = found[i].algo;
    CHECK(cublasLtMatmul(handle, desc, &one, a, layout_a, b, layout_b, &zero, d, layout_d, d, layout_d, &algorithm,
                         workspace, workspace_bytes, nullptr));
    CHECK(cudaMemcpy(host.data(), d, host.size() * sizeof(*d), cudaMemcpyDeviceToHost));
    float least = 8;
    for (const __nv_bfloat16 x : host) least = std::min(least, __bfloat162float(x));
    std::printf("%4d %3d %5u %7u %7d  %g%s\n", i, config<int>(algorithm, CUBLASLT_ALGO_CONFIG_ID),
                config<unsigned>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID),
                config<unsigned>(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                config<int>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM), least, least == 8 ? "" : "  WRONG");
  }
}
