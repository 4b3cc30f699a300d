// Attention's forward for few queries, as in decoding. A head's keys are split among thread blocks, so that all SMs
// read keys; a second kernel combines the parts in a fixed order. A tile has up to 16 rows. They are queries of all
// query heads that share a key head, so that the keys are read once per tile, not once per query head. Each warp
// processes 16 keys of a stage, for all rows of the tile.
#include "cuda/attention/mma/tiles.cuh"
#include "variants.h"

namespace gptkernels::cuda {
namespace {

constexpr int kMaxSplitQueries = 16;
constexpr int kSplitRows = 16;
constexpr int kMaxSplits = 256;
constexpr int kCombineThreads = 128;

template <typename T, int HS>
struct SplitShape {
  static constexpr int kBytes = MmaRows<T, HS>::kBytes;
  static constexpr int kWarps = kBytes <= 256 ? 4 : 2;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeys = 16 * kWarps;
  static constexpr int kStageBytes = kKeys * kBytes;
  static constexpr int kPitch = HS + 8;
  static constexpr int kStages = kBytes <= 128 ? 3 : 2;
  static constexpr int kStagesBytes = 2 * kStages * kStageBytes;
  static constexpr int kSumsBytes = kWarps * kSplitRows * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kSplitRows * kBytes + (kStagesBytes > kSumsBytes ? kStagesBytes : kSumsBytes);
  static_assert(kSharedBytes <= 99 << 10);
};

struct SplitPlan {
  int splits;
  float* sums;         // (B, NH, Tq, splits, HS): sum of exp2(score - maximum) * value
  float2* statistics;  // (B, NH, Tq, splits): maximum score in units of log2, sum of exp2(score - maximum)
};

// Row i of the rows that share a key head is query i % Tq of query head first_head + i / Tq.
struct SplitTile {
  int queries;  // Tq
  int rows;     // the number of rows that share the key head
  int split;
  int row;
  int64_t batch;
  int64_t key_head;
  int64_t first_head;

  struct Row {
    int64_t head;
    int query;
  };

  __device__ SplitTile(const AttentionSizes& s, int queries, int splits) : queries(queries) {
    rows = static_cast<int>(s.heads / s.key_heads) * queries;
    const int tiles = (rows + kSplitRows - 1) / kSplitRows;
    split = blockIdx.x % static_cast<unsigned>(splits);
    row = static_cast<int>(blockIdx.x / static_cast<unsigned>(splits) % tiles) * kSplitRows;
    const int64_t key_head_of_all = blockIdx.x / static_cast<unsigned>(splits) / tiles;
    batch = key_head_of_all / s.key_heads;
    key_head = key_head_of_all % s.key_heads;
    first_head = key_head * (s.heads / s.key_heads);
  }
  __device__ Row at(int i) const { return {first_head + i / queries, i % queries}; }
};

template <typename T, int HS>
__device__ void copy_queries(uint32_t shared, const AttentionForward<T>& p, const SplitTile& tile, int head_size) {
  using Rows = MmaRows<T, HS>;
  for (int i = threadIdx.x; i < kSplitRows * Rows::kChunks; i += SplitShape<T, HS>::kThreads) {
    const int r = i / Rows::kChunks, chunk = i % Rows::kChunks;
    const bool inside = tile.row + r < tile.rows && chunk * kPack<T> < head_size;
    const SplitTile::Row at = tile.at(tile.row + r);
    const T* from = p.query.data + tile.batch * p.query.batch;
    if (inside) from += at.head * p.query.head + at.query * p.query.token + chunk * kPack<T>;
    copy_async_16(shared + Rows::at(r, chunk), from, inside);
  }
}

template <typename T, int HS, bool kExact>
__device__ void round_queries(uint8_t* shared) {
  using Rows = MmaRows<T, HS>;
  if constexpr (std::is_same_v<T, float> && !kExact)
    for (int i = threadIdx.x; i < kSplitRows * Rows::kChunks; i += SplitShape<T, HS>::kThreads) {
      float4& own = *reinterpret_cast<float4*>(shared + Rows::at(i / Rows::kChunks, i % Rows::kChunks));
      own = round_to_tf32(own);
    }
}

// Writes each warp's part of the results to `sums`, relative to the largest maximum of all warps, and each warp's own
// maximum and sum of exponentials to `statistics`.
template <typename Shape, int kOut>
__device__ void share_sums(float* sums, float2 (&statistics)[Shape::kWarps][kSplitRows], const float (&out)[1][kOut][4],
                           const float (&maximum)[1][2], const float (&sum)[1][2], int warp, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = warp_reduce<Sum, 4>(sum[0][r]);
    if (lane % 4 == 0) statistics[warp][8 * r + lane / 4] = {maximum[0][r], total};
  }
  __syncthreads();  // no warp reads the stages any more; `sums` overwrites them
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = -INFINITY;
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) largest = fmaxf(largest, statistics[w][8 * r + lane / 4].x);
    const float rescale = largest == -INFINITY ? 0 : exp2_approximately(maximum[0][r] - largest);
    float* to = sums + (warp * kSplitRows + 8 * r + lane / 4) * Shape::kPitch + lane % 4 * 2;
#pragma unroll
    for (int o = 0; o < kOut; ++o)
      *reinterpret_cast<float2*>(to + 8 * o) = {out[0][o][2 * r] * rescale, out[0][o][2 * r + 1] * rescale};
  }
  __syncthreads();
}

