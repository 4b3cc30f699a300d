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
#include <sstream>
#include <string>

#include "algorithm_cache.h"
#include "matmul.h"

namespace gptkernels::cuda {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVariable = "GPTKERNELS_MATMUL_CHOICES";
constexpr const char* kFirstLine = "gptkernels: cuBLASLt's algorithms by product, format 2";
constexpr size_t kWords = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t);

using Choices = std::map<ProductKey, AlgorithmChoice>;

// Where the files are; empty: nowhere.
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

// A line has the key without the device, the workspace, and the algorithm's words.
std::string line_of(const ProductKey& k, const AlgorithmChoice& choice) {
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
                        choice.workspace})
    line << value << ' ';
  uint64_t words[kWords];
  std::memcpy(words, &choice.algorithm, sizeof(words));
  for (uint64_t word : words) line << std::hex << word << ' ';
  return line.str();
}

// Adds what a line says; one that is not whole says nothing.
void read_line(const std::string& text, int device, Choices& choices) {
  std::istringstream line(text);
  std::array<int64_t, 21> v;
  for (int64_t& value : v)
    if (!(line >> value)) return;
  uint64_t words[kWords];
  for (uint64_t& word : words)
    if (!(line >> std::hex >> word)) return;
  AlgorithmChoice choice = {.workspace = v[20]};
  std::memcpy(&choice.algorithm, words, sizeof(words));
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
  choices.emplace(key, choice);
}

Choices read(const fs::path& path, int device) {
  Choices found;
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line) || line != kFirstLine) return found;
  while (std::getline(file, line)) read_line(line, device, found);
  return found;
}

// Writes a new file and renames it, so that readers see all of it or none. Errors are not reported: without a file the
// next process times again.
void write(const fs::path& path, const Choices& choices) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  const fs::path temporary = path.string() + "." + std::to_string(getpid());
  {
    std::ofstream file(temporary, std::ios::trunc);
    file << kFirstLine << '\n';
    for (const auto& [key, choice] : choices) file << line_of(key, choice) << '\n';
    if (!file.flush()) {
      fs::remove(temporary, error);
      return;
    }
  }
  fs::rename(temporary, path, error);
  if (error) fs::remove(temporary, error);
}

std::mutex mutex;

// The choices for a device, from its file when it is first asked for. The caller holds the mutex.
Choices& choices_of(int device) {
  static std::map<int, Choices> known;
  auto found = known.find(device);
  if (found == known.end()) found = known.emplace(device, read(file_of(device), device)).first;
  return found->second;
}

// Whether the algorithm adds up all terms of the product's sums. Split-K divides a sum among blocks, which work in
// steps of 128 bytes. cuBLASLt's kernels behave as if a block took inner / splits terms, rounded down and then up to
// whole steps: if the quotient is a whole number of steps, the last inner % splits terms are left out. This was seen
// with 16-bit operands (examples/cublas_tail); the rule is applied to all types.
bool adds_all_terms(const cublasLtMatmulAlgo_t& algorithm, const ProductKey& key) {
  int32_t splits = 1;
  size_t written = 0;
  cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof(splits), &written);
  return splits <= 1 || key.inner % splits == 0 || key.inner / splits % terms_of_a_step(key.type) != 0;
}

std::vector<AlgorithmChoice> ask_heuristic(LtProblem problem, const ProductKey& key, cublasLtHandle_t handle, int most,
                                           uint32_t reduction_schemes) {
  cublasLtMatmulPreferenceOpaque_t preference;
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    problem.first(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
  };
  problem.first(cublasLtMatmulPreferenceInit(&preference));
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kMatmulTimingWorkspace});
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction_schemes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.out_alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.out_alignment);
  std::array<cublasLtMatmulHeuristicResult_t, kMostChoices> found;
  int count = 0;
  problem.first(cublasLtMatmulAlgoGetHeuristic(handle, &problem.operation, &problem.a, &problem.b, &problem.out,
                                               &problem.out, &preference, std::min(most, kMostChoices), found.data(),
                                               &count));
  std::vector<AlgorithmChoice> choices;
  if (problem.status != CUBLAS_STATUS_SUCCESS) return choices;
  for (int i = 0; i < count; ++i)
    if (found[i].state == CUBLAS_STATUS_SUCCESS && adds_all_terms(found[i].algo, key))
      choices.push_back({found[i].algo, static_cast<int64_t>(found[i].workspaceSize)});
  return choices;
}

}  // namespace

int64_t terms_of_a_step(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_64F: return 16;
    case CUDA_R_32F: return 32;
    case CUDA_R_16F:
    case CUDA_R_16BF: return 64;
    default: return 128;
  }
}

std::vector<AlgorithmChoice> ask_heuristic(const LtProblem& problem, const ProductKey& key, cublasLtHandle_t handle,
                                           int most) {
  // The partial sums of split-K are in the compute type.
  auto choices = ask_heuristic(problem, key, handle, most, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
  if (choices.empty()) choices = ask_heuristic(problem, key, handle, most, CUBLASLT_REDUCTION_SCHEME_NONE);
  return choices;
}

bool fits(LtProblem problem, const ProductKey& key, const AlgorithmChoice& choice, cublasLtHandle_t handle) {
  cublasLtMatmulHeuristicResult_t result = {};
  problem.first(cublasLtMatmulAlgoCheck(handle, &problem.operation, &problem.a, &problem.b, &problem.out, &problem.out,
                                        &choice.algorithm, &result));
  return problem.status == CUBLAS_STATUS_SUCCESS && choice.workspace <= kMatmulTimingWorkspace &&
         static_cast<int64_t>(result.workspaceSize) <= choice.workspace && adds_all_terms(choice.algorithm, key);
}

bool choices_are_timed() {
  static const bool timed = [] {
    const char* given = std::getenv(kVariable);
    return !given || std::strcmp(given, "off") != 0;
  }();
  return timed;
}

std::optional<AlgorithmChoice> kept_choice(const ProductKey& key) {
  const std::lock_guard lock(mutex);
  const Choices& choices = choices_of(key.device);
  const auto found = choices.find(key);
  return found == choices.end() ? std::nullopt : std::optional(found->second);
}

void keep_choice(const ProductKey& key, const AlgorithmChoice& choice) {
  const std::lock_guard lock(mutex);
  Choices& choices = choices_of(key.device);
  choices.insert_or_assign(key, choice);
  const fs::path path = file_of(key.device);
  if (path.empty()) return;
  Choices all = read(path, key.device);  // of other processes since then
  for (const auto& [mine, chosen] : choices) all.insert_or_assign(mine, chosen);
  write(path, all);
}

}  // namespace gptkernels::cuda
