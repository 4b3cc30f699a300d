#include "matmul.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include "gelu.h"
#include "simd.h"

namespace gptkernels::cpu {
namespace {

constexpr int64_t kPartTerms = 256;
constexpr int64_t kPanelTerms = 512;  // a packed panel has at most 128 KB
constexpr int64_t kTileRows = 24;
constexpr int64_t kConflictStride = 512;  // rows a multiple of 2 KB apart conflict in the caches
constexpr int64_t kMaxUnpackedStride = 1024;

int64_t tiles_of(int64_t rows) {
  return (rows + kTileRows - 1) / kTileRows;
}

}  // namespace
}  // namespace gptkernels::cpu

#define GPTKERNELS_NAME matmul
#define GPTKERNELS_KERNELS "matmul_tiles.h"
#include "each_instruction_set.h"

namespace gptkernels::cpu {
namespace {

enum class GemmBackend { kFastest, kBlas, kOwn };

GemmBackend gemm_backend() {
  const char* name = std::getenv("GPTKERNELS_MATMUL");
  if (!name) return GemmBackend::kFastest;
  return !std::strcmp(name, "blas")  ? GemmBackend::kBlas
         : !std::strcmp(name, "own") ? GemmBackend::kOwn
                                     : GemmBackend::kFastest;
}

// MKL, torch's BLAS, does not use AVX-512 on AMD processors. There this package's AVX-512 kernels are faster for small
// matmuls (measured on Zen 4 only, docs/notes/linear.md). MKL is faster for large matmuls, which need blocking for the
// caches.
bool is_faster(const Matmul& p) {
#ifdef GPTKERNELS_X86
  static const bool amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  // Packing b pays if a has at least this many rows. Contiguous rows of b are packed faster, or not at all
  // (panel_rows()).
  const int64_t rows = p.b.column == 1 ? 32 : 96;
  const int64_t elements = p.rows * p.inner + p.inner * p.columns + p.rows * p.columns;
  const bool near = p.a.column == 1 || (p.a.column <= 1024 && p.a.column % kConflictStride != 0);
  return amd && capability_choice().capability == Capability::kAvx512 && p.rows >= rows && p.columns >= 48 && near &&
         elements <= int64_t(1) << 22;
#else
  return false;
#endif
}

void add_column_sums(const Matmul& p, Stream stream) {
  double* sums = static_cast<double*>(p.workspace);
  const int64_t tiles = tiles_of(p.rows);
  parallel_for(stream, p.columns, tiles, [&](int64_t begin, int64_t end) {
    vectorised([&] {
      for (int64_t tile = 1; tile < tiles; ++tile) {
        const double* more = sums + tile * p.columns;
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) sums[i] += more[i];
      }
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) p.column_sums[i] = static_cast<float>(sums[i]);
    });
  });
}

}  // namespace

bool matmul_supports(const Matmul& p) {
  const GemmBackend requested = gemm_backend();
  if (p.rows == 0 || p.columns == 0 || p.inner == 0 || requested == GemmBackend::kBlas) return false;
  return requested == GemmBackend::kOwn || is_faster(p);
}

int64_t matmul_ld(int64_t columns) {
  return columns % kConflictStride == 0 ? columns + 16 : columns;
}

int64_t matmul_workspace(const Matmul& p) {
  return p.column_sums ? tiles_of(p.rows) * p.columns * int64_t(sizeof(double)) : 0;
}

Status matmul(const Matmul& p, Stream stream) {
  GPTKERNELS_WIDEST(matmul_tiles(p, stream));
  if (p.column_sums) add_column_sums(p, stream);
  return {};
}

}  // namespace gptkernels::cpu