// Adds the warps' parts. Stores the results, or, if there are several splits, the sums for the combine kernel.
template <typename Shape, typename T>
__device__ void store_tile(const AttentionForward<T>& p, const SplitPlan& plan, const SplitTile& tile,
                           const float* sums, const float2 (&statistics)[Shape::kWarps][kSplitRows], int head_size) {
  const int pairs = head_size / 2;
  for (int i = threadIdx.x; i < kSplitRows * pairs; i += Shape::kThreads) {
    const int r = i / pairs, column = i % pairs * 2;
    if (tile.row + r >= tile.rows) break;
    float largest = -INFINITY, total = 0;
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) largest = fmaxf(largest, statistics[w][r].x);
    float2 result = {0, 0};
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      const float2 statistic = statistics[w][r];
      if (largest != -INFINITY) total += statistic.y * exp2_approximately(statistic.x - largest);
      const float2 part = *reinterpret_cast<const float2*>(sums + (w * kSplitRows + r) * Shape::kPitch + column);
      result.x += part.x;
      result.y += part.y;
    }
    const SplitTile::Row own = tile.at(tile.row + r);
    const int64_t at = (tile.batch * p.sizes.heads + own.head) * tile.queries + own.query;
    if (plan.splits > 1) {
      *reinterpret_cast<float2*>(plan.sums + (at * plan.splits + tile.split) * head_size + column) = result;
      if (column == 0) plan.statistics[at * plan.splits + tile.split] = {largest, total};
    } else {
      const float factor = total == 0 ? 0 : 1 / total;
      store_narrow<2>(p.out.at(tile.batch, own.head, own.query) + column, {result.x * factor, result.y * factor});
      if (column == 0) p.logsumexp[at] = total == 0 ? -INFINITY : logsumexp_of(largest, total, p.mask.bias);
    }
  }
}

