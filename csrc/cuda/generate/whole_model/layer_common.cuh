// Code shared by the two halves of a layer, attention (generate/whole_model/attention.cuh) and MLP
// (generate/whole_model/mlp.cuh), in the kernel that takes one 16-bit sequence through all layers
// (generate/whole_model/kernel.cuh).
//
// A half consists of two matrix-vector products and is computed by C / 64 clusters of 8 blocks. A cluster computes a
// slice of the first product's rows and uses it as the matching slice of the second product's columns, so the
// intermediate stays in the cluster's shared memory:
//
//   x        = residual after the previous half: its residual plus the partial sums of all clusters
//   slice    = f(first_weight[rows of the cluster] @ layernorm(x))            f: attention or GELU
//   partials = second_weight[:, columns of the cluster] @ slice               (C), one vector per cluster
//
// A half writes the partial sums of every cluster and the residual x to global memory
// (generate/whole_model/exchange.cuh); the next half adds them up.
//
// Every block keeps its part of both halves' weights in shared memory. As soon as a matrix has been used, the block
// issues the bulk load of the next layer's matrix into the same buffer. Eight warps compute; a ninth, the polling warp,
// waits for the partial sums of the other clusters.
#pragma once

#include <bit>

#include "../../../decode.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/ptx/sm90.cuh"
#include "exchange.cuh"

namespace gptkernels::cuda {

constexpr int kHalfBlocks = 8;  // blocks of a cluster
constexpr int kHalfWarps = 8;   // compute warps of a block
constexpr int kHalfThreads = kHalfWarps * kWarp;

template <int C>
struct HalfShape {
  static constexpr int kChannels = 64;              // channels of a cluster
  static constexpr int kParts = C / kChannels;      // clusters
  static constexpr int kColumns = C / kHalfBlocks;  // residual channels that a block sums, and output rows it computes
  static constexpr int kWords = (kParts + 1) * C;   // floats that a half writes: partial sums, then the residual
  static_assert(C % (kWarp * kHalfBlocks) == 0 && kColumns <= 4 * kWarp);
};

constexpr int kMaxLayers = 40;  // limited by the 4 KB of kernel arguments

template <typename T>
struct DecodeLayers {
  Decode<T> step;  // step.layers is a host pointer: use `layers`
  DecodeLayer<T> layers[kMaxLayers];
  float* words;     // (2L, HalfShape::kWords): exchange buffer, the output of every half
  float* residual;  // (C): the residual after the last layer
};
static_assert(sizeof(DecodeLayers<float>) <= 4096);

// A layer norm's weight and bias in shared memory.
template <typename T, int C>
struct NormShared {
  alignas(128) T weight[C];
  alignas(128) T bias[C];  // unused if the model has no biases

  __host__ __device__ static unsigned bytes(const T* bias) { return (bias ? 2 : 1) * C * sizeof(T); }

#if GPTKERNELS_HOPPER
  // Issues the bulk loads of weight and bias. Called by one thread, after it has announced bytes(from_bias) to the
  // barrier.
  __device__ void order(const T* from_weight, const T* from_bias, uint64_t* barrier) {
    bulk_load(weight, from_weight, sizeof(weight), barrier);
    if (from_bias) bulk_load(bias, from_bias, sizeof(bias), barrier);
  }
#endif
};

// ---- sums over lanes ------------------------------------------------------------------------------------------------

// Reduce-scatter of kCount values over kLanes neighbouring lanes. At each step a lane exchanges half of its values with
// a partner, so it ends with one complete sum. Returns the index of that sum; kCount or more if the lane has none.
template <int kLanes, int kCount>
__device__ int reduce_scatter(const float (&values)[kCount], float& sum, int first = 0, int limit = kCount) {
  if constexpr (kCount == 1) {
    sum = warp_reduce<Sum, kLanes>(values[0]);
    return first < limit ? first : 1 << 20;
  } else {
    constexpr int kHalf = (kCount + 1) / 2, kOffset = kLanes / 2;
    static_assert(kLanes > 1);
    const bool upper = threadIdx.x & kOffset;
    float kept[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float high = i + kHalf < kCount ? values[i + kHalf < kCount ? i + kHalf : 0] : 0.0f;
      kept[i] = (upper ? high : values[i]) + __shfl_xor_sync(~0u, upper ? values[i] : high, kOffset);
    }
    return reduce_scatter<kOffset>(kept, sum, upper ? first + kHalf : first, upper ? limit : min(limit, first + kHalf));
  }
}

// The mean, and the sum of squared deviations from it.
struct MeanAndSquares {
  float mean, squares;
};

// Computes both over all lanes' values, kCount per lane; all lanes get the same bits. The lanes' moments are merged by
// Chan's parallel formula.
template <int kCount>
__device__ MeanAndSquares mean_and_squares(const float (&x)[kCount]) {
  constexpr int kChains = 4;
  static_assert(kCount % kChains == 0);
  float sums[kChains] = {}, squares[kChains] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i % kChains] += x[i];
  const float mean = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * (1.0f / kCount);
#pragma unroll
  for (int i = 0; i < kCount; ++i) squares[i % kChains] += (x[i] - mean) * (x[i] - mean);
  MeanAndSquares all = {mean, (squares[0] + squares[1]) + (squares[2] + squares[3])};
  float half_count = 0.5f * kCount;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const float other_mean = __shfl_xor_sync(~0u, all.mean, offset);
    const float other_squares = __shfl_xor_sync(~0u, all.squares, offset);
    const float distance = all.mean - other_mean;
    all.squares = (all.squares + other_squares) + distance * distance * half_count;
    all.mean = 0.5f * (all.mean + other_mean);
    half_count *= 2;
  }
  return all;
}

