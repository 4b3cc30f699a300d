// Products of a matrix and a few vectors, out (B, M) = x (B, K) @ weight (M, K)^T, at the memory's rate: what follows
// the product is an Epilogue, and a layer norm may come before it. x and all sums are float32 (float64 for float64).
//
// The weights do not depend on the kernels before, so a thread loads its first ones before it waits for these
// (programmatic dependent launch): the memory works on while the previous kernel ends and this one begins.
#pragma once

#include <algorithm>
#include <utility>

#include "../decode.h"
#include "common/launch.cuh"
#include "common/moments.cuh"
#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "gelu.cuh"

namespace gptkernels::cuda {

struct DecodeProductSizes {
  int64_t batch;  // B
  int64_t rows;   // M
  int64_t inner;  // K
};

// What is done with the sums.
template <typename T>
struct DecodeEpilogue {
  using A = accumulate_t<T>;
  enum Kind { kQueryKeyValue, kGeluTanh, kGeluErf, kAdd, kLogits };
  Kind kind;
  A* out;                            // (B, M): takes GELU of the sums, or has them added; of the query only (B, C)
  T* narrow_out;                     // logits (B, M), or the layer's keys and values (2, B, NH, capacity, HS)
  const int64_t* lengths = nullptr;  // (B), with the newest token; for keys and values, as are the sizes
  int64_t width = 0;                 // C
  int64_t head_size = 0;             // HS
  int64_t capacity = 0;

  // What is read besides the sum, before it is known.
  struct Early {
    A value;
    int64_t position;
  };
  __device__ Early early(int64_t b, int64_t row, const DecodeProductSizes& sizes) const {
    if (kind == kAdd) return {out[b * sizes.rows + row], 0};
    return {A(0), kind == kQueryKeyValue ? lengths[b] - 1 : 0};
  }

  __device__ void store(int64_t b, int64_t row, A sum, const Early& early, const DecodeProductSizes& sizes) const {
    switch (kind) {
      case kAdd: out[b * sizes.rows + row] = early.value + sum; break;
      case kGeluTanh: out[b * sizes.rows + row] = GeluTanh<T>::value(sum); break;
      case kGeluErf: out[b * sizes.rows + row] = GeluErf<T>::value(sum); break;
      case kLogits: narrow_out[b * sizes.rows + row] = narrow<T>(sum); break;
      case kQueryKeyValue: store_part(b, row, sum, early.position, sizes.batch); break;
    }
  }

