// Attention's forward for few queries, as in decoding. The keys of a head are divided among thread blocks, so that all
// SMs read keys. Each thread block writes its part of the result to the workspace, and a second kernel combines the
// parts in a fixed order. The queries of all heads that share a key head are rows of the same tiles, which have 16
// rows. With up to 16 such rows, each key is read once.
#include "cuda/attention/mma/tiles.cuh"
#include "variants.h"

namespace gptkernels::cuda {
namespace {

constexpr int kMaxSplitQueries = 16;
constexpr int kSplitRows = 16;
constexpr int kMaxSplits = 256;
constexpr int kCombineThreads = 128;

// A stage in shared memory holds kKeys keys and their values. Each warp processes 16 keys of a stage, while the next
// stages are loaded.
template <typename T, int HS>
struct SplitShape {
  static constexpr int kBytes = MmaRows<T, HS>::kBytes;
  static constexpr int kWarps = kBytes <= 256 ? 4 : 2;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeys = 16 * kWarps;
  static constexpr int kStageBytes = kKeys * kBytes;  // bytes of a stage's keys, and of its values
  static constexpr int kPitch = HS + 8;               // floats between the rows of a warp's sums
  static constexpr int kStages = kBytes <= 128 ? 3 : 2;
  static constexpr int kStagesBytes = 2 * kStages * kStageBytes;
  static constexpr int kSumsBytes = kWarps * kSplitRows * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kSplitRows * kBytes + std::max(kStagesBytes, kSumsBytes);
  static_assert(kSharedBytes <= 99 << 10);
};

// The number of parts into which the keys are split, and the arrays of partial results. A row is a query of a head:
// there are B * NH * Tq rows.
struct SplitPlan {
  int splits;
  float* sums;         // (rows, splits, HS): the values, weighted with exponentials relative to the part's maximum
  float2* statistics;  // (rows, splits): the part's largest score in units of log2, and its sum of exponentials
};

// The head and query of a row. Row i of the rows that share a key head is query i % Tq of head first_head + i / Tq.
struct SplitRow {
  int64_t head;  // index among the heads of a sequence
  int query;
  __device__ SplitRow(int row, int64_t first_head, int queries)
      : head(first_head + row / queries), query(row % queries) {}
};

template <typename T, int HS, bool kExact>
__global__ void __launch_bounds__(SplitShape<T, HS>::kThreads)
    attention_forward_split_kernel(const __grid_constant__ AttentionForward<T> p,
                                   const __grid_constant__ SplitPlan plan) {
  using Shape = SplitShape<T, HS>;
  constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads, kStages = Shape::kStages;
  constexpr int kN = 2, kOut = HS / 8;
  let_next_kernel_start();  // the next kernel combines the parts; it waits for the end of this kernel
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  __shared__ float2 warp_statistics[Shape::kWarps][kSplitRows];
  const uint32_t query_tile = shared_window(shared_bytes);
  const uint32_t stages = query_tile + kSplitRows * Shape::kBytes;

  const AttentionSizes& s = p.sizes;
  const int queries = static_cast<int>(s.queries), keys = static_cast<int>(s.keys);
  const int head_size = static_cast<int>(s.head_size), offset = static_cast<int>(p.mask.query_offset);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rows = static_cast<int>(s.heads / s.key_heads) * queries;  // the rows that share a key head
  const int tiles = (rows + kSplitRows - 1) / kSplitRows;
  const int split = blockIdx.x % static_cast<unsigned>(plan.splits);
  const int row = static_cast<int>(blockIdx.x / static_cast<unsigned>(plan.splits) % tiles) * kSplitRows;
  const int64_t key_head_of_all = blockIdx.x / static_cast<unsigned>(plan.splits) / tiles;
  const int64_t b = key_head_of_all / s.key_heads, key_head = key_head_of_all % s.key_heads;
  const int64_t first_head = key_head * (s.heads / s.key_heads);
  const T* key = p.key.data + b * p.key.batch + key_head * p.key.head;
  const T* value = p.value.data + b * p.value.batch + key_head * p.value.head;

  // The thread block's part of the keys that any query sees: [first, end).
  const KeyBounds<true> bounds(p.mask, s, b);
  const int last = p.mask.causal ? min(bounds.end, queries + offset) : bounds.end;
  const int begin = bounds.begin / kKeys;
  const int blocks = max((last + kKeys - 1) / kKeys - begin, 0);
  const int per_split = (blocks + plan.splits - 1) / plan.splits;
  const int first = (begin + min(split * per_split, blocks)) * kKeys;
  const int end = min((begin + min((split + 1) * per_split, blocks)) * kKeys, last);

  const auto copy_stage = [&](int start, int stage) {
    const uint32_t to = stages + stage * 2 * Shape::kStageBytes;
    copy_rows<T, HS, kKeys, kThreads>(to, key + start * p.key.token, p.key.token, bounds.begin - start,
                                      bounds.end - start, head_size);
    copy_rows<T, HS, kKeys, kThreads>(to + Shape::kStageBytes, value + start * p.value.token, p.value.token,
                                      bounds.begin - start, bounds.end - start, head_size);
  };
  for (int i = threadIdx.x; i < kSplitRows * MmaRows<T, HS>::kChunks; i += kThreads) {
    const int r = i / MmaRows<T, HS>::kChunks, chunk = i % MmaRows<T, HS>::kChunks;
    const bool inside = row + r < rows && chunk * kPack<T> < head_size;
    const SplitRow at(row + r, first_head, queries);
    const T* from = p.query.data + b * p.query.batch;
    if (inside) from += at.head * p.query.head + at.query * p.query.token + chunk * kPack<T>;
    copy_async_16(query_tile + MmaRows<T, HS>::at(r, chunk), from, inside);
  }
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (first + i * kKeys < end) copy_stage(first + i * kKeys, i);
    copy_async_commit();
  }
  copy_async_wait<kStages - 2>();
  if constexpr (std::is_same_v<T, float> && !kExact)
    for (int i = threadIdx.x; i < kSplitRows * MmaRows<T, HS>::kChunks; i += kThreads) {
      float4& own = *reinterpret_cast<float4*>(
          shared_bytes + MmaRows<T, HS>::at(i / MmaRows<T, HS>::kChunks, i % MmaRows<T, HS>::kChunks));
      own = round_to_tf32(own);
    }
  __syncthreads();
  const RowOperand<T, HS, 1, !kExact && (Shape::kBytes <= 256)> query(query_tile, 0);