#if GPTKERNELS_HOPPER

// Waits until the mbarrier phase of this parity has completed. Called by a whole warp.
__device__ inline void await(uint64_t* barrier, unsigned parity) {
  mbarrier_wait(barrier, parity);
  __syncwarp();
}

// A barrier of the compute warps.
__device__ inline void workers_barrier() {
  random_delay();
  asm volatile("bar.sync 1, %0;" ::"n"(kHalfThreads) : "memory");
}

// The polling warp starts to poll only after the compute warps have sent this block's partial sums: earlier polling
// would delay these stores. The compute warps call the first function, which does not block; the polling warp calls the
// second, which waits for them.
__device__ inline void signal_sums_sent() {
  random_delay();
  asm volatile("bar.arrive 2, %0;" ::"n"(kHalfThreads + kWarp) : "memory");
}
__device__ inline void wait_until_sums_sent() {
  random_delay();
  asm volatile("bar.sync 2, %0;" ::"n"(kHalfThreads + kWarp) : "memory");
}

template <int N, typename T>
__device__ void load_floats(float (&to)[N], const T* from) {
  constexpr int kStep = N < kPack<T> ? N : kPack<T>;
#pragma unroll
  for (int i = 0; i < N; i += kStep) {
    float wide[kStep];
    load_wide<kStep>(wide, from + i);
#pragma unroll
    for (int k = 0; k < kStep; ++k) to[i + k] = wide[k];
  }
}

// The dot product of eight elements, by two chains of additions: each is half as long as a single one.
template <typename T>
__device__ float dot(const float (&x)[8], const Packed<T, 8>& weights) {
  float w[8], even = 0, odd = 0;
  widen(w, weights);
#pragma unroll
  for (int e = 0; e < 8; e += 2) even += x[e] * w[e], odd += x[e + 1] * w[e + 1];
  return even + odd;
}

// ---- the start of a half --------------------------------------------------------------------------------------------

// Computes the residual at the start of a half. The polling warp of each block sums the block's kColumns channels, four
// per lane, and sends them to all blocks of its cluster.
template <typename T, int C>
class HalfResidual {
  using Shape = HalfShape<C>;
  using Vector = float[C];

 public:
  // `half` counts both halves of all layers, from 0. The constructor loads what no half writes: the embeddings for half
  // 0, otherwise the bias of half - 1.
  __device__ HalfResidual(const DecodeLayers<T>& p, int position, int half) : p_(p), half_(half) {
    column_ = static_cast<int>(cluster_rank()) * Shape::kColumns + static_cast<int>(threadIdx.x) % kWarp * 4;
    if (!mine()) return;
    if (half == 0) {
      const Decode<T>& step = p.step;
      const int64_t token = min(max(step.sequences[position], int64_t{0}), step.vocabulary - 1);
      known_ = wide(step.wte + token * C + column_) + wide(step.wpe + int64_t{position} * C + column_);
    } else if (const T* bias = half % 2 ? p.layers[half / 2].proj_bias : p.layers[half / 2 - 1].fcproj_bias) {
      known_ = wide(bias + column_);
    }
  }