template <typename T, int HS, bool kExact>
__global__ void __launch_bounds__(SplitShape<T, HS>::kThreads)
    attention_forward_split_kernel(const __grid_constant__ AttentionForward<T> p,
                                   const __grid_constant__ SplitPlan plan) {
  using Shape = SplitShape<T, HS>;
  constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads, kStages = Shape::kStages;
  let_next_kernel_start();  // the combine kernel, which waits until this kernel has ended
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  __shared__ float2 warp_statistics[Shape::kWarps][kSplitRows];
  const uint32_t query_tile = shared_window(shared_bytes);
  const uint32_t stages = query_tile + kSplitRows * Shape::kBytes;

  const AttentionSizes& s = p.sizes;
  const int queries = static_cast<int>(s.queries), keys = static_cast<int>(s.keys);
  const int head_size = static_cast<int>(s.head_size), offset = static_cast<int>(p.mask.query_offset);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const SplitTile tile(s, queries, plan.splits);
  const T* key = p.key.at(tile.batch, tile.key_head, 0);
  const T* value = p.value.at(tile.batch, tile.key_head, 0);

  // This split has the keys in [first, end).
  const KeyBounds<true> bounds(p.mask, s, tile.batch);
  const int last = p.mask.causal ? min(bounds.end, queries + offset) : bounds.end;
  const int begin = bounds.begin / kKeys;
  const int blocks = max((last + kKeys - 1) / kKeys - begin, 0);
  const int per_split = (blocks + plan.splits - 1) / plan.splits;
  const int first = (begin + min(tile.split * per_split, blocks)) * kKeys;
  const int end = min((begin + min((tile.split + 1) * per_split, blocks)) * kKeys, last);

  const auto copy_stage = [&](int start, int stage) {
    const uint32_t to = stages + stage * 2 * Shape::kStageBytes;
    copy_rows<T, HS, kKeys, kThreads>(to, key + start * p.key.token, p.key.token, bounds.begin - start,
                                      bounds.end - start, head_size);
    copy_rows<T, HS, kKeys, kThreads>(to + Shape::kStageBytes, value + start * p.value.token, p.value.token,
                                      bounds.begin - start, bounds.end - start, head_size);
  };
  copy_queries<T, HS>(query_tile, p, tile, head_size);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (first + i * kKeys < end) copy_stage(first + i * kKeys, i);
    copy_async_commit();
  }
  copy_async_wait<kStages - 2>();
  round_queries<T, HS, kExact>(shared_bytes);
  __syncthreads();
  const RowOperand<T, HS, 1, !kExact && (Shape::kBytes <= 256)> query(query_tile, 0);

  // The thread's rows see the keys in [low, high); all queries see the keys in [bounds.begin, narrow_end).
  int low[1][2], high[1][2];
  int64_t mask_row[2];
  bool inside[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = tile.row + 8 * r + lane / 4;
    const SplitTile::Row own = tile.at(at);
    inside[r] = at < tile.rows;
    low[0][r] = bounds.begin;
    high[0][r] = p.mask.causal ? min(bounds.end, own.query + offset + 1) : bounds.end;
    mask_row[r] = tile.batch * p.mask.batch + own.head * p.mask.head + own.query * p.mask.query;
  }
  const int narrow_end = p.mask.causal ? min(bounds.end, offset + 1) : bounds.end;

  const float scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
  float out[1][HS / 8][4] = {}, maximum[1][2] = {{-INFINITY, -INFINITY}}, sum[1][2] = {};
  int stage = 0;
  for (int block = first; block < end; block += kKeys) {
    copy_async_wait<kStages - 2>();
    round_rows<T, HS, kExact, 2 * kKeys, kThreads>(shared_bytes + kSplitRows * Shape::kBytes +
                                                   stage * 2 * Shape::kStageBytes);
    __syncthreads();  // this stage is loaded, and no warp reads the previous stage any more
    const int ahead = block + (kStages - 1) * kKeys;
    if (ahead < end) copy_stage(ahead, stage == 0 ? kStages - 1 : stage - 1);
    copy_async_commit();
    const int start = block + 16 * warp;
    const uint32_t key_tile = stages + stage * 2 * Shape::kStageBytes + 16 * warp * Shape::kBytes;

    float scores[1][2][4], rescale[1][2];
    multiply_transposed<T, HS, kExact>(scores, query, key_tile, head_size);
    scale_scores(scores, scale_log2);
    if (p.mask.allowed || p.mask.bias)
      for_elements(scores, [&](float& score, int, int n, int e) {
        const int j = start + 8 * n + lane % 4 * 2 + e % 2;
        if (inside[e / 2] && j < keys) add_mask_element(score, p.mask, mask_row[e / 2] + j * p.mask.key);
      });
    if (start < bounds.begin || start + 16 > narrow_end) keep_columns(scores, low, high, start);
    add_exponentials<T, true>(scores, maximum, sum, rescale, 1);  // factor 1: scores are in units of log2
    if (__any_sync(~0u, rescale[0][0] != 1 || rescale[0][1] != 1))
      for_elements(out, [&](float& x, int, int, int e) { x *= rescale[0][e / 2]; });
    add_product<T, HS, kExact>(out, scores, key_tile + Shape::kStageBytes, 0);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  float* sums = reinterpret_cast<float*>(shared_bytes + kSplitRows * Shape::kBytes);  // replaces the stages
  share_sums<Shape>(sums, warp_statistics, out, maximum, sum, warp, lane);
  store_tile<Shape>(p, plan, tile, sums, warp_statistics, head_size);
}

