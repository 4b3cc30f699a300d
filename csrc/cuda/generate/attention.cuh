// Decoding attention: one query per attention head over the keys and values in the cache.
//
// decode_attention_kernel needs sm_90 or later, 16-byte alignment, and an HS of 4, 8, 16 or 32 packs, and does not
// support float64. A cluster of 8 thread blocks processes an attention head. A team of lanes loads whole keys, one pack
// per lane; the keys are dealt to the cluster's teams in turn.
//
//   each team, with kDepth keys and values in registers:
//     load the first keys and values
//     wait for the previous kernel; load the query, and the newest key and value
//     for each kDepth of the team's keys and values:
//       score(j) = query . key(j) / sqrt(HS)                summed over the team's lanes by shuffles
//       new maximum = max(maximum, scores);  scale sum and out by exp(maximum - new maximum)
//       sum += exp(score(j) - new maximum);  out += exp(score(j) - new maximum) * value(j)
//   each warp: merge the teams by shuffles
//   each thread block: merge the warps through shared memory, write the result to the first thread block
//   the first thread block: merge the thread blocks; store out / sum
//
// decode_attention_simple_kernel computes all other cases.
#pragma once

#include "../../decode.h"
#include "cuda/common/approximate.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/ptx/sm90.cuh"

namespace gptkernels::cuda {

template <typename T>
struct DecodeAttention {
  accumulate_t<T>* out;          // (B, NH, HS)
  const accumulate_t<T>* query;  // (B, NH, HS)
  const T* keys;                 // (B, NH, capacity, HS)
  const T* values;               // (B, NH, capacity, HS)
  const int64_t* lengths;        // (B), including the newest token
  int64_t batch;
  int64_t heads;
  int64_t capacity;
  int64_t head_size;
};

constexpr int kDecodeAttentionThreads = 128;
constexpr int kDecodeAttentionWarps = kDecodeAttentionThreads / kWarp;

template <typename T>
struct RunningSoftmax {
  using A = accumulate_t<T>;
  A maximum = -INFINITY;
  A sum = 0;

  // The caller must multiply its weighted sum of values by `scale`, and that of the other softmax by `other_scale`.
  __device__ void join(A other_maximum, A other_sum, A& scale, A& other_scale) {
    const A largest = fmax(maximum, other_maximum);
    const A origin = largest == -INFINITY ? A(0) : largest;
    scale = exp_for<T>(maximum - origin);
    other_scale = exp_for<T>(other_maximum - origin);
    maximum = largest;
    sum = sum * scale + other_sum * other_scale;
  }
};

template <typename T, int kParts, int kHeadSize>
struct DecodeAttentionParts {
  accumulate_t<T> out[kParts][kHeadSize];
  accumulate_t<T> maximum[kParts], sum[kParts];
};

template <typename T, int kParts, int kHeadSize>
__device__ __forceinline__ accumulate_t<T> merge_parts(RunningSoftmax<T>& all,
                                                       const DecodeAttentionParts<T, kParts, kHeadSize>& parts, int i) {
  accumulate_t<T> out = 0;
  for (int k = 0; k < kParts; ++k) {
    accumulate_t<T> rescale, weight;
    all.join(parts.maximum[k], parts.sum[k], rescale, weight);
    out = out * rescale + parts.out[k][i] * weight;
  }
  return out;
}

// ---- the simple kernel: one thread block per attention head, one key per warp ---------------------------------------

template <typename T>
__global__ void __launch_bounds__(kDecodeAttentionThreads)
    decode_attention_simple_kernel(const __grid_constant__ DecodeAttention<T> p) {
  using A = accumulate_t<T>;
  constexpr int kItems = kDecodeMaxHeadSize / kWarp;
  __shared__ DecodeAttentionParts<T, kDecodeAttentionWarps, kDecodeMaxHeadSize> parts;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t row = blockIdx.x, count = min(p.lengths[row / p.heads], p.capacity);
  const T* keys = p.keys + row * p.capacity * p.head_size;
  const T* values = p.values + row * p.capacity * p.head_size;
  const A scale = A(1) / sqrt(static_cast<A>(p.head_size));
  A query[kItems] = {}, out[kItems] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k)
    if (lane + k * kWarp < p.head_size) query[k] = p.query[row * p.head_size + lane + k * kWarp] * scale;
  RunningSoftmax<T> softmax;
  for (int64_t j = warp; j < count; j += kDecodeAttentionWarps) {
    A score = 0;
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      if (const int i = lane + k * kWarp; i < p.head_size) score += query[k] * widen(keys[j * p.head_size + i]);
    A rescale, weight;
    softmax.join(warp_reduce<Sum>(score), A(1), rescale, weight);
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      if (const int i = lane + k * kWarp; i < p.head_size)
        out[k] = out[k] * rescale + weight * widen(values[j * p.head_size + i]);
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) parts.out[warp][lane + k * kWarp] = out[k];
  parts.maximum[warp] = softmax.maximum;
  parts.sum[warp] = softmax.sum;
  __syncthreads();
  for (int i = threadIdx.x; i < p.head_size; i += kDecodeAttentionThreads) {
    RunningSoftmax<T> all;
    const A total = merge_parts(all, parts, i);
    p.out[row * p.head_size + i] = total / all.sum;
  }
}

