// Attention's backward by mma.sync and cp.async. P = exp(scale q k' - logsumexp), g is the gradient of out, and ' is
// the transpose:
//
//   dv = P' g, dq = scale dS k, dk = scale dS' q, where dS = P (g v' - delta) and delta = sum(dout * out) - dlogsumexp.
//
// Dropout is applied to P in dv, and to g v'. One kernel computes dq and delta, a second one dk and dv. Each of them
// computes P and g v', so that it can sum its gradients in registers, in a fixed order.
#include "cuda/attention/logsumexp_correction.cuh"
#include "cuda/attention/variants.h"
#include "tiles.cuh"

namespace gptkernels::cuda {
namespace {

// Exact float32 and far biases (lowest_bias.cuh) need logsumexp_correction.cuh.
template <bool kGeneral, bool kExact>
constexpr bool kCorrects = kGeneral || kExact;

// Arrays (B, NH, Tq) that the kernel for dq stores for the kernel for dk and dv.
struct RowStatistics {
  float* delta;
  float* correction;

  __device__ RowStatistics(void* workspace, const AttentionSizes& s)
      : delta(static_cast<float*>(workspace)), correction(delta + s.batches * s.heads * s.queries) {}
};

// ---- dq -------------------------------------------------------------------------------------------------------------

// With 32 queries per warp (kM = 2), keys and values are loaded and rounded half as often per query.
template <typename T, int HS, bool kExact>
struct DqueryShape {
  static constexpr int kBytes = MmaRows<T, HS>::kBytes;
  static constexpr int kThreads = 128;
  static constexpr int kM = sizeof(T) == 4 && kBytes == 256 ? 2 : 1;
  static constexpr int kBlocks = kM;  // thread blocks per SM
  static constexpr int kRows = 64 * kM;
  static constexpr int kKeys = kBytes <= (sizeof(T) == 2 ? 256 : 128) ? 64 : kBytes <= 256 ? 32 : 16;
  static constexpr bool kKeepRows = !kExact && kBytes <= 128;
  static constexpr int kTileBytes = kRows * kBytes;
  static constexpr int kStageBytes = kKeys * kBytes;
  static constexpr int kSharedBytes = 2 * kTileBytes + 4 * kStageBytes;
  static_assert(kSharedBytes <= 99 << 10);
};

template <typename T>
__device__ float quad_dot(const T* dout, const T* out, int head_size) {
  float sum = 0;
  for (int i = threadIdx.x % 4 * kPack<T>; i < head_size; i += 4 * kPack<T>) {
    float a[kPack<T>], b[kPack<T>];
    load_wide<kPack<T>>(a, dout + i);
    load_wide<kPack<T>>(b, out + i);
#pragma unroll
    for (int k = 0; k < kPack<T>; ++k) sum = fmaf(a[k], b[k], sum);
  }
  return warp_reduce<Sum, 4>(sum);
}

template <typename T, int HS, bool kGeneral, bool kExact>
__global__ void __launch_bounds__(DqueryShape<T, HS, kExact>::kThreads, DqueryShape<T, HS, kExact>::kBlocks)
    attention_backward_dquery_mma_kernel(const __grid_constant__ AttentionBackward<T> p,
                                         const __grid_constant__ HeadTiles order) {
  using Shape = DqueryShape<T, HS, kExact>;
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kN = kKeys / 8, kThreads = Shape::kThreads;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  const uint32_t query_tile = shared_window(shared_bytes);
  const uint32_t dout_tile = query_tile + Shape::kTileBytes;
  const uint32_t stages = dout_tile + Shape::kTileBytes;

  const AttentionSizes& s = p.sizes;
  const int queries = static_cast<int>(s.queries), keys = static_cast<int>(s.keys);
  const int head_size = static_cast<int>(s.head_size), offset = static_cast<int>(p.mask.query_offset);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kM;
  const HeadTiles::Tile tile = order.at(static_cast<int>(blockIdx.x));
  const int row = tile.tile * Shape::kRows;
  const auto [head, b, h, key_head] = QueryHead(s, tile.head);
  const T* key = p.key.at(b, key_head, 0);
  const T* value = p.value.at(b, key_head, 0);

  const RowStatistics statistics(p.workspace, s);
  const bool has_bias = kGeneral && p.mask.bias;
  const KeyBounds<kGeneral> bounds(p.mask, s, b);
  const int first = bounds.begin / kKeys * kKeys;
  const int end = p.mask.causal ? min(bounds.end, row + Shape::kRows + offset) : bounds.end;
  const auto copy_stage = [&](int start, int stage) {
    const uint32_t to = stages + stage * 2 * Shape::kStageBytes;
    copy_rows<T, HS, kKeys, kThreads>(to, key + start * p.key.token, p.key.token, bounds.begin - start,
                                      bounds.end - start, head_size);
    copy_rows<T, HS, kKeys, kThreads>(to + Shape::kStageBytes, value + start * p.value.token, p.value.token,
                                      bounds.begin - start, bounds.end - start, head_size);
  };
  copy_rows<T, HS, Shape::kRows, kThreads>(query_tile, p.query.at(b, h, row), p.query.token, 0, queries - row,
                                           head_size);
  copy_rows<T, HS, Shape::kRows, kThreads>(dout_tile, p.dout.at(b, h, row), p.dout.token, 0, queries - row, head_size);
  if (first < end) copy_stage(first, 0);

  // The thread's rows see the keys in [low, high). `reference` is the logsumexp in units of log2.
  int low[kM][2], high[kM][2];
  float reference[kM][2], delta[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + warp_row + 16 * m + 8 * r + lane / 4;
      low[m][r] = bounds.begin;
      high[m][r] = p.mask.causal ? min(bounds.end, at + offset + 1) : bounds.end;
      const bool inside = at < queries;
      const int within = inside ? at : row;  // all lanes take part in quad_dot()
      const int64_t statistic = head * queries + within;
      const float logsumexp = inside ? p.logsumexp[statistic] : 0;
      const bool sees = logsumexp != -INFINITY;
      float sum = quad_dot(p.dout.at(b, h, within), p.out.at(b, h, within), head_size);
      if (p.dlogsumexp) sum -= p.dlogsumexp[statistic];
      delta[m][r] = inside && sees ? sum : 0;
      reference[m][r] = sees ? in_units_of_log2(logsumexp, has_bias) : 0;
      if (inside && lane % 4 == 0) statistics.delta[statistic] = delta[m][r];
    }
  const int narrow_end = p.mask.causal ? min(bounds.end, row + warp_row + offset + 1) : bounds.end;
  const int wide_end = p.mask.causal ? min(bounds.end, row + warp_row + 16 * kM + offset) : bounds.end;

  copy_async_wait();
  round_rows<T, HS, kExact, 2 * Shape::kRows, kThreads>(shared_bytes);  // dout follows the queries
  __syncthreads();
  const RowOperand<T, HS, kM, Shape::kKeepRows> query(query_tile, warp_row);
  const RowOperand<T, HS, kM, Shape::kKeepRows> dout(dout_tile, warp_row);

  const float scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
  const float factor = score_factor<kGeneral>(p.mask, p.scale);
  const DropoutDraw dropout(p.dropout);
  const float keep_scale = kGeneral && dropout.drops() ? static_cast<float>(dropout.keep_scale) : 1;
  float dquery[kM][HS / 8][4] = {}, sum[kM][2] = {};  // sum of probabilities
  int stage = 0;
  for (int start = first; start < end; start += kKeys, stage ^= 1) {
    copy_async_wait();
    round_rows<T, HS, kExact, 2 * kKeys, kThreads>(shared_bytes + 2 * Shape::kTileBytes +
                                                   stage * 2 * Shape::kStageBytes);
    __syncthreads();  // this stage is loaded, and no warp reads the other stage any more
    if (start + kKeys < end) copy_stage(start + kKeys, stage ^ 1);
    if (start >= wide_end) continue;
    const uint32_t key_tile = stages + stage * 2 * Shape::kStageBytes;

    float weights[kM][kN][4], gradients[kM][kN][4];
    multiply_transposed<T, HS, kExact>(weights, query, key_tile, head_size);
    if (kGeneral && factor == 1) {
      scale_scores(weights, scale_log2);
      if (p.mask.allowed || p.mask.bias)
        add_mask<T>(weights, p.mask, b * p.mask.batch + h * p.mask.head, row + warp_row, queries, p.mask.query, start,
                    keys, p.mask.key);
    }
    if (start < bounds.begin || start + kKeys > narrow_end) keep_columns(weights, low, high, start);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          weights[m][n][e] = exp2_approximately(fmaf(weights[m][n][e], factor, -reference[m][e / 2]));
    if (kExact || has_bias) {
      // Sums each tile first, because the rounding errors of a long sum of equal terms would not average out.
      for_rows<kM>([&](int m, int r) {
        float part = 0;
        for_columns<kN>([&](int n, int c) { part += weights[m][n][2 * r + c]; });
        sum[m][r] += part;
      });
    }

    multiply_transposed<T, HS, kExact>(gradients, dout, key_tile + Shape::kStageBytes, head_size);
    if constexpr (kGeneral)
      if (dropout.drops())
        for_dropped<kM, kN>(dropout, dropout.head_number(head, b), row + warp_row, start,
                            [&](int m, int n, int e) { gradients[m][n][e] = 0; });
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          gradients[m][n][e] = weights[m][n][e] * fmaf(gradients[m][n][e], keep_scale, -delta[m][e / 2]);
    add_product<T, HS, kExact>(dquery, gradients, key_tile, 0);
  }

  float scales[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales[m][r] = static_cast<float>(gradient_scale(p));
      if constexpr (kCorrects<kGeneral, kExact>) {
        const float total = warp_reduce<Sum, 4>(sum[m][r]);
        const int at = row + warp_row + 16 * m + 8 * r + lane / 4;
        if (at >= queries) continue;
        const float logsumexp = p.logsumexp[head * queries + at];
        const bool corrects = kExact || (has_bias && logsumexp <= kFarBias);
        const float correction = corrects ? logsumexp_correction(total, logsumexp) : 1;
        if (lane % 4 == 0) statistics.correction[head * queries + at] = correction;
        scales[m][r] *= correction;
      }
    }
  store_rows<T, HS>(shared_bytes, warp_row, dquery, scales, 0, p.dquery.at(b, h, row + warp_row), p.dquery.token,
                    queries - row - warp_row, head_size);
}

// ---- dk and dv ------------------------------------------------------------------------------------------------------

// With kParts = 2, two warps share the same keys, and each sums half of the columns of dk and dv, for lack of
// registers.
template <typename T, int HS>
struct DkeyShape {
  static constexpr int kBytes = MmaRows<T, HS>::kBytes;
  static constexpr int kParts = HS > 128 ? 2 : 1;
  static constexpr int kThreads = 128 * kParts;
  static constexpr int kM = sizeof(T) == 4 && kBytes == 256 ? 2 : 1;
  static constexpr int kBlocks = kM;  // thread blocks per SM
  static constexpr int kRows = 64 * kM;
  static constexpr int kQueries = kBytes <= 128 ? 64 : kBytes <= 256 ? 32 : 16;
  static constexpr bool kKeepRows = false;
  static constexpr int kTileBytes = kRows * kBytes;
  static constexpr int kStageBytes = kQueries * kBytes;
  static constexpr int kStatisticsAt = 2 * kTileBytes + 4 * kStageBytes;
  static constexpr int kStatistics = 3;  // logsumexp, delta, correction
  static constexpr int kSharedBytes = kStatisticsAt + 2 * kStatistics * kQueries * static_cast<int>(sizeof(float));
  static_assert(kSharedBytes <= 99 << 10);
};

template <typename Shape, bool kCopyCorrection>
__device__ void copy_statistics(uint32_t shared, int stage, const float* logsumexp, const RowStatistics& statistics,
                                int64_t head, int start, int queries) {
  constexpr int kQueries = Shape::kQueries;
  const float* const from[Shape::kStatistics] = {logsumexp, statistics.delta, statistics.correction};
#pragma unroll
  for (int i = 0; i < (kCopyCorrection ? 3 : 2); ++i) {
    const int query = static_cast<int>(threadIdx.x) - i * kQueries % Shape::kThreads;
    if (query < 0 || query >= kQueries) continue;
    const bool inside = start + query < queries;
    copy_async_4(shared + Shape::kStatisticsAt + ((stage * Shape::kStatistics + i) * kQueries + query) * sizeof(float),
                 from[i] + head * queries + (inside ? start + query : 0), inside);
  }
}

template <bool kCorrect, int kM, int kN>
__device__ void probabilities_of_columns(float (&scores)[kM][kN][4], float factor, const float* logsumexp,
                                         const float* correction, bool has_bias) {
  for_columns<kN>([&](int n, int c) {
    const float own = logsumexp[8 * n + c];
    const float reference = own == -INFINITY ? 0 : in_units_of_log2(own, has_bias);
    for_rows<kM>([&](int m, int r) {
      float& score = scores[m][n][2 * r + c];
      score = exp2_approximately(fmaf(score, factor, -reference));
      if constexpr (kCorrect) score *= correction[8 * n + c];
    });
  });
}

// A negative weight marks an element of P that dropout drops.
template <bool kGeneral, int kM, int kN>
__device__ void gradients_of_columns(float (&gradients)[kM][kN][4], float (&weights)[kM][kN][4], const float* delta,
                                     float keep_scale) {
  for_columns<kN>([&](int n, int c) {
    const float own = delta[8 * n + c];
    for_rows<kM>([&](int m, int r) {
      float& weight = weights[m][n][2 * r + c];
      float& gradient = gradients[m][n][2 * r + c];
      gradient = (kGeneral ? fabsf(weight) : weight) * fmaf(gradient, keep_scale, -own);
      if (kGeneral && weight < 0) weight = 0;
    });
  });
}

template <typename T, int HS, bool kGeneral, bool kExact>
__global__ void __launch_bounds__(DkeyShape<T, HS>::kThreads, DkeyShape<T, HS>::kBlocks)
    attention_backward_dkey_mma_kernel(const __grid_constant__ AttentionBackward<T> p,
                                       const __grid_constant__ HeadTiles order) {
  using Shape = DkeyShape<T, HS>;
  constexpr int kM = Shape::kM, kQueries = Shape::kQueries, kN = kQueries / 8, kThreads = Shape::kThreads;
  constexpr int kColumns = HS / Shape::kParts;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  const uint32_t key_tile = shared_window(shared_bytes);
  const uint32_t value_tile = key_tile + Shape::kTileBytes;
  const uint32_t stages = value_tile + Shape::kTileBytes;

  const AttentionSizes& s = p.sizes;
  const int queries = static_cast<int>(s.queries), keys = static_cast<int>(s.keys);
  const int head_size = static_cast<int>(s.head_size), offset = static_cast<int>(p.mask.query_offset);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp / Shape::kParts * 16 * kM, warp_column = warp % Shape::kParts * kColumns;
  const HeadTiles::Tile tile = order.at(static_cast<int>(blockIdx.x));
  const int row = tile.tile * Shape::kRows;
  const int group = static_cast<int>(s.heads / s.key_heads);
  const int64_t b = tile.head / s.key_heads, key_head = tile.head % s.key_heads;

  // The thread's keys are seen by the queries in [low, high). Queries before `first` see no key of the tile, queries
  // before wide_begin see no key of the warp, and queries from narrow_begin on see all keys of the warp.
  const KeyBounds<kGeneral> bounds(p.mask, s, b);
  const bool any = row < bounds.end && row + Shape::kRows > bounds.begin;
  const int first = p.mask.causal ? max(row - offset, 0) / kQueries * kQueries : 0;
  struct Place {
    int64_t head;
    int start;
  };
  const int64_t last_head = any && first < queries ? (key_head + 1) * group : 0;
  const auto next = [&](const Place& place) {
    const bool on = place.start + kQueries < queries;
    return Place{on ? place.head : place.head + 1, on ? place.start + kQueries : first};
  };
  int low[kM][2], high[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row + warp_row + 16 * m + 8 * r + lane / 4;
      low[m][r] = at < bounds.begin || at >= bounds.end ? INT_MAX : p.mask.causal ? at - offset : 0;
      high[m][r] = queries;
    }
  const bool all_keys = row + warp_row >= bounds.begin && row + warp_row + 16 * kM <= bounds.end;
  const int wide_begin = p.mask.causal ? row + warp_row - offset : 0;
  const int narrow_begin = all_keys ? (p.mask.causal ? wide_begin + 16 * kM - 1 : 0) : INT_MAX;

  const RowStatistics statistics(p.workspace, s);
  const bool has_bias = kGeneral && p.mask.bias;
  const auto copy_stage = [&](const Place& place, int stage) {
    const auto [h, start] = place;
    const uint32_t to = stages + stage * 2 * Shape::kStageBytes;
    copy_rows<T, HS, kQueries, kThreads>(to, p.query.at(b, h, start), p.query.token, 0, queries - start, head_size);
    copy_rows<T, HS, kQueries, kThreads>(to + Shape::kStageBytes, p.dout.at(b, h, start), p.dout.token, 0,
                                         queries - start, head_size);
    copy_statistics<Shape, kCorrects<kGeneral, kExact>>(key_tile, stage, p.logsumexp, statistics, b * s.heads + h,
                                                        start, queries);
  };
  copy_rows<T, HS, Shape::kRows, kThreads>(key_tile, p.key.at(b, key_head, row), p.key.token, bounds.begin - row,
                                           bounds.end - row, head_size);
  copy_rows<T, HS, Shape::kRows, kThreads>(value_tile, p.value.at(b, key_head, row), p.value.token, bounds.begin - row,
                                           bounds.end - row, head_size);
  Place place = {key_head * group, first};
  if (place.head < last_head) copy_stage(place, 0);
  copy_async_wait();
  round_rows<T, HS, kExact, 2 * Shape::kRows, kThreads>(shared_bytes);
  __syncthreads();
  const RowOperand<T, HS, kM, Shape::kKeepRows> key(key_tile, warp_row);
  const RowOperand<T, HS, kM, Shape::kKeepRows> value(value_tile, warp_row);

  const float scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
  const float factor = score_factor<kGeneral>(p.mask, p.scale);
  const DropoutDraw dropout(p.dropout);
  const float keep_scale = kGeneral && dropout.drops() ? static_cast<float>(dropout.keep_scale) : 1;
  float dkey[kM][kColumns / 8][4] = {}, dvalue[kM][kColumns / 8][4] = {};
  int stage = 0;
  for (; place.head < last_head; place = next(place), stage ^= 1) {
    copy_async_wait();
    round_rows<T, HS, kExact, 2 * kQueries, kThreads>(shared_bytes + 2 * Shape::kTileBytes +
                                                      stage * 2 * Shape::kStageBytes);
    __syncthreads();  // this stage is loaded, and no warp reads the other stage any more
    if (const Place ahead = next(place); ahead.head < last_head) copy_stage(ahead, stage ^ 1);
    const auto [h, start] = place;
    if (start + kQueries <= wide_begin) continue;
    const uint32_t query_tile = stages + stage * 2 * Shape::kStageBytes;
    const float* logsumexp = reinterpret_cast<const float*>(shared_bytes + Shape::kStatisticsAt) +
                             stage * Shape::kStatistics * kQueries + lane % 4 * 2;
    const float* delta = logsumexp + kQueries;
    const float* correction = delta + kQueries;

    float weights[kM][kN][4], gradients[kM][kN][4];
    multiply_transposed<T, HS, kExact>(weights, key, query_tile, head_size);
    if (kGeneral && factor == 1) {
      scale_scores(weights, scale_log2);
      if (p.mask.allowed || p.mask.bias)
        add_mask<T>(weights, p.mask, b * p.mask.batch + h * p.mask.head, row + warp_row, keys, p.mask.key, start,
                    queries, p.mask.query);
    }
    if (start < narrow_begin || start + kQueries > queries) keep_columns(weights, low, high, start);
    probabilities_of_columns<kCorrects<kGeneral, kExact>>(weights, factor, logsumexp, correction, has_bias);

    multiply_transposed<T, HS, kExact>(gradients, value, query_tile + Shape::kStageBytes, head_size);
    if constexpr (kGeneral)
      if (dropout.drops()) {
        for_dropped_transposed<kM, kN>(dropout, dropout.head_number(b * s.heads + h, b), row + warp_row, start,
                                       [&](int m, int n, int e) {
                                         gradients[m][n][e] = 0;
                                         weights[m][n][e] = -weights[m][n][e];
                                       });
      }
    gradients_of_columns<kGeneral>(gradients, weights, delta, keep_scale);
    add_product<T, HS, kExact>(dvalue, weights, query_tile + Shape::kStageBytes, warp_column);
    // This condition is always true. Without it, ptxas would compute both matmuls at once and run out of registers.
    if (!kExact || head_size > 0) add_product<T, HS, kExact>(dkey, gradients, query_tile, warp_column);
  }

  __syncthreads();  // store_rows() overwrites keys and values; if kParts is 2, two warps read the same rows
  float key_scale[kM][2], value_scale[kM][2];
  for_rows<kM>([&](int m, int r) {
    key_scale[m][r] = static_cast<float>(gradient_scale(p));
    value_scale[m][r] = keep_scale;
  });
  const int rows = keys - row - warp_row;
  store_rows<T, HS>(shared_bytes, warp_row, dkey, key_scale, warp_column, p.dkey.at(b, key_head, row + warp_row),
                    p.dkey.token, rows, head_size);
  store_rows<T, HS>(shared_bytes + Shape::kTileBytes, warp_row, dvalue, value_scale, warp_column,
                    p.dvalue.at(b, key_head, row + warp_row), p.dvalue.token, rows, head_size);
}

// ---- launches -------------------------------------------------------------------------------------------------------

template <typename T, int HS, bool kGeneral, bool kExact>
Status launch(const AttentionBackward<T>& p, Stream stream) {
  using Dquery = DqueryShape<T, HS, kExact>;
  using Dkey = DkeyShape<T, HS>;
  constexpr auto kDquery = attention_backward_dquery_mma_kernel<T, HS, kGeneral, kExact>;
  constexpr auto kDkey = attention_backward_dkey_mma_kernel<T, HS, kGeneral, kExact>;
  if (max_dynamic_shared_memory<kDquery>() < Dquery::kSharedBytes ||
      max_dynamic_shared_memory<kDkey>() < Dkey::kSharedBytes)
    return cudaErrorInvalidConfiguration;
  const AttentionSizes& s = p.sizes;
  const int64_t query_tiles = ceil_div(s.queries, Dquery::kRows), heads = s.batches * s.heads;
  const int64_t key_tiles = ceil_div(s.keys, Dkey::kRows), key_heads = s.batches * s.key_heads;
  const int64_t group_queries = s.queries * (s.heads / s.key_heads);
  const HeadTiles query_order = mma_order<T>(query_tiles, heads, s.keys, s.head_size, p.mask.causal);
  const HeadTiles key_order = mma_order<T>(key_tiles, key_heads, group_queries, s.head_size, false);
  kDquery<<<grid_size(query_tiles * heads), Dquery::kThreads, Dquery::kSharedBytes, stream>>>(p, query_order);
  kDkey<<<grid_size(key_tiles * key_heads), Dkey::kThreads, Dkey::kSharedBytes, stream>>>(p, key_order);
  return cudaGetLastError();
}

}  // namespace

template <typename T>
bool attention_backward_mma_supports(const AttentionBackward<T>& p) {
  return mma_supports<T>(p) && (sizeof(T) == 2 || p.tf32 || p.sizes.queries >= kFewestExact) && suits_chunks(p.dout) &&
         suits_chunks(p.dquery) && suits_chunks(p.dkey) && suits_chunks(p.dvalue) &&
         built_for_mma<attention_backward_dkey_mma_kernel<T, 64, true, false>>();
}

template <typename T>
int64_t attention_backward_mma_workspace(const AttentionSizes& s) {
  return 2 * s.batches * s.heads * s.queries * static_cast<int64_t>(sizeof(float));
}

template <typename T>
Status attention_backward_mma(const AttentionBackward<T>& p, Stream stream) {
  return for_mma_shape<T>(p.sizes.head_size, is_plain<T>(p), p.tf32, [&]<int HS, bool kGeneral, bool kExact>() {
    return launch<T, HS, kGeneral, kExact>(p, stream);
  });
}

#define INSTANTIATE(T)                                                           \
  template int64_t attention_backward_mma_workspace<T>(const AttentionSizes&);   \
  template bool attention_backward_mma_supports<T>(const AttentionBackward<T>&); \
  template Status attention_backward_mma<T>(const AttentionBackward<T>&, Stream);
INSTANTIATE(float)
INSTANTIATE(bfloat16)
INSTANTIATE(float16)
#undef INSTANTIATE

}  // namespace gptkernels::cuda