  // Waits for the outputs of half - 1 and stores the new residual in x of every block of the cluster (x and barrier are
  // shared variables with the same address in each). The first cluster also writes it to the exchange buffer.
  __device__ void sum_and_send(Vector& x, uint64_t* barrier) const {
    if (half_ > 0) wait_until_sums_sent();
    if (mine()) {
      const float4 sum = wait_for_sum();
#pragma unroll
      for (int rank = 0; rank < kHalfBlocks; ++rank)
        store_in_block(reinterpret_cast<float4*>(x + column_), sum, barrier, rank);
      if (blockIdx.x < kHalfBlocks) send(p_.words + half_ * Shape::kWords + Shape::kParts * C + column_, sum);
    }
    __syncwarp();
  }

  // After the last layer: the first cluster writes the final residual to `to` (C).
  __device__ void sum_and_store(float* to) const {
    wait_until_sums_sent();
    if (blockIdx.x < kHalfBlocks && mine()) *reinterpret_cast<float4*>(to + column_) = wait_for_sum();
  }

 private:
  // True if the lane has four of the block's channels.
  __device__ static bool mine() { return threadIdx.x % kWarp < Shape::kColumns / 4; }
  // Returns the lane's four channels of the residual.
  __device__ float4 wait_for_sum() const {
    if (half_ == 0) return known_;
    return known_ + receive_sum<Shape::kParts + 1>(p_.words + (half_ - 1) * Shape::kWords + column_, C);
  }
  __device__ static float4 wide(const T* from) {
    float to[4];
    load_wide<4>(to, from);
    return {to[0], to[1], to[2], to[3]};
  }

  const DecodeLayers<T>& p_;
  const int half_;
  int column_;
  float4 known_ = {};
};

// The product of kRows rows of a weight w with layernorm(x), computed by one warp. With the norm's weight g and bias b,
// mean m and reciprocal standard deviation r,
//
//   sum w (g (x - m) r + b) = r (sum w g x - m sum w g) + sum w b.
//
// So the product does not wait for the statistics, and the last two sums are computed before x arrives. Each lane ends
// with the result of row lane / 8.
template <typename T, int C, int kRows>
class NormalisedRows {
  static constexpr int kPacks = C / 8 / kWarp;  // packs of a row per lane
  static_assert(C % (8 * kWarp) == 0 && kRows > 2 && kRows <= 4);

 public:
  // Loads the rows, which are `stride` elements apart, and the norm. `bias` is the product's bias of row lane / 8.
  __device__ void load(const T* rows, int stride, const NormShared<T, C>& norm, bool has_bias, float bias) {
    float slopes[kRows] = {}, offsets[kRows] = {};
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int at = own(k);
      gain_[k] = cuda::load<8>(norm.weight + at);
      float g[8], b[8] = {};
      widen(g, gain_[k]);
      if (has_bias) load_floats(b, norm.bias + at);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        rows_[i][k] = cuda::load<8>(rows + i * stride + at);
        slopes[i] += dot(g, rows_[i][k]);
        offsets[i] += dot(b, rows_[i][k]);
      }
    }
    reduce_scatter<kWarp>(slopes, slope_);
    reduce_scatter<kWarp>(offsets, offset_);
    offset_ += bias;
  }

  __device__ float multiply(const float (&vector)[C], float eps) const {
    float x[kPacks * 8], products[kRows] = {};
#pragma unroll
    for (int k = 0; k < kPacks; ++k) load_floats(reinterpret_cast<float (&)[8]>(x[k * 8]), vector + own(k));
    const MeanAndSquares moments = mean_and_squares(x);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float scaled[8];
      widen(scaled, gain_[k]);
#pragma unroll
      for (int e = 0; e < 8; ++e) scaled[e] *= x[k * 8 + e];
#pragma unroll
      for (int i = 0; i < kRows; ++i) products[i] += dot(scaled, rows_[i][k]);
    }
    float product;
    reduce_scatter<kWarp>(products, product);
    return rsqrtf(moments.squares * (1.0f / C) + eps) * (product - moments.mean * slope_) + offset_;
  }

 private:
  // The first element of the lane's pack k: lane l holds the packs l, l + 32, ...
  __device__ static int own(int k) { return (static_cast<int>(threadIdx.x) % kWarp + k * kWarp) * 8; }

  Packed<T, 8> rows_[kRows][kPacks];
  Packed<T, 8> gain_[kPacks];
  float slope_, offset_;
};

#endif

}  // namespace gptkernels::cuda