// A thread block combines the parts of one row. Group g of threads adds the parts g, g + groups, ..., so that many
// loads are in flight; then the sums of the groups are added in a fixed order.
template <typename T>
__global__ void __launch_bounds__(kCombineThreads)
    attention_forward_combine_kernel(const __grid_constant__ AttentionForward<T> p,
                                     const __grid_constant__ SplitPlan plan) {
  constexpr int kAhead = 8;  // parts in flight per thread
  __shared__ float maxima[kCombineThreads / 32];
  __shared__ float4 thread_sums[kCombineThreads];
  __shared__ float thread_totals[kCombineThreads];
  const AttentionSizes& s = p.sizes;
  const int quads = static_cast<int>(s.head_size / 4), groups = kCombineThreads / quads;
  const int group = threadIdx.x / quads, column = threadIdx.x % quads * 4;
  const int64_t row = blockIdx.x;
  const float2* statistics = plan.statistics + row * plan.splits;
  const float* sums = plan.sums + row * plan.splits * s.head_size + column;
  const int first = group < groups ? group : plan.splits;
  wait_for_previous_kernel();

  float2 statistic[kAhead];
  float4 part[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int split = first + i * groups;
    statistic[i] = split < plan.splits ? statistics[split] : float2{-INFINITY, 0};
    part[i] = split < plan.splits ? *reinterpret_cast<const float4*>(sums + split * s.head_size) : float4{};
  }
  float largest = -INFINITY;
  for (int split = threadIdx.x; split < plan.splits; split += kCombineThreads)
    largest = fmaxf(largest, statistics[split].x);
  largest = warp_reduce<FiniteMax>(largest);
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kCombineThreads / 32; ++w) largest = fmaxf(largest, maxima[w]);

  const float origin = largest == -INFINITY ? 0 : largest;
  float total = 0;
  float4 result = {};
  const auto add = [&](float2 of_part, float4 x) {
    const float weight = exp2_approximately(of_part.x - origin);
    total = fmaf(of_part.y, weight, total);
    result.x = fmaf(x.x, weight, result.x);
    result.y = fmaf(x.y, weight, result.y);
    result.z = fmaf(x.z, weight, result.z);
    result.w = fmaf(x.w, weight, result.w);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) add(statistic[i], part[i]);
  for (int split = first + kAhead * groups; split < plan.splits; split += groups)
    add(statistics[split], *reinterpret_cast<const float4*>(sums + split * s.head_size));
  thread_sums[threadIdx.x] = result;
  thread_totals[threadIdx.x] = total;
  __syncthreads();
  if (group > 0) return;
  for (int g = 1; g < min(groups, plan.splits); ++g) {
    const float4 other = thread_sums[g * quads + threadIdx.x];
    result.x += other.x;
    result.y += other.y;
    result.z += other.z;
    result.w += other.w;
    total += thread_totals[g * quads + threadIdx.x];
  }
  const float factor = total == 0 ? 0 : 1 / total;
  const int64_t head = row / s.queries, query = row % s.queries;
  store_narrow<4>(
      p.out.data + head / s.heads * p.out.batch + head % s.heads * p.out.head + query * p.out.token + column,
      {result.x * factor, result.y * factor, result.z * factor, result.w * factor});
  if (column == 0) p.logsumexp[row] = total == 0 ? -INFINITY : logsumexp_of(largest, total, p.mask.bias);
}

