// Cross-entropy fused into the LM head's matmul, whose epilogue stores exponentials instead of the logits. This saves
// the classifier's pass over the logits. The epilogue's warps have idle time for the exponentials. With E = exp(logit -
// c), where c is the logit of the row's target, the gradient of the logits is factor * E (sm90_linear_cross_entropy.h).
// Five launches:
//
//   before     one warp per row: the shift c, by a dot product of x with the target's row of the weight
//   matmul     stores E (0 at the target), the sums of E over a tile's 256 columns, and, separately, E at the target
//   after      adds the sums of a row; computes loss, factor and factor * x; stores minus the sum as the target's E;
//              marks rows to redo
//   matmul     again, for blocks of rows that have a marked row: stores the logits of marked rows
//   redo       the classifier (fused_classifier.cuh) on marked rows
//
// E is stored in bfloat16, which has float32's range, so c need not be the row's largest logit. As in the classifier,
// the sum excludes the target's column, so that a small loss keeps its digits.
#include <utility>

#include "cuda/common/reduce.cuh"
#include "cuda/gemm/backend.h"
#include "cuda/gemm/sm90_mainloop.cuh"
#include "fused_classifier.cuh"
#include "sm90_linear_cross_entropy.h"

namespace gptkernels::cuda {
namespace {

using namespace tile_product;

// A row is redone unless E at the target (usually about 1) is at least kMin and the sum of E is at most kMax.
constexpr float kMin = 0x1p-100f, kMax = 0x1p100f;

// In RowState::targets.
constexpr int kNone = -1;  // a row without a loss
constexpr int kRedo = -2;  // a row to be redone

[[maybe_unused]] constexpr int kAhead = 4;

// A row block is the kCluster * kRows rows of a cluster's tile.
struct RowState {
  float* shifts;     // (N) c * log2(e)
  int* targets;      // (N), target, kNone or kRedo
  float* at_target;  // (N) E at the target
  float* sums;       // (tiles across, N) sums of E without the target's column
  int* block_redo;   // (row blocks) 1 if a row is redone
  int* redo_blocks;  // (row blocks) the first *redo_count are to be redone
  int* redo_count;   // (1)
};

// In words of 4 bytes.
int64_t workspace_words(const ExpClassifier& p) {
  return (3 + tiles_across(p.width)) * p.rows + 2 * tiles_down(p.rows) + 1;
}

RowState row_state(const ExpClassifier& p, void* workspace) {
  auto* next = static_cast<char*>(workspace);
  const auto take = [&](int64_t words) { return std::exchange(next, next + 4 * words); };
  const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count)); };
  const auto ints = [&](int64_t count) { return reinterpret_cast<int*>(take(count)); };
  return {.shifts = floats(p.rows),
          .targets = ints(p.rows),
          .at_target = floats(p.rows),
          .sums = floats(tiles_across(p.width) * p.rows),
          .block_redo = ints(tiles_down(p.rows)),
          .redo_blocks = ints(tiles_down(p.rows)),
          .redo_count = ints(1)};
}

// ---- before ---------------------------------------------------------------------------------------------------------

constexpr int kBeforeWarps = 8;

__device__ float dot(const bfloat16* a, const bfloat16* b, int64_t width) {
  float sum = 0;
  for (int64_t i = threadIdx.x * kPack<bfloat16>; i < width; i += kWarp * kPack<bfloat16>) {
    float x[kPack<bfloat16>], y[kPack<bfloat16>];
    load_wide<kPack<bfloat16>>(x, a + i);
    load_wide<kPack<bfloat16>>(y, b + i);
#pragma unroll
    for (int k = 0; k < kPack<bfloat16>; ++k) sum = fmaf(x[k], y[k], sum);
  }
  return warp_reduce<Sum>(sum);
}

__global__ void __launch_bounds__(kBeforeWarps* kWarp)
    exp_classifier_before_kernel(const ExpClassifier p, const RowState state) {
  const int64_t row = int64_t(blockIdx.x) * kBeforeWarps + threadIdx.y;
  if (row >= p.rows) return;
  const int64_t target = read_target(p, row);
  if (threadIdx.x == 0) check_target(p, row, target);
  float shift = INFINITY;
  if (counts(p, target)) {
    const float logit = dot(p.x + row * p.x_stride, p.weight + target * p.weight_stride, p.inner);
    shift = kLog2E * widen(narrow<bfloat16>(logit));  // rounded as by the matmul
  }
  if (threadIdx.x > 0) return;
  state.shifts[row] = shift;
  state.targets[row] = counts(p, target) ? static_cast<int>(target) : kNone;
  if (row % (kCluster * kRows) == 0) state.block_redo[row / (kCluster * kRows)] = 0;
  if (row == 0) *state.redo_count = 0;
}

