// out (B, M) = x (B, K) @ weight (M, K)^T for small B, with an epilogue and optionally a preceding layer norm of x, in
// about the time of reading the weights once. x and sums are float32 (float64 for float64). In decode_product_kernel, a
// row of the weight is divided into `slices`, one per warp:
//
//   load the first rows of the weight, and the norm       they do not depend on earlier kernels
//   wait for the previous kernel; load x; normalise x     x stays in registers if B = 1
//   for each group of kRows rows: dot products, warp reductions, partial sums to shared memory; load the next rows
//   sum the slices, add the bias, apply the epilogue
//
// Loads before the wait (programmatic dependent launch) keep the memory busy while the previous kernel ends. The norm
// is fused if B = 1 and a row is one slice. Rows that are not 16-byte aligned, or very long, use
// decode_product_simple_kernel.
#pragma once

#include <utility>

#include "../../decode.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/moments.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/elementwise/gelu.cuh"

namespace gptkernels::cuda {

struct DecodeProductSizes {
  int64_t batch;  // B
  int64_t rows;   // M
  int64_t inner;  // K
};

template <typename T>
struct DecodeEpilogue {
  using A = accumulate_t<T>;
  enum Kind { kQueryKeyValue, kGeluTanh, kGeluErf, kAdd, kLogits };
  Kind kind;
  A* out;         // (B, M): kAdd adds to it, kGelu* write it; kQueryKeyValue: the query (B, C)
  T* narrow_out;  // kLogits: (B, M); kQueryKeyValue: the layer's keys and values (2, B, NH, capacity, HS)
  // For kQueryKeyValue only:
  const int64_t* lengths = nullptr;  // (B), including the newest token
  int64_t width = 0;                 // C
  int64_t head_size = 0;             // HS
  int64_t capacity = 0;

  struct Preloaded {
    A value;
    int64_t position;
  };
  __device__ Preloaded preloaded(int64_t b, int64_t row, const DecodeProductSizes& sizes) const {
    if (kind == kAdd) return {out[b * sizes.rows + row], 0};
    return {A(0), kind == kQueryKeyValue ? lengths[b] - 1 : 0};
  }

  __device__ void store(int64_t b, int64_t row, A sum, const Preloaded& preloaded,
                        const DecodeProductSizes& sizes) const {
    switch (kind) {
      case kAdd: out[b * sizes.rows + row] = preloaded.value + sum; break;
      case kGeluTanh: out[b * sizes.rows + row] = GeluTanh<T>::value(sum); break;
      case kGeluErf: out[b * sizes.rows + row] = GeluErf<T>::value(sum); break;
      case kLogits: narrow_out[b * sizes.rows + row] = narrow<T>(sum); break;
      case kQueryKeyValue: store_query_key_value(b, row, sum, preloaded.position, sizes.batch); break;
    }
  }

 private:
  __device__ void store_query_key_value(int64_t b, int64_t row, A sum, int64_t position, int64_t batch) const {
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
  const T* norm_weight;      // (K); null: no layer norm
  const T* norm_bias;        // (K) or null
  const T* weight;           // (M, K)
  const T* bias;             // (M) or null
  DecodeProductSizes sizes;
  double eps;
};

constexpr int kDecodeThreads = 256;
constexpr int kDecodeWarps = kDecodeThreads / kWarp;

// ---- the simple kernels: any shape ----------------------------------------------------------------------------------

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
    if (lane == 0) p.epilogue.store(b, row, sum, p.epilogue.preloaded(b, row, p.sizes), p.sizes);
  }
}

// ---- the fast kernel ------------------------------------------------------------------------------------------------

struct DecodeLayout {
  int slices;  // 0: the fast kernel does not support the shape
  int packs;   // per slice; the last slice may have fewer
  int block_rows;
};

constexpr int kDecodePacks = 12;  // in flight per thread

template <typename T, int kPacks>
struct DecodeShape {
  static constexpr int kVec = kPack<T>;
  static constexpr int kRows = kDecodePacks / kPacks;  // in flight per warp
};

// Every weight is read once, and not allocated in L1.
template <typename T>
__device__ Packed<T, kPack<T>> load_weights(const T* p) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(p));
  return reinterpret_cast<const Packed<T, kPack<T>>&>(words);
}

