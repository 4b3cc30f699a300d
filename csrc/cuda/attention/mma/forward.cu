// Attention's forward by mma.sync and cp.async (Dao, FlashAttention-2, 2023) for sm_80 and later. A thread block
// computes a tile of queries of one head:
//
//   start loading q and the first key tile
//   for each key tile j that the queries see:
//     wait until stage j is loaded; start loading key tile j + 1 into the other stage
//     S = q k(j)'; masked scores are set to -inf
//     raise each row's maximum; rescale sum and O to the new maximum
//     P = exp2(S * factor - maximum * factor); sum += P;  O += P v(j), where dropout is applied to P
//   store O / sum and the logsumexp
//
// Each of the four warps computes 16 or 32 of the queries, and skips the key tiles that the causal mask hides from all
// of them.
#include "cuda/attention/variants.h"
#include "tiles.cuh"

namespace gptkernels::cuda {
namespace {

// With 32 queries per warp (kM = 2), keys and values are loaded half as often per query, but kernels of 16-bit types
// have no registers left for masks and dropout. Tiles fit in the 99 KB of shared memory of sm_86 and sm_89.
template <typename T, int HS, bool kGeneral, bool kExact>
struct ForwardShape {
  static constexpr int kBytes = MmaRows<T, HS>::kBytes;
  static constexpr int kThreads = 128;
  static constexpr int kM = (sizeof(T) == 2 ? kBytes <= 128 && !kGeneral : kBytes == 256) ? 2 : 1;
  static constexpr int kBlocks = kM == 2 || kBytes >= 256 || kExact ? 2 : 3;  // thread blocks per SM
  static constexpr int kRows = 64 * kM;
  static constexpr int kKeys = kBytes <= (sizeof(T) == 2 ? 256 : 128) ? 64 : 32;  // of a key tile
  static constexpr bool kKeepQuery = !kExact && kBytes <= (sizeof(T) == 2 ? 256 : 128);
  static constexpr int kStageBytes = kKeys * kBytes;
  static constexpr int kSharedBytes = kRows * kBytes + 4 * kStageBytes;
  static_assert(kSharedBytes <= 99 << 10);
};

template <typename T, int HS, bool kGeneral, bool kExact>
__global__ void __launch_bounds__(ForwardShape<T, HS, kGeneral, kExact>::kThreads,
                                  ForwardShape<T, HS, kGeneral, kExact>::kBlocks)
    attention_forward_mma_kernel(const __grid_constant__ AttentionForward<T> p,
                                 const __grid_constant__ HeadTiles order) {
  using Shape = ForwardShape<T, HS, kGeneral, kExact>;
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kN = kKeys / 8, kThreads = Shape::kThreads;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  const uint32_t query_tile = shared_window(shared_bytes);
  const uint32_t stages = query_tile + Shape::kRows * Shape::kBytes;

  const AttentionSizes& s = p.sizes;
  const int queries = static_cast<int>(s.queries), keys = static_cast<int>(s.keys);
  const int head_size = static_cast<int>(s.head_size), offset = static_cast<int>(p.mask.query_offset);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kM;
  const HeadTiles::Tile tile = order.at(static_cast<int>(blockIdx.x));
  const int row = tile.tile * Shape::kRows;
  const auto [head, b, h, key_head] = QueryHead(s, tile.head);
  const T* key = p.key.at(b, key_head, 0);
  const T* value = p.value.at(b, key_head, 0);

  // Keys in [first, end) are loaded. The thread's queries see keys in [low, high). All of the warp's queries see the
  // keys before narrow_end, and none of them sees a key from wide_end on.
  const KeyBounds<kGeneral> bounds(p.mask, s, b);
  const int first = bounds.begin / kKeys * kKeys;
  const int end = p.mask.causal ? min(bounds.end, row + Shape::kRows + offset) : bounds.end;
  int low[kM][2], high[kM][2];
  for_rows<kM>([&](int m, int r) {
    low[m][r] = bounds.begin;
    high[m][r] = p.mask.causal ? min(bounds.end, row + warp_row + 16 * m + 8 * r + lane / 4 + offset + 1) : bounds.end;
  });
  const int narrow_end = p.mask.causal ? min(bounds.end, row + warp_row + offset + 1) : bounds.end;
  const int wide_end = p.mask.causal ? min(bounds.end, row + warp_row + 16 * kM + offset) : bounds.end;

  const auto copy_stage = [&](int start, int stage) {
    const uint32_t to = stages + stage * 2 * Shape::kStageBytes;
    copy_rows<T, HS, kKeys, kThreads>(to, key + start * p.key.token, p.key.token, bounds.begin - start,
                                      bounds.end - start, head_size);
    copy_rows<T, HS, kKeys, kThreads>(to + Shape::kStageBytes, value + start * p.value.token, p.value.token,
                                      bounds.begin - start, bounds.end - start, head_size);
  };
  copy_rows<T, HS, Shape::kRows, kThreads>(query_tile, p.query.at(b, h, row), p.query.token, 0, queries - row,
                                           head_size);
  if (first < end) copy_stage(first, 0);
  copy_async_wait();
  round_rows<T, HS, kExact, Shape::kRows, kThreads>(shared_bytes);
  __syncthreads();
  const RowOperand<T, HS, kM, Shape::kKeepQuery> query(query_tile, warp_row);

  const float scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
  const float factor = score_factor<kGeneral>(p.mask, p.scale);
  const bool has_bias = kGeneral && p.mask.bias;
  const float natural = factor == 1 ? kLn2 : static_cast<float>(p.scale);  // converts `maximum`
  const DropoutDraw dropout(p.dropout);
  float out[kM][HS / 8][4] = {}, maximum[kM][2], sum[kM][2] = {};
  for_rows<kM>([&](int m, int r) { maximum[m][r] = -INFINITY; });
  int stage = 0;
  for (int start = first; start < end; start += kKeys, stage ^= 1) {
    copy_async_wait();
    round_rows<T, HS, kExact, 2 * kKeys, kThreads>(shared_bytes + Shape::kRows * Shape::kBytes +
                                                   stage * 2 * Shape::kStageBytes);
    __syncthreads();  // this stage is loaded, and no warp reads the other stage any more
    if (start + kKeys < end) copy_stage(start + kKeys, stage ^ 1);
    if (start >= wide_end) continue;
    const uint32_t key_tile = stages + stage * 2 * Shape::kStageBytes;

    float scores[kM][kN][4], rescale[kM][2];
    multiply_transposed<T, HS, kExact>(scores, query, key_tile, head_size);
    if (kGeneral && factor == 1) {
      scale_scores(scores, scale_log2);
      if (p.mask.allowed || p.mask.bias)
        add_mask<T>(scores, p.mask, b * p.mask.batch + h * p.mask.head, row + warp_row, queries, p.mask.query, start,
                    keys, p.mask.key);
    }
    if (start < bounds.begin || start + kKeys > narrow_end) keep_columns(scores, low, high, start);
    const bool changed = add_exponentials<T, kExact>(scores, maximum, sum, rescale, factor);
    if (__any_sync(~0u, changed)) for_elements(out, [&](float& x, int m, int, int e) { x *= rescale[m][e / 2]; });
    if constexpr (kGeneral)
      if (dropout.drops())
        for_dropped<kM, kN>(dropout, dropout.head_number(head, b), row + warp_row, start,
                            [&](int m, int n, int e) { scores[m][n][e] = 0; });
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
  store_rows<T, HS>(shared_bytes, warp_row, out, sum, 0, p.out.at(b, h, row + warp_row), p.out.token,
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