// ---- the matmul -----------------------------------------------------------------------------------------------------

struct ExpArguments : TileProduct<bfloat16> {
  RowState state;
  int vocab_size;
  bool store;
};

#if GPTKERNELS_WGMMA

// Sums four values per lane over the warp, with 6 shuffles instead of 20. Lanes 8i to 8i + 7 return the sum of value i.
__device__ float reduce_four(const float (&row_values)[4], int lane) {
  const bool last_two = lane & 16, second = lane & 8;
  float even = last_two ? row_values[2] : row_values[0], odd = last_two ? row_values[3] : row_values[1];
  even += __shfl_xor_sync(~0u, last_two ? row_values[0] : row_values[2], 16);
  odd += __shfl_xor_sync(~0u, last_two ? row_values[1] : row_values[3], 16);
  float sum = second ? odd : even;
  sum += __shfl_xor_sync(~0u, second ? even : odd, 8);
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  return sum;
}

#endif

// The Epilogue of gemm/sm90_mainloop.cuh. An epilogue warp reads the 16 rounded rows of its MMA warp from shared
// memory, four rows at a time, with 8 neighbouring columns per lane.
//
// Tiles are ordered column by column, so that a column of tiles reads its part of the weight from memory once, and x
// comes from the L2 cache. If kRedoOnly, only row blocks with rows to redo are computed, and these rows' logits are
// stored.
template <bool kRedoOnly>
struct ExpEpilogue {
  using Arguments = ExpArguments;
  [[maybe_unused]] static constexpr bool kBias = false, kMayBeIdle = kRedoOnly;

#if GPTKERNELS_WGMMA
  static __device__ int tiles_down(const Arguments& p) { return kRedoOnly ? *p.state.redo_count : p.tiles_down; }
  static __device__ int tiles(const Arguments& p) { return kRedoOnly ? tiles_down(p) * p.tiles_across : p.tiles; }

  static __device__ TilePosition tile_at(const Arguments& p, int tile, int rank) {
    const int down = tile % tiles_down(p);
    return tile_position(kRedoOnly ? p.state.redo_blocks[down] : down, tile / tiles_down(p), rank);
  }

  static __device__ void run(const Arguments& p, uint8_t* shared_bytes, const Barriers& barriers, int rank) {
    const int lane = threadIdx.x % 32;
    // The epilogue warps are warps 12 to 19.
    const int pair = __shfl_sync(~0u, threadIdx.x / 32 - 12, 0);
    const uint32_t rounded = rounded_rows(shared_bytes, pair);
    unsigned phase = 0;
    for (int tile = blockIdx.x / kCluster; tile < tiles(p); tile += gridDim.x / kCluster) {
      const TilePosition at = tile_at(p, tile, rank);
      const int row = at.row + pair * kWarpRows, column = at.column + 8 * lane;
      const int rows = min(p.rows - row, kWarpRows);  // 0 or negative beyond the matrix
      const bool stored = column < p.columns && p.store;
      // Lane i loads the shift and the target of row i.
      const float shift = lane < rows ? p.state.shifts[row + lane] : INFINITY;
      const int target = lane < rows ? p.state.targets[row + lane] : kNone;
      bfloat16* out = p.out + static_cast<int64_t>(row) * p.columns + column;
      barrier_wait(barriers.rounded(pair), phase);
#pragma unroll 1
      for (int r0 = 0; r0 < kWarpRows; r0 += kAhead) {
        float sums[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int r = r0 + i;
          const int target_of_row = __shfl_sync(~0u, target, r);
          Words words = load_shared(rounded + rounded_offset(r, lane));
          if constexpr (!kRedoOnly)
            words = exponentials(words, __shfl_sync(~0u, shift, r), target_of_row, column, p.vocab_size,
                                 p.state.at_target + row + r, sums[i]);
          if (stored && r < rows && (!kRedoOnly || target_of_row == kRedo)) store_global(out, words);
          out += p.columns;
        }
        if constexpr (!kRedoOnly) {
          const float sum = reduce_four(sums, lane);
          const int r = r0 + lane / 8;
          if (lane % 8 == 0 && r < rows)
            p.state.sums[static_cast<int64_t>(at.column / kColumns) * p.rows + row + r] = sum;
        }
      }
      __syncwarp();
      barrier_arrive_if(lane == 0, barriers.taken(pair));
      phase ^= 1;
    }
  }

