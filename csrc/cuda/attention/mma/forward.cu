// Attention's forward by mma.sync and cp.async (Dao, FlashAttention-2, 2023): bfloat16, float16, and float32, as TF32
// or exactly, on sm_80 and everything later, with masks, bounds and dropout.
#include "cuda/attention/variants.h"
#include "tiles.cuh"

namespace gptkernels::cuda {
namespace {

// 4 warps of kM times 16 queries, kKeys keys at a time in two stages: shared memory within the 99 KB of sm_86 and 89.
// Two times 16 queries halve what is loaded of keys and values from shared memory; masks and dropout need the
// registers.
template <typename T, int HS, bool kGeneral, bool kExact>
struct ForwardShape {
  static constexpr int kBytes = MmaRows<T, HS>::kBytes;
  static constexpr int kThreads = 128;
  static constexpr int kM = (sizeof(T) == 2 ? kBytes <= 128 && !kGeneral : kBytes == 256) ? 2 : 1;
  static constexpr int kBlocks = kM == 2 || kBytes >= 256 || kExact ? 2 : 3;  // whose registers a multiprocessor has
  static constexpr int kRows = 64 * kM;
  static constexpr int kKeys = kBytes <= (sizeof(T) == 2 ? 256 : 128) ? 64 : 32;
  static constexpr bool kKeepQuery = !kExact && kBytes <= (sizeof(T) == 2 ? 256 : 128);
  static constexpr int kStageBytes = kKeys * kBytes;  // of keys or of values
  static constexpr int kSharedBytes = kRows * kBytes + 4 * kStageBytes;
  static_assert(kSharedBytes <= 99 << 10);
};

__device__ float quad_max(float x) {
  return warp_reduce<FiniteMax, 4>(x);
}

template <typename T, int HS, bool kGeneral, bool kExact>
__global__ void __launch_bounds__(ForwardShape<T, HS, kGeneral, kExact>::kThreads,
                                  ForwardShape<T, HS, kGeneral, kExact>::kBlocks)
    attention_forward_mma_kernel(const __grid_constant__ AttentionForward<T> p,
                                 const __grid_constant__ HeadTiles order) {
  using Shape = ForwardShape<T, HS, kGeneral, kExact>;
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kN = kKeys / 8, kOut = HS / 8, kThreads = Shape::kThreads;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  const uint32_t query_tile = shared_window(shared_bytes);
  const uint32_t stages = query_tile + Shape::kRows * Shape::kBytes;

  const AttentionSizes& s = p.sizes;
  const int queries = static_cast<int>(s.queries), keys = static_cast<int>(s.keys);
  const int head_size = static_cast<int>(s.head_size), offset = static_cast<int>(p.mask.query_offset);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kM;
  const HeadTiles::Tile tile = order.at(static_cast<int>(blockIdx.x));
  const int64_t head = tile.head;
  const int row = tile.tile * Shape::kRows;
  const int64_t b = head / s.heads, h = head % s.heads, key_head = h / (s.heads / s.key_heads);
  const T* key = p.key.data + b * p.key.batch + key_head * p.key.head;
  const T* value = p.value.data + b * p.value.batch + key_head * p.value.head;

  const KeyBounds<kGeneral> bounds(p.mask, s, b);
  const int first = bounds.begin / kKeys * kKeys;
  const int end = p.mask.causal ? min(bounds.end, row + Shape::kRows + offset) : bounds.end;
  int low[kM][2], high[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      low[m][r] = bounds.begin;
      high[m][r] = bounds.end;
      if (p.mask.causal) high[m][r] = min(high[m][r], row + warp_row + 16 * m + 8 * r + lane / 4 + offset + 1);
    }
  // Where the window of the warp's first row ends, and that of its last.
  const int narrow_end = p.mask.causal ? min(bounds.end, row + warp_row + offset + 1) : bounds.end;
  const int wide_end = p.mask.causal ? min(bounds.end, row + warp_row + 16 * kM + offset) : bounds.end;

  const auto copy_stage = [&](int start, int stage) {
    const uint32_t to = stages + stage * 2 * Shape::kStageBytes;
    copy_rows<T, HS, kKeys, kThreads>(to, key + start * p.key.token, p.key.token, bounds.begin - start,
                                      bounds.end - start, head_size);
    copy_rows<T, HS, kKeys, kThreads>(to + Shape::kStageBytes, value + start * p.value.token, p.value.token,
                                      bounds.begin - start, bounds.end - start, head_size);
  };
  const auto round_stage = [&](int stage) {
    uint8_t* at = shared_bytes + Shape::kRows * Shape::kBytes + stage * 2 * Shape::kStageBytes;
    round_rows<T, HS, kExact, 2 * kKeys, kThreads>(at);  // keys and values are neighbours
  };

  copy_rows<T, HS, Shape::kRows, kThreads>(query_tile,
                                           p.query.data + b * p.query.batch + h * p.query.head + row * p.query.token,
                                           p.query.token, 0, queries - row, head_size);
  if (first < end) copy_stage(first, 0);
  copy_async_wait();
  round_rows<T, HS, kExact, Shape::kRows, kThreads>(shared_bytes);
  __syncthreads();
  const RowOperand<T, HS, kM, Shape::kKeepQuery> query(query_tile, warp_row);

  const float scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
  const float factor = score_factor<kGeneral>(p.mask, p.scale);
  const bool has_bias = kGeneral && p.mask.bias;
  const float natural = factor == 1 ? kLn2 : static_cast<float>(p.scale);  // of scores, to units of e
  const DropoutDraw dropout(p.dropout);
  float out[kM][kOut][4] = {}, maximum[kM][2], sum[kM][2] = {};
#pragma unroll
  for (int m = 0; m < kM; ++m) maximum[m][0] = maximum[m][1] = -INFINITY;

  // Exactly 1 for the largest score, where float32 is exact; else by one instruction, relative to origin as it is
  // rounded.
  const auto weight = [&](float score, float origin) {
    return exp2_approximately(kExact ? (score - origin) * factor : fmaf(score, factor, -origin));
  };

  int stage = 0;
  for (int start = first; start < end; start += kKeys, stage ^= 1) {
    copy_async_wait();
    round_stage(stage);
    __syncthreads();  // this stage has arrived, and all are done with the other one
    if (start + kKeys < end) copy_stage(start + kKeys, stage ^ 1);
    if (start >= wide_end) continue;
    const uint32_t key_tile = stages + stage * 2 * Shape::kStageBytes;

    float scores[kM][kN][4];
    multiply_transposed<T, HS, kExact>(scores, query, key_tile, head_size);
    if (kGeneral && factor == 1) {
      scale_scores(scores, scale_log2);
      if (p.mask.allowed || p.mask.bias)
        add_mask<T>(scores, p.mask, b * p.mask.batch + h * p.mask.head, row + warp_row, queries, p.mask.query, start,
                    keys, p.mask.key);
    }
    if (start < bounds.begin || start + kKeys > narrow_end) keep_columns(scores, low, high, start);

    bool rescales = false;
    float rescale[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = maximum[m][r];
#pragma unroll
        for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
        largest = quad_max(largest);
        const float finite = largest == -INFINITY ? 0 : largest;
        float origin = kExact ? finite : finite * factor;
        rescale[m][r] = exp2_approximately((maximum[m][r] - finite) * factor);
        rescales |= largest != maximum[m][r];
        maximum[m][r] = largest;
        if (!kExact && fabsf(origin) > kFarFromZero) {
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) scores[m][n][2 * r + c] -= finite;
          origin = 0;
        }
        float part = 0;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& score = scores[m][n][2 * r + c];
            score = weight(score, origin);
            part += score;
          }
        sum[m][r] = sum[m][r] * rescale[m][r] + part;
      }
    if (__any_sync(~0u, rescales)) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int o = 0; o < kOut; ++o)
#pragma unroll
          for (int e = 0; e < 4; ++e) out[m][o][e] *= rescale[m][e / 2];
    }
    if constexpr (kGeneral)
      if (dropout.drops())
        for_dropped<kM, kN>(dropout, head, row + warp_row, start, [&](int m, int n, int e) { scores[m][n][e] = 0; });
    add_product<T, HS, kExact>(out, scores, key_tile + Shape::kStageBytes, 0);
  }