 private:
  __device__ void store_part(int64_t b, int64_t row, A sum, int64_t position, int64_t batch) const {
    if (row < width) {
      out[b * width + row] = sum;
      return;
    }
    const int64_t i = row % width, heads = width / head_size;
    const int64_t head = ((row / width - 1) * batch + b) * heads + i / head_size;
    if (position >= 0 && position < capacity)
      narrow_out[(head * capacity + position) * head_size + i % head_size] = narrow<T>(sum);
  }
};

template <typename T>
struct DecodeProduct {
  DecodeEpilogue<T> epilogue;
  const accumulate_t<T>* x;  // (B, K)
  const T* norm_weight;      // (K) or null: x is normalised first
  const T* norm_bias;        // (K) or null
  const T* weight;           // (M, K)
  const T* bias;             // (M) or null
  DecodeProductSizes sizes;
  double eps;
};

constexpr int kDecodeThreads = 256;
constexpr int kDecodeWarps = kDecodeThreads / kWarp;

// ---- the simple kernels: any shape ----------------------------------------------------------------------------------

// out (B, K) = layernorm(x): a block for each row.
template <typename T>
__global__ void __launch_bounds__(kDecodeThreads)
    decode_norm_kernel(accumulate_t<T>* out, const __grid_constant__ DecodeProduct<T> p) {
  using A = accumulate_t<T>;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const A* x = p.x + blockIdx.x * p.sizes.inner;
  A sum = 0;
  for (int64_t i = threadIdx.x; i < p.sizes.inner; i += kDecodeThreads) sum += x[i];
  const A mean = block_sum(sum) / static_cast<A>(p.sizes.inner);
  A rests = 0, squares = 0;
  for (int64_t i = threadIdx.x; i < p.sizes.inner; i += kDecodeThreads)
    rests += x[i] - mean, squares += (x[i] - mean) * (x[i] - mean);
  const Moments<A> m = moments(mean, block_sum(rests), block_sum(squares), A(1) / static_cast<A>(p.sizes.inner), p.eps);
  for (int64_t i = threadIdx.x; i < p.sizes.inner; i += kDecodeThreads) {
    const A bias = p.norm_bias ? widen(p.norm_bias[i]) : A(0);
    out[blockIdx.x * p.sizes.inner + i] = (x[i] - m.mean - m.rest) * m.rstd * widen(p.norm_weight[i]) + bias;
  }
}

// A warp for each row of the weight.
template <typename T>
__global__ void __launch_bounds__(kDecodeThreads)
    decode_product_simple_kernel(const __grid_constant__ DecodeProduct<T> p) {
  using A = accumulate_t<T>;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x * int64_t{kDecodeWarps} + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (row >= p.sizes.rows) return;
  for (int64_t b = 0; b < p.sizes.batch; ++b) {
    A sum = 0;
    for (int64_t i = lane; i < p.sizes.inner; i += kWarp)
      sum += p.x[b * p.sizes.inner + i] * widen(p.weight[row * p.sizes.inner + i]);
    sum = warp_reduce<Sum>(sum);
    if (p.bias) sum += widen(p.bias[row]);
    if (lane == 0) p.epilogue.store(b, row, sum, p.epilogue.early(b, row, p.sizes), p.sizes);
  }
}

// ---- the fast kernel ------------------------------------------------------------------------------------------------

// Where the work is. A row of the weight is `slices` parts of `packs` packs, one for each of so many warps; the other
// warps of the block have other rows. A block has `block_rows` rows.
struct DecodeLayout {
  int slices;
  int packs;
  int block_rows;
};

// The packs of weights that a thread holds at once.
constexpr int kDecodePacks = 12;

template <typename T, int kPacks>
struct DecodeShape {
  static constexpr int kVec = kPack<T>;
  static constexpr int kRows = std::max(1, kDecodePacks / kPacks);  // of the weight, that a warp holds at once
};

// A pack of weights: read once, by one warp, so not kept in L1.
template <typename T>
__device__ Packed<T, kPack<T>> load_weights(const T* p) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(p));
  return reinterpret_cast<const Packed<T, kPack<T>>&>(words);
}

// kCount neighbouring activations.
template <int kCount, typename A>
__device__ void load_activations(A* to, const A* from) {
  constexpr int kStep = std::min(kCount, kPack<A>);
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const Packed<A, kStep> pack = load<kStep>(from + i);
#pragma unroll
    for (int k = 0; k < kStep; ++k) to[i + k] = pack.v[k];
  }
}

// A slice of a vector in the registers of a warp: lane l has packs l, l + 32, ...; beyond the slice they are 0.
template <typename T, int kPacks>
struct DecodeVector {
  using A = accumulate_t<T>;
  static constexpr int kVec = kPack<T>;
  A v[kPacks][kVec];

  __device__ void load(const A* slice, int packs) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int pack = lane + k * kWarp;
      if (pack < packs) {
        load_activations<kVec>(v[k], slice + pack * kVec);
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) v[k][e] = 0;
      }
    }
  }

  __device__ A sum() const {
    A total = 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
#pragma unroll
      for (int e = 0; e < kVec; ++e) total += v[k][e];
    return warp_reduce<Sum>(total);
  }

  __device__ Moments<A> moments_of(int packs, A inverse, double eps) const {
    const int lane = threadIdx.x % kWarp;
    const A mean = sum() * inverse;
    A rests = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
#pragma unroll
      for (int e = 0; e < kVec; ++e)
        if (lane + k * kWarp < packs) rests += v[k][e] - mean, squares += (v[k][e] - mean) * (v[k][e] - mean);
    return moments(mean, warp_reduce<Sum>(rests), warp_reduce<Sum>(squares), inverse, eps);
  }

  __device__ A dot(const Packed<T, kVec> (&weights)[kPacks]) const {
    A total = 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      A w[kVec];
      widen(w, weights[k]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) total += v[k][e] * w[e];
    }
    return total;
  }
};