  int low[1][2], high[1][2];
  int64_t mask_row[2];
  bool inside[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = row + 8 * r + lane / 4;
    const SplitRow own(at, first_head, queries);
    inside[r] = at < rows;
    low[0][r] = bounds.begin;
    high[0][r] = p.mask.causal ? min(bounds.end, own.query + offset + 1) : bounds.end;
    mask_row[r] = b * p.mask.batch + own.head * p.mask.head + own.query * p.mask.query;
  }
  // The end of the keys that the first query sees.
  const int narrow_end = p.mask.causal ? min(bounds.end, offset + 1) : bounds.end;

  const float scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
  float out[1][kOut][4] = {}, maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  int stage = 0;
  for (int block = first; block < end; block += kKeys) {
    copy_async_wait<kStages - 2>();
    round_rows<T, HS, kExact, 2 * kKeys, kThreads>(shared_bytes + kSplitRows * Shape::kBytes +
                                                   stage * 2 * Shape::kStageBytes);
    __syncthreads();  // this stage has arrived, and all warps have read the previous stage
    const int ahead = block + (kStages - 1) * kKeys;
    if (ahead < end) copy_stage(ahead, stage == 0 ? kStages - 1 : stage - 1);
    copy_async_commit();
    const int start = block + 16 * warp;
    const uint32_t key_tile = stages + stage * 2 * Shape::kStageBytes + 16 * warp * Shape::kBytes;

    float scores[1][kN][4];
    multiply_transposed<T, HS, kExact>(scores, query, key_tile, head_size);
    scale_scores(scores, scale_log2);
    if (p.mask.allowed || p.mask.bias) {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = start + 8 * n + lane % 4 * 2 + e % 2;
          if (inside[e / 2] && j < keys) add_mask_element(scores[0][n][e], p.mask, mask_row[e / 2] + j * p.mask.key);
        }
    }
    if (start < bounds.begin || start + 16 > narrow_end) keep_columns(scores, low, high, start);
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = maximum[r];
#pragma unroll
      for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(scores[0][n][2 * r], scores[0][n][2 * r + 1]));
      largest = warp_reduce<FiniteMax, 4>(largest);
      const float origin = largest == -INFINITY ? 0 : largest;
      rescale[r] = exp2_approximately(maximum[r] - origin);
      maximum[r] = largest;
      float part = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[0][n][2 * r + c];
          score = exp2_approximately(score - origin);
          part += score;
        }
      sum[r] = sum[r] * rescale[r] + part;
    }
    if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
      for (int o = 0; o < kOut; ++o)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[0][o][e] *= rescale[e / 2];
    }
    add_product<T, HS, kExact>(out, scores, key_tile + Shape::kStageBytes, 0);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  // Add the warps' sums, relative to the thread block's maximum, through shared memory.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = warp_reduce<Sum, 4>(sum[r]);
    if (lane % 4 == 0) warp_statistics[warp][8 * r + lane / 4] = {maximum[r], sum[r]};
  }
  __syncthreads();  // also, all warps have read the stages, whose memory `sums` uses
  float* sums = reinterpret_cast<float*>(shared_bytes + kSplitRows * Shape::kBytes);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = -INFINITY;
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) largest = fmaxf(largest, warp_statistics[w][8 * r + lane / 4].x);
    const float rescale = largest == -INFINITY ? 0 : exp2_approximately(maximum[r] - largest);
    float* to = sums + (warp * kSplitRows + 8 * r + lane / 4) * Shape::kPitch + lane % 4 * 2;