#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = warp_reduce<Sum, 4>(sum[m][r]);
      const int at = row + warp_row + 16 * m + 8 * r + lane / 4;
      if (lane % 4 == 0 && at < queries)
        p.logsumexp[head * queries + at] = total == 0 ? -INFINITY
                                           : has_bias ? logsumexp_of(maximum[m][r], total, true)
                                           : kExact   ? fmaf(maximum[m][r], natural, logf(total))
                                                      : fmaf(maximum[m][r] * factor, kLn2, logf(total));
      sum[m][r] = total == 0 ? 0 : (kGeneral ? static_cast<float>(dropout.keep_scale) : 1) / total;
    }
  store_rows<T, HS>(shared_bytes, warp_row, out, sum, 0,
                    p.out.data + b * p.out.batch + h * p.out.head + (row + warp_row) * p.out.token, p.out.token,
                    queries - row - warp_row, head_size);
}

template <typename T, int HS, bool kGeneral, bool kExact>
Status launch(const AttentionForward<T>& p, Stream stream) {
  using Shape = ForwardShape<T, HS, kGeneral, kExact>;
  constexpr auto kKernel = attention_forward_mma_kernel<T, HS, kGeneral, kExact>;
  if (max_dynamic_shared_memory<kKernel>() < Shape::kSharedBytes) return cudaErrorInvalidConfiguration;
  const AttentionSizes& s = p.sizes;
  const int64_t tiles = ceil_div(s.queries, Shape::kRows), heads = s.batches * s.heads;
  const HeadTiles order = mma_order<T>(tiles, heads, s.keys, s.head_size, p.mask.causal);
  kKernel<<<grid_size(tiles * heads), Shape::kThreads, Shape::kSharedBytes, stream>>>(p, order);
  return cudaGetLastError();
}

}  // namespace

template <typename T>
bool attention_forward_mma_supports(const AttentionForward<T>& p) {
  return mma_supports<T>(p) && built_for_mma<attention_forward_mma_kernel<T, 64, true, false>>();
}

template <typename T>
Status attention_forward_mma(const AttentionForward<T>& p, Stream stream) {
  return for_mma_shape<T>(p.sizes.head_size, is_plain<T>(p), p.tf32, [&]<int HS, bool kGeneral, bool kExact>() {
    return launch<T, HS, kGeneral, kExact>(p, stream);
  });
}

#define INSTANTIATE(T)                                                         \
  template bool attention_forward_mma_supports<T>(const AttentionForward<T>&); \
  template Status attention_forward_mma<T>(const AttentionForward<T>&, Stream);
INSTANTIATE(float)
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