// ---- the fast kernel: one cluster of thread blocks per attention head -----------------------------------------------

constexpr int kDecodeSplits = 8;  // cluster size

// __cluster_dims__ does not compile below sm_90, where the kernel is empty and never launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define DECODE_CLUSTER
#else
#define DECODE_CLUSTER __cluster_dims__(kDecodeSplits, 1, 1)
#endif

// Key j belongs to team j % kAtOnce of the cluster.
template <typename T, int kLanes>
struct DecodeAttentionShape {
  static constexpr int kVec = kPack<T>;
  static constexpr int kHeadSize = kLanes * kVec;
  static constexpr int kTeams = kDecodeAttentionThreads / kLanes;  // per thread block
  static constexpr int kAtOnce = kTeams * kDecodeSplits;
  static constexpr int kDepth = 8;  // keys in flight per team
};

template <typename T, int kLanes>
struct DecodeKeys {
  using Shape = DecodeAttentionShape<T, kLanes>;
  Packed<T, Shape::kVec> key[Shape::kDepth], value[Shape::kDepth];
};

#if GPTKERNELS_HOPPER

template <typename V>
__device__ void store_remote(V* shared, V value, unsigned rank) {
  static_assert(sizeof(V) == 4);
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(in_block(shared, rank)),
               "r"(reinterpret_cast<const uint32_t&>(value))
               : "memory");
}

// Loads the keys and values start, start + kAtOnce, ...; those from `end` on become 0.
template <typename T, int kLanes>
__device__ __forceinline__ void load_keys(DecodeKeys<T, kLanes>& loaded, const T* keys, const T* values, int64_t start,
                                          int64_t end) {
  using Shape = DecodeAttentionShape<T, kLanes>;
#pragma unroll
  for (int d = 0; d < Shape::kDepth; ++d) {
    const int64_t j = start + d * Shape::kAtOnce;
    loaded.key[d] = loaded.value[d] = {};
    if (j < end) {
      loaded.key[d] = load<Shape::kVec>(keys + j * Shape::kHeadSize);
      loaded.value[d] = load<Shape::kVec>(values + j * Shape::kHeadSize);
    }
  }
}

template <typename T, int kLanes>
__device__ __forceinline__ void add_keys(RunningSoftmax<T>& softmax, accumulate_t<T> (&out)[kPack<T>],
                                         const accumulate_t<T> (&query)[kPack<T>], const DecodeKeys<T, kLanes>& loaded,
                                         int64_t start, int64_t position) {
  using A = accumulate_t<T>;
  using Shape = DecodeAttentionShape<T, kLanes>;
  constexpr int kVec = Shape::kVec, kDepth = Shape::kDepth;
  A scores[kDepth], largest = -INFINITY;
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    A wide[kVec];
    widen(wide, loaded.key[d]);
    scores[d] = 0;
#pragma unroll
    for (int e = 0; e < kVec; ++e) scores[d] += query[e] * wide[e];
  }
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    scores[d] = warp_reduce<Sum, kLanes>(scores[d]);
    if (start + d * Shape::kAtOnce > position) scores[d] = -INFINITY;
    largest = fmax(largest, scores[d]);
  }
  A rescale, unused;
  softmax.join(largest, A(0), rescale, unused);
  const A origin = softmax.maximum == -INFINITY ? A(0) : softmax.maximum;
#pragma unroll
  for (int e = 0; e < kVec; ++e) out[e] *= rescale;
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    const A weight = exp_for<T>(scores[d] - origin);
    softmax.sum += weight;
    A wide[kVec];
    widen(wide, loaded.value[d]);
#pragma unroll
    for (int e = 0; e < kVec; ++e) out[e] += weight * wide[e];
  }
}

template <typename T, int kLanes>
__device__ __forceinline__ void merge_teams(RunningSoftmax<T>& softmax, accumulate_t<T> (&out)[kPack<T>], int lane) {
  using A = accumulate_t<T>;
#pragma unroll
  for (int offset = kLanes; offset < kWarp; offset *= 2) {
    A scale_lower, scale_upper;
    const A other_maximum = __shfl_xor_sync(~0u, softmax.maximum, offset);
    const A other_sum = __shfl_xor_sync(~0u, softmax.sum, offset);
    // Both lanes merge in the same order (lower lane first), so that they get the same bits.
    RunningSoftmax<T> lower = lane & offset ? RunningSoftmax<T>{other_maximum, other_sum} : softmax;
    const RunningSoftmax<T> upper = lane & offset ? softmax : RunningSoftmax<T>{other_maximum, other_sum};
    lower.join(upper.maximum, upper.sum, scale_lower, scale_upper);
    softmax = lower;
#pragma unroll
    for (int e = 0; e < kPack<T>; ++e) {
      const A other = __shfl_xor_sync(~0u, out[e], offset);
      out[e] = lane & offset ? other * scale_lower + out[e] * scale_upper : out[e] * scale_lower + other * scale_upper;
    }
  }
}

