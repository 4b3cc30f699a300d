#include "algorithm_cache.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <string>

#include "matmul.h"

namespace gptkernels::cuda {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVariable = "GPTKERNELS_MATMUL_CHOICES";
constexpr const char* kFirstLine = "gptkernels: cuBLASLt's algorithms by product, format 2";
constexpr size_t kWords = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t);

using Algorithms = std::map<ProductKey, LtAlgorithm>;

fs::path folder() {
  if (const char* given = std::getenv(kVariable); given && *given) return given;
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache) return fs::path(cache) / "gptkernels";
  if (const char* home = std::getenv("HOME"); home && *home) return fs::path(home) / ".cache" / "gptkernels";
  return {};
}

fs::path file_of(int device) {
  const fs::path parent = folder();
  cudaDeviceProp properties;
  int driver = 0;
  if (parent.empty() || cudaGetDeviceProperties(&properties, device) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess)
    return {};
  std::string name = std::string("matmul-") + properties.name + "-" + std::to_string(properties.multiProcessorCount) +
                     "-" + std::to_string(driver) + "-" + std::to_string(cublasLtGetVersion()) + ".txt";
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '-' && c != '.') c = '_';
  return parent / name;
}

std::string line_of(const ProductKey& k, const LtAlgorithm& algorithm) {
  std::ostringstream line;
  for (int64_t value : {int64_t(k.type),
                        int64_t(k.out_type),
                        int64_t(k.compute),
                        int64_t(k.epilogue),
                        k.rows,
                        k.columns,
                        k.inner,
                        k.out_ld,
                        k.a_ld,
                        k.b_ld,
                        int64_t(k.a_transposed),
                        int64_t(k.b_transposed),
                        int64_t(k.accumulate),
                        int64_t(k.out_alignment),
                        int64_t(k.a_alignment),
                        int64_t(k.b_alignment),
                        int64_t(k.bias_alignment),
                        int64_t(k.gelu_alignment),
                        int64_t(k.b_type),
                        int64_t(k.fast_accumulation),
                        algorithm.workspace})
    line << value << ' ';
  uint64_t words[kWords];
  std::memcpy(words, &algorithm.algo, sizeof(words));
  for (uint64_t word : words) line << std::hex << word << ' ';
  return line.str();
}

void read_line(const std::string& text, int device, Algorithms& algorithms) {
  std::istringstream line(text);
  std::array<int64_t, 21> v;
  for (int64_t& value : v)
    if (!(line >> value)) return;
  uint64_t words[kWords];
  for (uint64_t& word : words)
    if (!(line >> std::hex >> word)) return;
  LtAlgorithm algorithm = {.workspace = v[20]};
  std::memcpy(&algorithm.algo, words, sizeof(words));
  const ProductKey key = {.device = device,
                          .type = static_cast<cudaDataType_t>(v[0]),
                          .b_type = static_cast<cudaDataType_t>(v[18]),
                          .out_type = static_cast<cudaDataType_t>(v[1]),
                          .compute = static_cast<cublasComputeType_t>(v[2]),
                          .epilogue = static_cast<cublasLtEpilogue_t>(v[3]),
                          .rows = v[4],
                          .columns = v[5],
                          .inner = v[6],
                          .out_ld = v[7],
                          .a_ld = v[8],
                          .b_ld = v[9],
                          .a_transposed = v[10] != 0,
                          .b_transposed = v[11] != 0,
                          .accumulate = v[12] != 0,
                          .fast_accumulation = v[19] != 0,
                          .out_alignment = static_cast<uint32_t>(v[13]),
                          .a_alignment = static_cast<uint32_t>(v[14]),
                          .b_alignment = static_cast<uint32_t>(v[15]),
                          .bias_alignment = static_cast<uint32_t>(v[16]),
                          .gelu_alignment = static_cast<uint32_t>(v[17])};
  algorithms.emplace(key, algorithm);
}

Algorithms read(const fs::path& path, int device) {
  Algorithms found;
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line) || line != kFirstLine) return found;
  while (std::getline(file, line)) read_line(line, device, found);
  return found;
}

// A temporary file is renamed when it is complete. Errors are ignored; without the file, the next process autotunes
// again.
void write(const fs::path& path, const Algorithms& algorithms) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  // Processes in different containers may have the same process ID and share the folder.
  const fs::path temporary =
      path.string() + "." + std::to_string(getpid()) + "." + std::to_string(std::random_device()());
  {
    std::ofstream file(temporary, std::ios::trunc);
    file << kFirstLine << '\n';
    for (const auto& [key, algorithm] : algorithms) file << line_of(key, algorithm) << '\n';
    if (!file.flush()) {
      fs::remove(temporary, error);
      return;
    }
  }
  fs::rename(temporary, path, error);
  if (error) fs::remove(temporary, error);
}

std::mutex mutex;

// The caller holds the mutex.
Algorithms& algorithms_of(int device) {
  static std::map<int, Algorithms> known;
  auto found = known.find(device);
  if (found == known.end()) found = known.emplace(device, read(file_of(device), device)).first;
  return found->second;
}

template <typename V>
V configuration(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, V value) {
  size_t written = 0;
  cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), &written);
  return value;
}