// A norm's weight and bias, as they lie in memory.
template <typename T, int kPacks>
struct DecodeNorm {
  static constexpr int kVec = kPack<T>;
  Packed<T, kVec> weight[kPacks];
  Packed<T, kVec> bias[kPacks];

  __device__ void load(const DecodeProduct<T>& p, int packs) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int pack = lane + k * kWarp;
      weight[k] = bias[k] = {};
      if (pack < packs) weight[k] = cuda::load<kVec>(p.norm_weight + pack * kVec);
      if (pack < packs && p.norm_bias) bias[k] = cuda::load<kVec>(p.norm_bias + pack * kVec);
    }
  }

  __device__ void apply(DecodeVector<T, kPacks>& x, const DecodeProduct<T>& p, int packs) const {
    using A = accumulate_t<T>;
    const Moments<A> m = x.moments_of(packs, A(1) / static_cast<A>(p.sizes.inner), p.eps);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      A w[kVec], b[kVec];
      widen(w, weight[k]);
      widen(b, bias[k]);
#pragma unroll
      for (int e = 0; e < kVec; ++e) x.v[k][e] = (x.v[k][e] - m.mean - m.rest) * m.rstd * w[e] + b[e];
    }
  }
};

// kNorm: B is 1, there is one slice, and x is normalised, by each warp for itself.
template <typename T, int kPacks, bool kNorm>
__global__ void __launch_bounds__(kDecodeThreads, kNorm&& kPacks > 3 ? 1 : 2)
    decode_product_kernel(const __grid_constant__ DecodeProduct<T> p, const __grid_constant__ DecodeLayout layout) {
  using A = accumulate_t<T>;
  using Shape = DecodeShape<T, kPacks>;
  constexpr int kVec = Shape::kVec, kRows = Shape::kRows;
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  A* parts = reinterpret_cast<A*>(shared_bytes);  // (B, block_rows, slices)
  let_next_kernel_start();

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int groups = kDecodeWarps / layout.slices, slice = warp % layout.slices, group = warp / layout.slices;
  const int64_t first = blockIdx.x * int64_t{layout.block_rows};
  const int rows = static_cast<int>(min(int64_t{layout.block_rows}, p.sizes.rows - first));
  const int64_t begin = static_cast<int64_t>(slice) * layout.packs * kVec;
  // The last slice may be shorter.
  const int packs = static_cast<int>(min(int64_t{layout.packs}, (p.sizes.inner - begin) / kVec));

  Packed<T, kVec> weights[kRows][kPacks];
  const auto load_rows = [&](int row) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int own = row + u * groups;
      const T* from = p.weight + (first + own) * p.sizes.inner + begin;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const int pack = lane + k * kWarp;
        weights[u][k] = {};
        if (own < rows && pack < packs) weights[u][k] = load_weights(from + pack * kVec);
      }
    }
  };
  load_rows(group);
  DecodeNorm<T, kPacks> norm;
  if constexpr (kNorm) norm.load(p, packs);
  // This thread's first output.
  const int count = rows * static_cast<int>(p.sizes.batch);
  const bool any = threadIdx.x < count;
  const int64_t b0 = threadIdx.x / rows, row0 = first + threadIdx.x % rows;
  const A bias0 = any && p.bias ? widen(p.bias[row0]) : A(0);

  wait_for_previous_kernel();
  typename DecodeEpilogue<T>::Early early0 = {};
  if (any) early0 = p.epilogue.early(b0, row0, p.sizes);
  DecodeVector<T, kPacks> x;
  if (p.sizes.batch == 1) x.load(p.x + begin, packs);
  if constexpr (kNorm) norm.apply(x, p, packs);
  for (int row = group; row < rows; row += kRows * groups) {
    for (int b = 0; b < static_cast<int>(p.sizes.batch); ++b) {
      if (p.sizes.batch > 1) x.load(p.x + b * p.sizes.inner + begin, packs);
      A sums[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) sums[u] = x.dot(weights[u]);
#pragma unroll
      for (int u = 0; u < kRows; ++u) sums[u] = warp_reduce<Sum>(sums[u]);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int own = row + u * groups;
        if (lane == u && own < rows) parts[(b * rows + own) * layout.slices + slice] = sums[u];
      }
    }
    load_rows(row + kRows * groups);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kDecodeThreads) {
    A sum = parts[i * layout.slices];
    for (int s = 1; s < layout.slices; ++s) sum += parts[i * layout.slices + s];
    if (i == threadIdx.x) {
      p.epilogue.store(b0, row0, sum + bias0, early0, p.sizes);
    } else {
      const int64_t b = i / rows, own = first + i % rows;
      if (p.bias) sum += widen(p.bias[own]);
      p.epilogue.store(b, own, sum, p.epilogue.early(b, own, p.sizes), p.sizes);
    }
  }
}

