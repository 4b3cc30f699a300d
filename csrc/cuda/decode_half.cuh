// What the two halves of a layer have in common, in the kernel that takes one sequence in 16 bits through all layers
// (decode_halves.cuh).
//
// A half has two products, with one cluster of 8 blocks for each 64 channels. Of the first product a cluster has some
// of the rows, and of the second the columns that these rows' results are multiplied with: so they stay in its shared
// memory. A half leaves a vector (C) of partial sums from each cluster, and the residual that they are to be added to.
// The next half adds them up.
//
// A block has the weights of both its halves in shared memory. When it has used some, it orders the next layer's in
// their place. Eight warps work; a ninth waits for the other clusters' sums.
#pragma once

#include <bit>

#include "../decode.h"
#include "common/hopper.cuh"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "decode_exchange.cuh"

namespace gptkernels::cuda {

constexpr int kHalfBlocks = 8;  // of a cluster
constexpr int kHalfWarps = 8;   // that work
constexpr int kHalfThreads = kHalfWarps * kWarp;

template <int C>
struct HalfShape {
  static constexpr int kChannels = 64;              // of a cluster
  static constexpr int kParts = C / kChannels;      // clusters
  static constexpr int kColumns = C / kHalfBlocks;  // of the residual, that a block adds up; and rows of its output
  static constexpr int kWords = (kParts + 1) * C;   // that a half leaves: partial sums, then the residual
  static_assert(C % (kWarp * kHalfBlocks) == 0 && kColumns <= 4 * kWarp);
};

constexpr int kMostLayers = 40;  // what a kernel's 4 KB of arguments have room for

template <typename T>
struct DecodeLayers {
  Decode<T> step;  // its layers are in the host's memory
  DecodeLayer<T> layers[kMostLayers];
  float* words;     // (2L, HalfShape::kWords): what the halves leave
  float* residual;  // (C): after the last layer
};
static_assert(sizeof(DecodeLayers<float>) <= 4096);

// A layer norm's weight and bias in shared memory.
template <typename T, int C>
struct NormShared {
  alignas(128) T weight[C];
  alignas(128) T bias[C];  // if there is one

  __host__ __device__ static unsigned bytes(const T* bias) { return (bias ? 2 : 1) * C * sizeof(T); }

#if GPTKERNELS_HOPPER
  // By one thread; the barrier has been told of so many bytes.
  __device__ void order(const T* from_weight, const T* from_bias, uint64_t* barrier) {
    bulk_load(weight, from_weight, sizeof(weight), barrier);
    if (from_bias) bulk_load(bias, from_bias, sizeof(bias), barrier);
  }
#endif
};

// ---- sums over lanes ------------------------------------------------------------------------------------------------

// Sums kCount values over kLanes neighbouring lanes. At each step a lane gives away half of its values, and so ends
// with one of the sums. Returns its index, which is kCount or more in a lane that has none.
template <int kLanes, int kCount>
__device__ int scatter_sums(const float (&values)[kCount], float& sum, int first = 0, int limit = kCount) {
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
    return scatter_sums<kOffset>(kept, sum, upper ? first + kHalf : first, upper ? limit : min(limit, first + kHalf));
  }
}

// Mean and sum of squared distances from it.
struct MeanAndSquares {
  float mean, squares;
};

// Of kCount values of each lane; the same bits in all lanes.
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

__device__ inline void await(uint64_t* barrier, unsigned parity) {
  mbarrier_wait(barrier, parity);
  __syncwarp();
}

// A barrier of the warps that work.
__device__ inline void workers_barrier() {
  random_delay();
  asm volatile("bar.sync 1, %0;" ::"n"(kHalfThreads) : "memory");
}

// The warp that waits for the other clusters' sums begins when this block's have been sent: what it asks for before
// that is in the way of what the blocks send.
__device__ inline void let_receive() {
  random_delay();
  asm volatile("bar.arrive 2, %0;" ::"n"(kHalfThreads + kWarp) : "memory");
}
__device__ inline void await_own_sums() {
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

// Two dependent chains of additions are half as long as one.
template <typename T>
__device__ float dot(const float (&x)[8], const Packed<T, 8>& weights) {
  float w[8], even = 0, odd = 0;
  widen(w, weights);
#pragma unroll
  for (int e = 0; e < 8; e += 2) even += x[e] * w[e], odd += x[e + 1] * w[e + 1];
  return even + odd;
}

// ---- the beginning of a half ----------------------------------------------------------------------------------------

// The residual before a half, by a warp of each block of a cluster: the block's columns, four a lane.
template <typename T, int C>
class HalfResidual {
  using Shape = HalfShape<C>;
  using Vector = float[C];

 public:
  // Of what the half before, half - 1, has left. Loads what no half writes.
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

  // To `words` by the first cluster, and to all blocks of this one: x and the barrier are variables that they all have.
  __device__ void sum_and_send(Vector& x, uint64_t* barrier) const {
    if (half_ > 0) await_own_sums();
    if (mine()) {
      const float4 sum = wait_for_sum();
#pragma unroll
      for (int rank = 0; rank < kHalfBlocks; ++rank)
        store_in_block(reinterpret_cast<float4*>(x + column_), sum, barrier, rank);
      if (blockIdx.x < kHalfBlocks) send(p_.words + half_ * Shape::kWords + Shape::kParts * C + column_, sum);
    }
    __syncwarp();
  }

  // By the first cluster.
  __device__ void sum_and_store(float* to) const {
    await_own_sums();
    if (blockIdx.x < kHalfBlocks && mine()) *reinterpret_cast<float4*>(to + column_) = wait_for_sum();
  }

 private:
  __device__ static bool mine() { return threadIdx.x % kWarp < Shape::kColumns / 4; }
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

// kRows rows of a weight, times the layer norm of x, by a warp. With the norm's weight g and bias b, the mean m and the
// deviation 1 / r,
//
//   sum w (g (x - m) r + b) = r (sum w g x - m sum w g) + sum w b,
//
// so that the product does not wait for the statistics, and two of the sums are known before x is. A lane ends with the
// result of row lane / 8.
template <typename T, int C, int kRows>
class NormalisedRows {
  static constexpr int kPacks = C / 8 / kWarp;  // of a row, that a lane has
  static_assert(C % (8 * kWarp) == 0 && kRows > 2 && kRows <= 4);

 public:
  // Rows are `stride` elements apart; the bias is that of row lane / 8.
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
    scatter_sums<kWarp>(slopes, slope_);
    scatter_sums<kWarp>(offsets, offset_);
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
    scatter_sums<kWarp>(products, product);
    return rsqrtf(moments.squares * (1.0f / C) + eps) * (product - moments.mean * slope_) + offset_;
  }

 private:
  // Lane l has the packs l, l + 32, ...
  __device__ static int own(int k) { return (static_cast<int>(threadIdx.x) % kWarp + k * kWarp) * 8; }

  Packed<T, 8> rows_[kRows][kPacks];
  Packed<T, 8> gain_[kPacks];
  float slope_, offset_;
};

#endif

}  // namespace gptkernels::cuda