#pragma unroll
    for (int o = 0; o < kOut; ++o)
      *reinterpret_cast<float2*>(to + 8 * o) = {out[0][o][2 * r] * rescale, out[0][o][2 * r + 1] * rescale};
  }
  __syncthreads();
  const int pairs = head_size / 2;
  for (int i = threadIdx.x; i < kSplitRows * pairs; i += kThreads) {
    const int r = i / pairs, column = i % pairs * 2;
    if (row + r >= rows) break;
    float largest = -INFINITY, total = 0;
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) largest = fmaxf(largest, warp_statistics[w][r].x);
    float2 result = {0, 0};
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      const float2 statistic = warp_statistics[w][r];
      if (largest != -INFINITY) total += statistic.y * exp2_approximately(statistic.x - largest);
      const float2 part = *reinterpret_cast<const float2*>(sums + (w * kSplitRows + r) * Shape::kPitch + column);
      result.x += part.x;
      result.y += part.y;
    }
    const SplitRow own(row + r, first_head, queries);
    const int64_t at = (b * s.heads + own.head) * queries + own.query;
    if (plan.splits > 1) {
      *reinterpret_cast<float2*>(plan.sums + (at * plan.splits + split) * head_size + column) = result;
      if (column == 0) plan.statistics[at * plan.splits + split] = {largest, total};
    } else {
      const float factor = total == 0 ? 0 : 1 / total;
      store_narrow<2>(p.out.data + b * p.out.batch + own.head * p.out.head + own.query * p.out.token + column,
                      {result.x * factor, result.y * factor});
      if (column == 0) p.logsumexp[at] = total == 0 ? -INFINITY : logsumexp_of(largest, total, p.mask.bias);
    }
  }
}

// Combines the parts of each row. There is one thread block per row. A thread group has one thread for every four
// columns. Group g adds parts g, g + groups, g + 2 * groups, ..., so that the loads of all parts are in flight at the
// same time. Then the sums of the groups are added in order.
template <typename T>
__global__ void __launch_bounds__(kCombineThreads)
    attention_forward_combine_kernel(const __grid_constant__ AttentionForward<T> p,
                                     const __grid_constant__ SplitPlan plan) {
  constexpr int kAhead = 8;  // parts that a thread loads before it uses the first part
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

// Returns the number of tiles of rows, which is the number of thread blocks if the keys are not split.
int64_t split_tiles(const AttentionSizes& s) {
  return s.batches * s.key_heads * ceil_div(s.heads / s.key_heads * s.queries, kSplitRows);
}

// Returns the number of parts into which the keys are split. There are two thread blocks per SM, unless parts would
// have fewer than 128 keys. With 4 or more tiles per SM there are 12 thread blocks per SM, because not all tiles run at
// the same time, and the last tiles would run for long while other SMs are idle.
template <typename T>
int splits_of(const AttentionForward<T>& p) {
  constexpr int kFewestKeys = 128;
  const AttentionSizes& s = p.sizes;
  int64_t keys = s.keys;
  if (p.mask.causal) keys = std::min(keys, std::max<int64_t>(s.queries + p.mask.query_offset, 1));
  const int64_t tiles = split_tiles(s), blocks_each = tiles < 4 * multiprocessors() ? 2 : 12;
  const int64_t wanted = ceil_div(blocks_each * multiprocessors(), tiles);
  return static_cast<int>(std::clamp<int64_t>(std::min(wanted, keys / kFewestKeys), 1, kMaxSplits));
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