// ---- the launch -----------------------------------------------------------------------------------------------------

// Most packs of a slice that a lane has.
constexpr int kDecodeMaxPacks = 8;

// Slices 0 where the fast kernel does not serve: rows that do not begin at multiples of 16 bytes, or very long ones.
template <typename T>
DecodeLayout decode_layout(const DecodeProduct<T>& p) {
  constexpr int kMaxShared = 32 << 10, kBlocksEach = 2;
  constexpr int64_t kFewRows = 64;
  if (!can_vectorize<T>(p.sizes.inner, p.weight, p.norm_weight, p.norm_bias, p.x)) return {};
  const int64_t packs = p.sizes.inner / kPack<T>;
  int slices = 1;
  while (slices <= kDecodeWarps && ceil_div(packs, slices) > int64_t{kDecodeMaxPacks} * kWarp) slices *= 2;
  // Slices of 4 packs a lane or fewer: so many rows are in flight at once.
  while (!p.norm_weight && slices < kDecodeWarps && ceil_div(packs, slices) > int64_t{4} * kWarp) slices *= 2;
  if (slices > kDecodeWarps) return {};
  // A block for each multiprocessor, so that the next kernel's blocks have room; two where there is much to read.
  int64_t rows = ceil_div(p.sizes.rows, multiprocessors());
  if (rows > kFewRows) rows = ceil_div(p.sizes.rows, int64_t{kBlocksEach} * multiprocessors());
  rows = std::min(rows, kMaxShared / (p.sizes.batch * slices * static_cast<int64_t>(sizeof(accumulate_t<T>))));
  return {slices, static_cast<int>(ceil_div(packs, slices)), static_cast<int>(rows)};
}

// The fast kernel that has so many packs a lane.
template <typename T, bool kNorm, int kFirst, int... kOthers>
void launch_decode_product(const DecodeProduct<T>& p, const DecodeLayout& layout, Stream stream) {
  if constexpr (sizeof...(kOthers) > 0)
    if (layout.packs > kFirst * kWarp) return launch_decode_product<T, kNorm, kOthers...>(p, layout, stream);
  const auto shared = p.sizes.batch * layout.block_rows * layout.slices * static_cast<int64_t>(sizeof(accumulate_t<T>));
  launch_early<decode_product_kernel<T, kFirst, kNorm>>(grid_size(ceil_div(p.sizes.rows, layout.block_rows)),
                                                        kDecodeThreads, shared, stream, p, layout);
}

// `normalised` (B, K) is scratch for products of a norm.
template <typename T>
Status decode_product(DecodeProduct<T> p, accumulate_t<T>* normalised, Stream stream) {
  const DecodeLayout layout = decode_layout(p);
  const bool fused = p.norm_weight && p.sizes.batch == 1 && layout.slices == 1;
  if (p.norm_weight && !fused) {
    launch_early<decode_norm_kernel<T>>(grid_size(p.sizes.batch), kDecodeThreads, 0, stream, normalised, p);
    p.x = normalised;
    p.norm_weight = p.norm_bias = nullptr;
    return decode_product(p, normalised, stream);
  }
  if (layout.slices == 0)
    launch_early<decode_product_simple_kernel<T>>(grid_size(ceil_div(p.sizes.rows, kDecodeWarps)), kDecodeThreads, 0,
                                                  stream, p);
  else if (fused)
    launch_decode_product<T, true, 1, 2, 3, 4, kDecodeMaxPacks>(p, layout, stream);
  else
    launch_decode_product<T, false, 1, 2, 3, 4, kDecodeMaxPacks>(p, layout, stream);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