 private:
  // shift = c * log2(e). Padded columns and the target's column become 0; the target's E goes to *at_target.
  static __device__ Words exponentials(const Words& logits, float shift, int target, int column, int vocab_size,
                                       float* at_target, float& sum) {
    float e[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_pair<bfloat16>(target == kNone ? 0 : logits.v[i]);
      e[2 * i] = exp2_approximately(fmaf(x.x, kLog2E, -shift));
      e[2 * i + 1] = exp2_approximately(fmaf(x.y, kLog2E, -shift));
    }
    if (column + 8 > vocab_size) {
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (column + k >= vocab_size) e[k] = 0;
    }
    if (static_cast<unsigned>(target - column) < 8) {
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (column + k == target) {
          *at_target = e[k];
          e[k] = 0;
        }
    }
    sum = ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
    Words result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.v[i] = pack_pair<bfloat16>(e[2 * i], e[2 * i + 1]);
    return result;
  }
#endif
};

// ---- after ----------------------------------------------------------------------------------------------------------

constexpr int kAfterRows = 32, kAfterParts = 8;

// Computes a row's loss from E at the target and the sum of E over the other columns (`others`), stores -others as the
// target's E, and returns the factor. If E is out of range, the function marks the row to be redone and returns 1.
//
// -others is rounded to bfloat16. The factor is corrected for this rounding, so that the target's gradient, the row's
// largest, is exact.
__device__ float finish_row(const ExpClassifier& p, const RowState& state, int64_t row, float others) {
  const int target = state.targets[row];
  if (target == kNone) {
    p.losses[row] = 0;
    return 0;
  }
  const float own = state.at_target[row], sum = own + others;
  if (!(own >= kMin && sum <= kMax)) {
    const int64_t block = row / (kCluster * kRows);
    state.targets[row] = kRedo;
    if (atomicExch(&state.block_redo[block], 1) == 0)
      state.redo_blocks[atomicAdd(state.redo_count, 1)] = static_cast<int>(block);
    return 1;
  }
  const float ratio = others / own;
  p.losses[row] = isinf(ratio) ? logf(others) - logf(own) : log1pf(ratio);
  const bfloat16 rounded = narrow<bfloat16>(others);
  if (p.factors) p.dlogits[row * p.width + target] = -rounded;
  return (p.dlosses ? *p.dlosses : 1.0f) / sum * (others > kMin ? others / widen(rounded) : 1.0f);
}

// All threads of a warp call this function. A factor of 0 gives 0 even for infinities and NaNs.
template <typename From>
__device__ void scale_row(bfloat16* to, const From* from, int64_t width, float factor) {
  for (int64_t i = threadIdx.x * kPack<bfloat16>; i < width; i += kWarp * kPack<bfloat16>) {
    float x[kPack<bfloat16>];
    load_wide<kPack<bfloat16>>(x, from + i);
#pragma unroll
    for (float& value : x) value = factor == 0 ? 0.0f : factor * value;
    store_narrow<kPack<bfloat16>>(to + i, x);
  }
}

// Thread (row, part) adds the sums of every kAfterParts-th tile of its row. Then each warp scales whole rows of x.
__global__ void __launch_bounds__(kAfterRows* kAfterParts)
    exp_classifier_after_kernel(const ExpClassifier p, const RowState state, int tiles_across) {
  __shared__ float parts[kAfterParts][kAfterRows];
  __shared__ float factors[kAfterRows];
  const int64_t first = int64_t(blockIdx.x) * kAfterRows, row = first + threadIdx.x;
  float sum = 0;
  if (row < p.rows)
    for (int i = threadIdx.y; i < tiles_across; i += kAfterParts) sum += state.sums[i * p.rows + row];
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && row < p.rows) {
#pragma unroll
    for (int i = 1; i < kAfterParts; ++i) sum += parts[i][threadIdx.x];
    const float factor = finish_row(p, state, row, sum);
    if (p.factors) p.factors[row] = factor;
    factors[threadIdx.x] = factor;
  }
  if (!p.scaled_x) return;
  __syncthreads();
  for (int i = threadIdx.y; i < kAfterRows && first + i < p.rows; i += kAfterParts)
    scale_row(p.scaled_x + (first + i) * p.inner, p.x + (first + i) * p.x_stride, p.inner, factors[i]);
}

