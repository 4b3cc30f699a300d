// Decoding attention: one query per attention head over the keys and values in the cache.
//
// decode_attention_kernel (sm_90, 16-byte aligned, HS equal to 4, 8, 16 or 32 packs of 16 bytes) runs a cluster of 8
// blocks per attention head. A pack is loaded by one lane, so a team of HS / pack lanes loads a key; the teams of the
// cluster take the keys round robin and keep an online softmax each. The partial softmaxes are then merged within the
// warp by shuffles, within the block through shared memory, and within the cluster by the first block.
//
// decode_attention_simple_kernel handles every other case with one block per attention head and one key per warp.
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
  const int64_t* lengths;        // (B): number of keys, including the newest
  int64_t batch;
  int64_t heads;
  int64_t capacity;
  int64_t head_size;
};

constexpr int kDecodeAttentionThreads = 128;
constexpr int kDecodeAttentionWarps = kDecodeAttentionThreads / kWarp;

// The state of an online softmax: the largest score so far and the sum of exp(score - maximum).
template <typename T>
struct RunningSoftmax {
  using A = accumulate_t<T>;
  A maximum = -INFINITY;
  A sum = 0;

  // Merges another softmax into this one. Sums relative to the previous maximum must be multiplied by `scale`, the
  // other's by `other_scale`.
  __device__ void join(A other_maximum, A other_sum, A& scale, A& other_scale) {
    const A largest = fmax(maximum, other_maximum);
    const A origin = largest == -INFINITY ? A(0) : largest;
    scale = exp_for<T>(maximum - origin);
    other_scale = exp_for<T>(other_maximum - origin);
    maximum = largest;
    sum = sum * scale + other_sum * other_scale;
  }
};

// ---- the simple kernel: one block per attention head, one key per warp ----------------------------------------------

template <typename T>
__global__ void __launch_bounds__(kDecodeAttentionThreads)
    decode_attention_simple_kernel(const __grid_constant__ DecodeAttention<T> p) {
  using A = accumulate_t<T>;
  constexpr int kItems = kDecodeMaxHeadSize / kWarp;
  __shared__ A shared_out[kDecodeAttentionWarps][kDecodeMaxHeadSize];
  __shared__ A shared_maximum[kDecodeAttentionWarps], shared_sum[kDecodeAttentionWarps];
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
  for (int k = 0; k < kItems; ++k) shared_out[warp][lane + k * kWarp] = out[k];
  shared_maximum[warp] = softmax.maximum;
  shared_sum[warp] = softmax.sum;
  __syncthreads();
  for (int i = threadIdx.x; i < p.head_size; i += kDecodeAttentionThreads) {
    RunningSoftmax<T> all;
    A total = 0;
    for (int w = 0; w < kDecodeAttentionWarps; ++w) {
      A rescale, weight;
      all.join(shared_maximum[w], shared_sum[w], rescale, weight);
      total = total * rescale + shared_out[w][i] * weight;
    }
    p.out[row * p.head_size + i] = total / all.sum;
  }
}

// ---- the fast kernel: one cluster of blocks per attention head ------------------------------------------------------

constexpr int kDecodeSplits = 8;

// __cluster_dims__ does not compile below sm_90. There the kernel is empty and is never launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define DECODE_CLUSTER
#else
#define DECODE_CLUSTER __cluster_dims__(kDecodeSplits, 1, 1)
#endif

// A team of kLanes lanes shares a key, one pack per lane. The cluster reads kAtOnce keys at a time; key j belongs to
// team j % kAtOnce.
template <typename T, int kLanes>
struct DecodeAttentionShape {
  static constexpr int kVec = kPack<T>;
  static constexpr int kHeadSize = kLanes * kVec;
  static constexpr int kTeams = kDecodeAttentionThreads / kLanes;  // per block
  static constexpr int kAtOnce = kTeams * kDecodeSplits;
  static constexpr int kDepth = 8;  // keys in flight per team
};

// The partial softmax of one block, stored in the shared memory of the cluster's first block.
template <typename T, int kHeadSize>
struct DecodeAttentionPart {
  accumulate_t<T> out[kHeadSize];
  accumulate_t<T> maximum;
  accumulate_t<T> sum;
};

// Stores 4 bytes to the same shared variable of block `rank` of the cluster.
template <typename V>
__device__ void store_remote(V* shared, V value, unsigned rank) {
  static_assert(sizeof(V) == 4);
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(in_block(shared, rank)),
               "r"(reinterpret_cast<const uint32_t&>(value))
               : "memory");
}

