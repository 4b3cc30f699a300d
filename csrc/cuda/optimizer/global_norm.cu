#include "../../global_norm.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/multi_tensor.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"

namespace gptkernels::cuda {
namespace {

using NormList = TensorList<1, 512>;
static_assert(sizeof(NormList) + sizeof(double*) <= kArgumentBytes);

// ---- the partial sums: one thread block per chunk -------------------------------------------------------------------

constexpr int kThreads = 512;
constexpr int kChunk = 16384;
constexpr int kPacksInFlight = 4;  // 128 KB per SM with 2048 threads

// float64 takes no additional time on H100 and H200: an SM converts 16 values to float64 and adds 64 per clock, but
// reads only about 8 bfloat16 per clock.
template <int N, typename T>
__device__ double squares(const Packed<T, N>& pack) {
  double sum = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const double value = widen(pack.v[k]);
    sum += value * value;
  }
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    global_norm_squares_chunks_kernel(const __grid_constant__ NormList list, double* partials) {
  let_next_kernel_start();
  constexpr int N = kPack<T>;
  constexpr int kRound = kPacksInFlight * kThreads * N;
  const int thread = static_cast<int>(threadIdx.x);
  const Chunk chunk = this_chunk<kChunk>(list);
  const T* x = static_cast<const T*>(list.pointers[chunk.tensor][0]) + chunk.begin;
  const int packed = reinterpret_cast<uintptr_t>(x) % 16 == 0 ? chunk.size / N * N : 0;

  double sums[kPacksInFlight] = {};
#pragma unroll
  for (int begin = 0; begin < kChunk; begin += kRound) {
    Packed<T, N> packs[kPacksInFlight];
#pragma unroll
    for (int k = 0; k < kPacksInFlight; ++k) {
      const int i = begin + (k * kThreads + thread) * N;
      packs[k] = i < packed ? load<N>(x + i) : Packed<T, N>{};
    }
#pragma unroll
    for (int k = 0; k < kPacksInFlight; ++k) sums[k] += squares(packs[k]);
  }
  double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int i = packed + thread; i < chunk.size; i += kThreads) sum += squares(load<1>(x + i));
  const double total = block_sum(sum);
  if (thread == 0) partials[blockIdx.x] = total;
}

// ---- the sum of the partial sums: one thread block, which reads 8 bytes per chunk -----------------------------------

constexpr int kSumThreads = 1024;
constexpr int kSumsInFlight = 8;

__global__ void __launch_bounds__(kSumThreads)
    global_norm_sum_block_kernel(float* norm, const double* partials, int64_t count) {
  wait_for_previous_kernel();
  double sum = 0;
  for (int64_t begin = threadIdx.x; begin < count; begin += kSumsInFlight * kSumThreads) {
    double found[kSumsInFlight];
#pragma unroll
    for (int k = 0; k < kSumsInFlight; ++k) {
      const int64_t i = begin + k * kSumThreads;
      found[k] = i < count ? partials[i] : 0;
    }
#pragma unroll
    for (int k = 0; k < kSumsInFlight; ++k) sum += found[k];
  }
  const double total = block_sum(sum);
  if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(total));
}

}  // namespace

int64_t global_norm_partials(int64_t size) {
  return ceil_div(size, kChunk);
}

template <typename T>
Status global_norm_squares(const GlobalNormSquares<T>& p, Stream stream) {
  double* partials = p.partials;
  for_each_list<NormList, kChunk>(
      p.count, p.sizes, [&](void** pointers, int64_t i) { pointers[0] = const_cast<T*>(p.tensors[i]); },
      [&](const NormList& list, unsigned chunks) {
        global_norm_squares_chunks_kernel<T><<<chunks, kThreads, 0, stream>>>(list, partials);
        partials += chunks;
      });
  return cudaGetLastError();
}

Status global_norm_sum(float* norm, const double* partials, int64_t count, Stream stream) {
  launch_early<global_norm_sum_block_kernel>(1, kSumThreads, 0, stream, norm, partials, count);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T) template Status global_norm_squares<T>(const GlobalNormSquares<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