int64_t split_tiles(const AttentionSizes& s) {
  return s.batches * s.key_heads * ceil_div(s.heads / s.key_heads * s.queries, kSplitRows);
}

// There are enough splits for two thread blocks per SM, or for 12 if there are 4 or more tiles per SM, but at most
// kMaxSplits and at most one per 128 keys. With 12, not all thread blocks are resident at once, and fewer, longer ones
// would leave SMs idle at the end.
template <typename T>
int splits_of(const AttentionForward<T>& p) {
  constexpr int kFewestKeys = 128;
  const AttentionSizes& s = p.sizes;
  int64_t keys = s.keys;
  if (p.mask.causal) keys = min(keys, max(s.queries + p.mask.query_offset, int64_t{1}));
  const int64_t tiles = split_tiles(s), blocks_each = tiles < 4 * multiprocessors() ? 2 : 12;
  const int64_t wanted = ceil_div(blocks_each * multiprocessors(), tiles);
  return static_cast<int>(clamp(min(wanted, keys / kFewestKeys), 1, kMaxSplits));
}

template <typename T>
int64_t partial_sums(const AttentionForward<T>& p, int splits) {
  return splits > 1 ? p.sizes.batches * p.sizes.heads * p.sizes.queries * splits : 0;
}

template <typename T, int HS, bool kExact>
Status launch(const AttentionForward<T>& p, Stream stream) {
  using Shape = SplitShape<T, HS>;
  constexpr auto kKernel = attention_forward_split_kernel<T, HS, kExact>;
  constexpr auto kCombine = attention_forward_combine_kernel<T>;
  if (max_dynamic_shared_memory<kKernel>() < Shape::kSharedBytes) return cudaErrorInvalidConfiguration;
  const AttentionSizes& s = p.sizes;
  SplitPlan plan = {.splits = splits_of(p), .sums = static_cast<float*>(p.workspace), .statistics = nullptr};
  if (plan.splits > 1)
    plan.statistics = reinterpret_cast<float2*>(plan.sums + partial_sums(p, plan.splits) * s.head_size);
  kKernel<<<grid_size(split_tiles(s) * plan.splits), Shape::kThreads, Shape::kSharedBytes, stream>>>(p, plan);
  if (plan.splits > 1) {
    launch_early<kCombine>(grid_size(s.batches * s.heads * s.queries), kCombineThreads, 0, stream, p, plan);
  }
  return cudaGetLastError();
}

}  // namespace

template <typename T>
bool attention_forward_split_supports(const AttentionForward<T>& p) {
  return p.sizes.queries <= kMaxSplitQueries && p.dropout.probability == 0 && mma_supports<T>(p) &&
         built_for_mma<attention_forward_split_kernel<T, 64, false>>();
}

template <typename T>
int64_t attention_forward_split_workspace(const AttentionForward<T>& p) {
  return partial_sums(p, splits_of(p)) * (p.sizes.head_size * static_cast<int64_t>(sizeof(float)) + sizeof(float2));
}

template <typename T>
Status attention_forward_split(const AttentionForward<T>& p, Stream stream) {
  return for_mma_shape<T>(p.sizes.head_size, false, p.tf32,
                          [&]<int HS, bool kGeneral, bool kExact>() { return launch<T, HS, kExact>(p, stream); });
}

#define INSTANTIATE(T)                                                               \
  template bool attention_forward_split_supports<T>(const AttentionForward<T>&);     \
  template int64_t attention_forward_split_workspace<T>(const AttentionForward<T>&); \
  template Status attention_forward_split<T>(const AttentionForward<T>&, Stream);
INSTANTIATE(float)
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
