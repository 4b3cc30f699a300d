#include "../device.h"
#include "common/launch.cuh"
#include "matmul_own.h"
#include "matmul_sm90.h"
#include "matmul_sm90_weight.h"
#include "product_choice.h"

namespace gptkernels::cuda {
namespace {

// docs/linear.md has the measurements.

// A bias alone is worth it where the terms are few, so that storing the result takes much of cuBLASLt's time; GELU's
// gradient, where a pass for the column sums is saved too. Tiles are large: where there are few, some SMs are idle at
// the end, and cuBLASLt's smaller tiles are faster.
template <typename T>
bool tiles_are_faster(const Matmul<T>& p) {
  constexpr double kBusy = 0.85;
  constexpr int64_t kFewTerms = 1024, kManyColumns = 2048, kManyRows = 32768;
  const bool bias = p.bias && !p.pre_gelu && p.inner <= kFewTerms && p.columns >= kManyColumns && p.rows >= kManyRows;
  return (p.pre_gelu || (p.dgelu_at && p.column_sums) || bias) && matmul_sm90_busy(p) >= kBusy;
}

// With fewer terms, too much of the time goes to what the clusters write for each other. Where there are more tiles
// than clusters, these do not read the same terms at the same time, and cuBLASLt need not split the sums either; where
// a tenth of the tiles lies outside the matrix, its smaller tiles are faster. Without sums it is as fast where there
// are very few.
template <typename T>
bool weight_is_faster(const Matmul<T>& p) {
  constexpr int64_t kManyTerms = 16384, kFewestTiles = 27;
  constexpr double kFilled = 0.9;
  const int64_t tiles = matmul_sm90_weight_tiles(p);
  return p.inner >= kManyTerms && tiles <= multiprocessors() / 2 && matmul_sm90_weight_filled(p) >= kFilled &&
         (p.a_sums || tiles >= kFewestTiles);
}

}  // namespace

template <typename T>
OwnProduct own_product(const Matmul<T>& p) {
  const ProductChoice wanted = product_choice();
  if (wanted == ProductChoice::kCublas) return OwnProduct::kNone;
  if (matmul_sm90_takes(p) && (wanted == ProductChoice::kOwn || tiles_are_faster(p))) return OwnProduct::kTiles;
  if (matmul_sm90_weight_takes(p) && (wanted == ProductChoice::kOwn || weight_is_faster(p))) return OwnProduct::kWeight;
  return OwnProduct::kNone;
}

#define GPTKERNELS_INSTANTIATE(T) template OwnProduct own_product<T>(const Matmul<T>&);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