#endif

template <typename T, int kLanes>
__global__ void DECODE_CLUSTER __launch_bounds__(kDecodeAttentionThreads)
    decode_attention_kernel(const __grid_constant__ DecodeAttention<T> p) {
#if GPTKERNELS_HOPPER
  using A = accumulate_t<T>;
  using Shape = DecodeAttentionShape<T, kLanes>;
  constexpr int kVec = Shape::kVec, kHeadSize = Shape::kHeadSize;
  __shared__ DecodeAttentionParts<T, kDecodeAttentionWarps, kHeadSize> warp_parts;
  __shared__ DecodeAttentionParts<T, kDecodeSplits, kHeadSize> block_parts;  // used in the first thread block
  let_next_kernel_start();
  cluster_arrive();

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int split = static_cast<int>(cluster_rank());
  const int64_t row = blockIdx.x / kDecodeSplits, position = min(p.lengths[row / p.heads], p.capacity) - 1;
  const int column = threadIdx.x % kLanes * kVec;                      // of the lane's pack
  const int64_t first = threadIdx.x / kLanes * kDecodeSplits + split;  // the team's first key
  const T* keys = p.keys + row * p.capacity * kHeadSize + column;
  const T* values = p.values + row * p.capacity * kHeadSize + column;

  // All keys and values but the newest are older than this decoding step, so they are loaded before the wait.
  DecodeKeys<T, kLanes> loaded;
  load_keys(loaded, keys, values, first, position);
  wait_for_previous_kernel();
  A query[kVec], out[kVec] = {};
#pragma unroll
  for (int e = 0; e < kVec; ++e) query[e] = p.query[row * kHeadSize + column + e];
#pragma unroll
  for (int d = 0; d < Shape::kDepth; ++d)
    if (first + d * Shape::kAtOnce == position) {
      loaded.key[d] = load<kVec>(keys + position * kHeadSize);
      loaded.value[d] = load<kVec>(values + position * kHeadSize);
    }
  const A scale = A(1) / sqrt(static_cast<A>(kHeadSize));
#pragma unroll
  for (int e = 0; e < kVec; ++e) query[e] *= scale;

  RunningSoftmax<T> softmax;
  for (int64_t start = first; start - first <= position; start += Shape::kDepth * Shape::kAtOnce) {
    if (start != first) load_keys(loaded, keys, values, start, position + 1);
    add_keys(softmax, out, query, loaded, start, position);
  }

  merge_teams<T, kLanes>(softmax, out, lane);
  if (lane < kLanes) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) warp_parts.out[warp][column + e] = out[e];
    warp_parts.maximum[warp] = softmax.maximum;
    warp_parts.sum[warp] = softmax.sum;
  }
  __syncthreads();
  cluster_wait();  // all thread blocks have started, so their shared memory may be written
  for (int i = threadIdx.x; i < kHeadSize; i += kDecodeAttentionThreads) {
    RunningSoftmax<T> all;
    const A total = merge_parts(all, warp_parts, i);
    store_remote(&block_parts.out[split][i], total, 0);
    if (i == 0) {
      store_remote(&block_parts.maximum[split], all.maximum, 0);
      store_remote(&block_parts.sum[split], all.sum, 0);
    }
  }
  cluster_barrier();
  if (split != 0) return;
  for (int i = threadIdx.x; i < kHeadSize; i += kDecodeAttentionThreads) {
    RunningSoftmax<T> all;
    const A total = merge_parts(all, block_parts, i);
    p.out[row * kHeadSize + i] = total / all.sum;
  }
#endif
}

// ---- the launch -----------------------------------------------------------------------------------------------------

template <typename T, int... kLanes>
bool launch_decode_attention(const DecodeAttention<T>& p, Stream stream) {
  const auto launch = [&](auto lanes) {
    constexpr auto kKernel = decode_attention_kernel<T, decltype(lanes)::value>;
    if (p.head_size != lanes * kPack<T> || !built_for_hopper<kKernel>()) return false;
    launch_early<kKernel>(grid_size(p.batch * p.heads * kDecodeSplits), kDecodeAttentionThreads, 0, stream, p);
    return true;
  };
  return (launch(Constant<kLanes>()) || ...);
}

template <typename T>
Status decode_attention(const DecodeAttention<T>& p, Stream stream) {
  bool launched = false;
  if constexpr (!std::is_same_v<T, double>)
    if (can_vectorize<T>(p.head_size, p.keys, p.values)) launched = launch_decode_attention<T, 4, 8, 16, 32>(p, stream);
  if (!launched)
    launch_early<decode_attention_simple_kernel<T>>(grid_size(p.batch * p.heads), kDecodeAttentionThreads, 0, stream,
                                                    p);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