// Split-K divides a sum among thread blocks, which read terms in steps of 128 bytes. cuBLASLt's kernels behave as if
// each thread block had inner / splits terms, rounded down to an integer and then up to whole steps. If the integer is
// already a number of whole steps, the last inner % splits terms are dropped. This was observed with 16-bit operands
// (examples/cublas_tail), and is assumed for all types.
bool adds_all_terms(const cublasLtMatmulAlgo_t& algorithm, const ProductKey& key) {
  const int32_t splits = configuration(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, int32_t{1});
  return splits <= 1 || key.inner % splits == 0 || key.inner / splits % terms_per_step(key.type) != 0;
}

// The kernel that adds split-K's partial sums rounds their total to 16 bits before it adds the bias. If the bias
// cancels most of the total, the result has the rounding error of the total. Float8 operands have larger errors.
bool rounds_once(const cublasLtMatmulAlgo_t& algorithm, const ProductKey& key) {
  const bool has_bias = key.epilogue == CUBLASLT_EPILOGUE_BIAS || key.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  if (!has_bias || (key.type != CUDA_R_16BF && key.type != CUDA_R_16F)) return true;
  constexpr uint32_t kNone = CUBLASLT_REDUCTION_SCHEME_NONE;
  return configuration(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, kNone) == kNone;
}

bool is_exact(const cublasLtMatmulAlgo_t& algorithm, const ProductKey& key) {
  return adds_all_terms(algorithm, key) && rounds_once(algorithm, key);
}

std::optional<int64_t> workspace_of(LtProblem problem, const cublasLtMatmulAlgo_t& algorithm, cublasLtHandle_t handle) {
  cublasLtMatmulHeuristicResult_t result = {};
  problem.check(cublasLtMatmulAlgoCheck(handle, &problem.operation, &problem.a, &problem.b, &problem.out, &problem.out,
                                        &algorithm, &result));
  if (problem.status != CUBLAS_STATUS_SUCCESS) return std::nullopt;
  return static_cast<int64_t>(result.workspaceSize);
}

std::optional<LtAlgorithm> without_split_k(LtProblem problem, cublasLtMatmulAlgo_t algorithm, cublasLtHandle_t handle) {
  const auto set = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, auto value) {
    problem.check(cublasLtMatmulAlgoConfigSetAttribute(&algorithm, attribute, &value, sizeof(value)));
  };
  set(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, int32_t{1});
  set(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
  const auto workspace = workspace_of(problem, algorithm, handle);
  if (!workspace) return std::nullopt;
  return LtAlgorithm{algorithm, *workspace};
}

}  // namespace

int64_t terms_per_step(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_64F: return 16;
    case CUDA_R_32F: return 32;
    case CUDA_R_16F:
    case CUDA_R_16BF: return 64;
    default: return 128;
  }
}

std::vector<LtAlgorithm> heuristic_algorithms(LtProblem problem, const ProductKey& key, cublasLtHandle_t handle,
                                              int most) {
  cublasLtMatmulPreferenceOpaque_t preference;
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    problem.check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
  };
  problem.check(cublasLtMatmulPreferenceInit_internal(&preference, sizeof(preference)));
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kLargestWorkspace});
  // Split-K's partial sums are in the compute type.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.out_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.out_alignment);
  std::array<cublasLtMatmulHeuristicResult_t, kMaxAlgorithms> found;
  int count = 0;
  problem.check(cublasLtMatmulAlgoGetHeuristic(handle, &problem.operation, &problem.a, &problem.b, &problem.out,
                                               &problem.out, &preference, std::min(most, kMaxAlgorithms), found.data(),
                                               &count));
  std::vector<LtAlgorithm> algorithms;
  if (problem.status != CUBLAS_STATUS_SUCCESS) return algorithms;
  for (int i = 0; i < count; ++i)
    if (found[i].state == CUBLAS_STATUS_SUCCESS && is_exact(found[i].algo, key))
      algorithms.push_back({found[i].algo, static_cast<int64_t>(found[i].workspaceSize)});
  for (int i = 0; algorithms.empty() && i < count; ++i)
    if (const auto unsplit = without_split_k(problem, found[i].algo, handle)) algorithms.push_back(*unsplit);
  return algorithms;
}

bool supports(const LtProblem& problem, const ProductKey& key, const LtAlgorithm& algorithm, cublasLtHandle_t handle) {
  const auto workspace = workspace_of(problem, algorithm.algo, handle);
  return workspace && *workspace <= algorithm.workspace && algorithm.workspace <= kLargestWorkspace &&
         is_exact(algorithm.algo, key);
}

bool autotune_enabled() {
  static const bool timed = [] {
    const char* given = std::getenv(kVariable);
    return !given || std::strcmp(given, "off") != 0;
  }();
  return timed;
}

std::optional<LtAlgorithm> cached_algorithm(const ProductKey& key) {
  const std::lock_guard lock(mutex);
  const Algorithms& algorithms = algorithms_of(key.device);
  const auto found = algorithms.find(key);
  return found == algorithms.end() ? std::nullopt : std::optional(found->second);
}

void cache_algorithm(const ProductKey& key, const LtAlgorithm& algorithm) {
  const std::lock_guard lock(mutex);
  Algorithms& algorithms = algorithms_of(key.device);
  algorithms.insert_or_assign(key, algorithm);
  const fs::path path = file_of(key.device);
  if (path.empty()) return;
  Algorithms all = read(path, key.device);  // other processes may have added algorithms
  for (const auto& [mine, chosen] : algorithms) all.insert_or_assign(mine, chosen);
  write(path, all);
}

}  // namespace gptkernels::cuda