// ---- redo -----------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kSimpleThreads)
    exp_classifier_redo_kernel(const FusedClassifierForward<bfloat16> p, const RowState state) {
  if (*state.redo_count == 0) return;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x)
    if (state.targets[row] == kRedo) classify_row<kPack<bfloat16>>(p, row);
}

// ---- dx -------------------------------------------------------------------------------------------------------------

constexpr int kScaleWarps = 8;

__global__ void __launch_bounds__(kScaleWarps* kWarp)
    exp_classifier_scale_kernel(bfloat16* dx, const float* product, const float* factors, int64_t rows, int64_t width) {
  const int64_t row = int64_t(blockIdx.x) * kScaleWarps + threadIdx.y;
  if (row < rows) scale_row(dx + row * width, product + row * width, width, factors[row]);
}

// ---- host code ------------------------------------------------------------------------------------------------------

constexpr int64_t kTileElements = int64_t{kCluster} * kRows * kColumns;

Operands<bfloat16> operands(const ExpClassifier& p) {
  return {.a = p.x,
          .b = p.weight,
          .rows = p.rows,
          .columns = p.width,
          .inner = p.inner,
          .a_ld = p.x_stride,
          .b_ld = p.weight_stride};
}

}  // namespace

bool exp_classifier_supports(const ExpClassifier& p) {
  constexpr double kMinUtilization = 0.85;
  constexpr int64_t kMaxTerms = 4096;  // more terms make the saved pass negligible
  const GemmBackend wanted = gemm_backend();
  if (wanted == GemmBackend::kCublas || !supports(operands(p))) return false;
  const int64_t tiles = tiles_down(p.rows) * tiles_across(p.width);
  const double within = static_cast<double>(p.rows * p.width) / static_cast<double>(tiles * kTileElements);
  const bool faster = busy(tiles) * within >= kMinUtilization && p.inner <= kMaxTerms;
  return (faster || wanted == GemmBackend::kOwn) && p.inner % kPack<bfloat16> == 0 &&
         all_aligned(p.dlogits, p.scaled_x) && built_for_wgmma<matmul_wgmma_kernel<ExpEpilogue<false>, false>>();
}

int64_t exp_classifier_workspace(const ExpClassifier& p) {
  return 4 * workspace_words(p);
}

cudaError_t exp_classifier(const ExpClassifier& p, void* workspace, Stream stream) {
  const RowState state = row_state(p, workspace);
  const dim3 before(kWarp, kBeforeWarps), after(kAfterRows, kAfterParts);
  exp_classifier_before_kernel<<<grid_size(ceil_div(p.rows, kBeforeWarps)), before, 0, stream>>>(p, state);
  ExpArguments product = {make_product<false>(operands(p), p.dlogits, static_cast<const bfloat16*>(nullptr)), state,
                          static_cast<int>(p.vocab_size), p.factors != nullptr};
  cudaError_t error = launch<ExpEpilogue<false>, false>(product, stream);
  if (error != cudaSuccess) return error;
  exp_classifier_after_kernel<<<grid_size(ceil_div(p.rows, kAfterRows)), after, 0, stream>>>(p, state,
                                                                                             product.tiles_across);
  product.store = true;
  error = launch<ExpEpilogue<true>, false>(product, stream);
  if (error != cudaSuccess) return error;
  exp_classifier_redo_kernel<<<2 * multiprocessors(), kSimpleThreads, 0, stream>>>(p, state);
  return cudaGetLastError();
}

cudaError_t exp_classifier_dx(bfloat16* dx, const float* product, const float* factors, int64_t rows, int64_t width,
                              Stream stream) {
  exp_classifier_scale_kernel<<<grid_size(ceil_div(rows, kScaleWarps)), dim3(kWarp, kScaleWarps), 0, stream>>>(
      dx, product, factors, rows, width);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