template <int kCount, typename A>
__device__ void load_activations(A* to, const A* from) {
  constexpr int kStep = kCount < kPack<A> ? kCount : kPack<A>;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const Packed<A, kStep> pack = load<kStep>(from + i);
#pragma unroll
    for (int k = 0; k < kStep; ++k) to[i + k] = pack.v[k];
  }
}

// Lane l holds the packs l, l + 32, ... of a slice; packs beyond the slice are 0.
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

// The norm's weight and bias, distributed like DecodeVector, but in T, which takes fewer registers than float32.
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

// kNorm requires B = 1 and one slice, because every warp normalises all of x.
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
  const int count = rows * static_cast<int>(p.sizes.batch);
  const bool any = threadIdx.x < count;
  const int64_t b0 = threadIdx.x / rows, row0 = first + threadIdx.x % rows;
  const A bias0 = any && p.bias ? widen(p.bias[row0]) : A(0);

  wait_for_previous_kernel();
  typename DecodeEpilogue<T>::Preloaded preloaded0 = {};
  if (any) preloaded0 = p.epilogue.preloaded(b0, row0, p.sizes);
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
      p.epilogue.store(b0, row0, sum + bias0, preloaded0, p.sizes);
    } else {
      const int64_t b = i / rows, own = first + i % rows;
      if (p.bias) sum += widen(p.bias[own]);
      p.epilogue.store(b, own, sum, p.epilogue.preloaded(b, own, p.sizes), p.sizes);
    }
  }
}

// ---- the launch -----------------------------------------------------------------------------------------------------

constexpr int kDecodeMaxPacks = 8;  // of a slice per lane

// Returns 0 slices if rows are not aligned to 16 bytes, or too long for kDecodeWarps slices.
template <typename T>
DecodeLayout decode_layout(const DecodeProduct<T>& p) {
  constexpr int kMaxShared = 32 << 10, kBlocksEach = 2;
  constexpr int64_t kFewRows = 64;
  if (!can_vectorize<T>(p.sizes.inner, p.weight, p.norm_weight, p.norm_bias, p.x)) return {};
  const int64_t packs = p.sizes.inner / kPack<T>;
  int slices = 1;
  while (slices <= kDecodeWarps && ceil_div(packs, slices) > int64_t{kDecodeMaxPacks} * kWarp) slices *= 2;
  // Without a norm, slices have at most 4 packs per lane if possible, so that several rows are in flight per warp.
  while (!p.norm_weight && slices < kDecodeWarps && ceil_div(packs, slices) > int64_t{4} * kWarp) slices *= 2;
  if (slices > kDecodeWarps) return {};
  // One thread block per SM leaves room for the next kernel's thread blocks; many rows need two per SM.
  int64_t rows = ceil_div(p.sizes.rows, multiprocessors());
  if (rows > kFewRows) rows = ceil_div(p.sizes.rows, int64_t{kBlocksEach} * multiprocessors());
  rows = min(rows, kMaxShared / (p.sizes.batch * slices * static_cast<int64_t>(sizeof(accumulate_t<T>))));
  return {slices, static_cast<int>(ceil_div(packs, slices)), static_cast<int>(rows)};
}

// Chooses the smallest kPacks that holds a slice. With 2 packs per lane, slices of at most 32 packs take less time than
// with 1. float64 is for comparisons, not for speed, and has only kDecodeMaxPacks.
template <typename T, bool kNorm, int kPacks = std::is_same_v<T, double> ? kDecodeMaxPacks : 2>
void launch_decode_product(const DecodeProduct<T>& p, const DecodeLayout& layout, Stream stream) {
  if constexpr (kPacks < kDecodeMaxPacks)
    if (layout.packs > kPacks * kWarp)
      return launch_decode_product<T, kNorm, kPacks == 4 ? kDecodeMaxPacks : kPacks + 1>(p, layout, stream);
  const auto shared = p.sizes.batch * layout.block_rows * layout.slices * static_cast<int64_t>(sizeof(accumulate_t<T>));
  launch_early<decode_product_kernel<T, kPacks, kNorm>>(grid_size(ceil_div(p.sizes.rows, layout.block_rows)),
                                                        kDecodeThreads, shared, stream, p, layout);
}

// `normalised` (B, K) is scratch memory for a layer norm that is not fused.
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
    launch_decode_product<T, true>(p, layout, stream);
  else
    launch_decode_product<T, false>(p, layout, stream);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