// The keys and values of earlier tokens were written before this step, so the first ones are loaded before waiting for
// the previous kernel. Only the query and the newest key and value come from that kernel.
template <typename T, int kLanes>
__global__ void DECODE_CLUSTER __launch_bounds__(kDecodeAttentionThreads)
    decode_attention_kernel(const __grid_constant__ DecodeAttention<T> p) {
#if __CUDA_ARCH__ >= 900
  using A = accumulate_t<T>;
  using Shape = DecodeAttentionShape<T, kLanes>;
  constexpr int kVec = Shape::kVec, kDepth = Shape::kDepth, kHeadSize = Shape::kHeadSize;
  __shared__ A shared_out[kDecodeAttentionWarps][kHeadSize];
  __shared__ A shared_maximum[kDecodeAttentionWarps], shared_sum[kDecodeAttentionWarps];
  __shared__ DecodeAttentionPart<T, kHeadSize> parts[kDecodeSplits];
  let_next_kernel_start();
  cluster_arrive();

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int split = static_cast<int>(cluster_rank());
  const int64_t row = blockIdx.x / kDecodeSplits, position = min(p.lengths[row / p.heads], p.capacity) - 1;
  const int own = threadIdx.x % kLanes * kVec;
  const int64_t first = threadIdx.x / kLanes * kDecodeSplits + split;  // the team's first key
  const T* keys = p.keys + row * p.capacity * kHeadSize + own;
  const T* values = p.values + row * p.capacity * kHeadSize + own;

  Packed<T, kVec> key[kDepth], value[kDepth];
  const auto load_keys = [&](int64_t start, int64_t end) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int64_t j = start + d * Shape::kAtOnce;
      key[d] = value[d] = {};
      if (j < end) {
        key[d] = load<kVec>(keys + j * kHeadSize);
        value[d] = load<kVec>(values + j * kHeadSize);
      }
    }
  };
  load_keys(first, position);
  wait_for_previous_kernel();

  A query[kVec], out[kVec] = {};
#pragma unroll
  for (int e = 0; e < kVec; ++e) query[e] = p.query[row * kHeadSize + own + e];
#pragma unroll
  for (int d = 0; d < kDepth; ++d)
    if (first + d * Shape::kAtOnce == position) {
      key[d] = load<kVec>(keys + position * kHeadSize);
      value[d] = load<kVec>(values + position * kHeadSize);
    }
  const A scale = A(1) / sqrt(static_cast<A>(kHeadSize));
#pragma unroll
  for (int e = 0; e < kVec; ++e) query[e] *= scale;

  RunningSoftmax<T> softmax;
  for (int64_t start = first; start - first <= position; start += kDepth * Shape::kAtOnce) {
    if (start != first) load_keys(start, position + 1);
    A scores[kDepth], largest = -INFINITY;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      A wide[kVec];
      widen(wide, key[d]);
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
      widen(wide, value[d]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) out[e] += weight * wide[e];
    }
  }

  // Merge the teams of a warp, then the warps of the block, then the blocks of the cluster.
#pragma unroll
  for (int offset = kLanes; offset < kWarp; offset *= 2) {
    A scale_own, scale_other;
    const A other_maximum = __shfl_xor_sync(~0u, softmax.maximum, offset);
    const A other_sum = __shfl_xor_sync(~0u, softmax.sum, offset);
    // Both lanes merge in the same order (lower lane first), so that they get the same bits.
    RunningSoftmax<T> lower = lane & offset ? RunningSoftmax<T>{other_maximum, other_sum} : softmax;
    const RunningSoftmax<T> upper = lane & offset ? softmax : RunningSoftmax<T>{other_maximum, other_sum};
    lower.join(upper.maximum, upper.sum, scale_own, scale_other);
    softmax = lower;
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const A other = __shfl_xor_sync(~0u, out[e], offset);
      out[e] = lane & offset ? other * scale_own + out[e] * scale_other : out[e] * scale_own + other * scale_other;
    }
  }
  if (lane < kLanes) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) shared_out[warp][own + e] = out[e];
    shared_maximum[warp] = softmax.maximum;
    shared_sum[warp] = softmax.sum;
  }
  __syncthreads();
  cluster_wait();  // all blocks have started, so their shared memory may be written
  for (int i = threadIdx.x; i < kHeadSize; i += kDecodeAttentionThreads) {
    RunningSoftmax<T> all;
    A total = 0;
#pragma unroll
    for (int w = 0; w < kDecodeAttentionWarps; ++w) {
      A rescale, weight;
      all.join(shared_maximum[w], shared_sum[w], rescale, weight);
      total = total * rescale + shared_out[w][i] * weight;
    }
    store_remote(&parts[split].out[i], total, 0);
    if (i == 0) {
      store_remote(&parts[split].maximum, all.maximum, 0);
      store_remote(&parts[split].sum, all.sum, 0);
    }
  }
  cluster_barrier();
  if (split != 0) return;
  for (int i = threadIdx.x; i < kHeadSize; i += kDecodeAttentionThreads) {
    RunningSoftmax<T> all;
    A total = 0;
#pragma unroll
    for (int s = 0; s < kDecodeSplits; ++s) {
      A rescale, weight;
      all.join(parts[s].maximum, parts[s].sum, rescale, weight);
      total = total * rescale + parts[s].out[i] * weight;
    }
    p.out[row * kHeadSize + i] = total / all.sum;
  }
#endif
}

// ---- the launch -----------------------------------------------------------------------------------------------------

// Launches the fast kernel if HS is one of the listed numbers of packs. Returns whether it did.
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
