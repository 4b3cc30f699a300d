#include "../../device.h"
#include "backend.h"
#include "cuda/common/launch.cuh"
#include "dispatch.h"
#include "sm90_gelu.h"
#include "sm90_weight_gradient.h"

namespace gptkernels::cuda {
namespace {

// docs/linear.md has the measurements.

// GELU's gradient where a pass for the column sums is saved too. Tiles are large: where there are few, some SMs are
// idle at the end, and cuBLASLt's smaller tiles are faster.
template <typename T>
bool tiles_are_faster(const Matmul<T>& p) {
  constexpr double kBusy = 0.85;
  return (p.pre_gelu || (p.dgelu_at && p.column_sums)) && matmul_sm90_busy(p) >= kBusy;
}

// With the sums, for which cuBLASLt's product takes another pass. With fewer terms, too much of the time goes to what
// the clusters write for each other. Where there are more tiles than clusters, these do not read the same terms at the
// same time, and cuBLASLt need not split the sums either; where a tenth of the tiles lies outside the matrix, its
// smaller tiles are faster.
template <typename T>
bool weight_is_faster(const Matmul<T>& p) {
  constexpr int64_t kManyTerms = 16384;
  constexpr double kFilled = 0.9;
  return p.a_sums && p.inner >= kManyTerms && matmul_sm90_weight_tiles(p) <= multiprocessors() / 2 &&
         matmul_sm90_weight_filled(p) >= kFilled;
}

}  // namespace

template <typename T>
OwnProduct own_product(const Matmul<T>& p) {
  const GemmBackend wanted = gemm_backend();
  if (wanted == GemmBackend::kCublas) return OwnProduct::kNone;
  if (matmul_sm90_takes(p) && (wanted == GemmBackend::kOwn || tiles_are_faster(p))) return OwnProduct::kTiles;
  if (matmul_sm90_weight_takes(p) && (wanted == GemmBackend::kOwn || weight_is_faster(p))) return OwnProduct::kWeight;
  return OwnProduct::kNone;
}

#define GPTKERNELS_INSTANTIATE(T) template OwnProduct own_product<T>(const Matmul<T>&);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
