#include <unistd.h>

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

#include "matmul_choices.h"

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

}  // namespace

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
