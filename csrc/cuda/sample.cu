// A cluster of blocks for each row. What top_k and top_p leave is found by a radix search for the smallest x that is
// left: of all x by their first 8 bits, then of those with these bits by the next 8, and so on. What is counted are
// integers, so that the sums have the same bits in any order.
#include <cmath>

#include "../sample.h"
#include "common/assert.cuh"
#include "common/hopper.cuh"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "common/reduce.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 8;  // of a cluster
constexpr int kDigits = 256;
using Count = unsigned long long;

// ---- the blocks of a row --------------------------------------------------------------------------------------------

__device__ int block_rank() {
#if __CUDA_ARCH__ >= 900
  return static_cast<int>(cluster_rank());
#else
  return 0;
#endif
}

__device__ int block_count() {
#if __CUDA_ARCH__ >= 900
  return static_cast<int>(cluster_blocks());
#else
  return 1;
#endif
}

__device__ void all_blocks_barrier() {
#if __CUDA_ARCH__ >= 900
  cluster_barrier();
#else
  __syncthreads();
#endif
}

// The variable of another block of the cluster.
template <typename V>
__device__ V read_block(const V* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  static_assert(sizeof(V) == 4 || sizeof(V) == 8);
  V value;
  if constexpr (sizeof(V) == 4)
    asm volatile("ld.shared::cluster.b32 %0, [%1];"
                 : "=r"(reinterpret_cast<uint32_t&>(value))
                 : "r"(in_block(shared, rank)));
  else
    asm volatile("ld.shared::cluster.b64 %0, [%1];"
                 : "=l"(reinterpret_cast<uint64_t&>(value))
                 : "r"(in_block(shared, rank)));
  return value;
#else
  return *shared;
#endif
}

// ---- reductions -----------------------------------------------------------------------------------------------------

// A candidate to be the largest: of equal ones the lower index, of NaN and a number the NaN.
struct Best {
  float value;
  int index;
};

__device__ bool better(const Best& a, const Best& b) {
  if (isnan(a.value) || isnan(b.value)) return isnan(a.value) && !isnan(b.value);
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

struct Shared {
  Best warps[kThreads / kWarp];
  Best block;
  Count histogram[2][kDigits];
  int digit;
  Count wanted;
};

// The best over all blocks, returned to every thread.
__device__ Best best_of(Best best, Shared& shared) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Best other = {__shfl_xor_sync(~0u, best.value, offset), __shfl_xor_sync(~0u, best.index, offset)};
    if (better(other, best)) best = other;
  }
  if (threadIdx.x % kWarp == 0) shared.warps[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / kWarp; ++w)
      if (better(shared.warps[w], best)) best = shared.warps[w];
    shared.block = best;
  }
  all_blocks_barrier();
  best = {read_block(&shared.block.value, 0), read_block(&shared.block.index, 0)};
  for (int rank = 1; rank < block_count(); ++rank) {
    const Best other = {read_block(&shared.block.value, rank), read_block(&shared.block.index, rank)};
    if (better(other, best)) best = other;
  }
  all_blocks_barrier();  // all have read it
  return best;
}

// ---- the search -----------------------------------------------------------------------------------------------------

// An unsigned number for each x (not NaN) that is larger for a larger x.
__device__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The threads of a warp that have the same digit add up their weights first: many x have the same first bits.
__device__ void add_to_histogram(Count* histogram, bool active, unsigned digit, unsigned weight) {
  const unsigned all = __ballot_sync(~0u, active);
  if (!active) return;
  const unsigned peers = __match_any_sync(all, digit);
#if __CUDA_ARCH__ >= 800
  const Count sum = __reduce_add_sync(peers, weight & 0xFFFFu) + (Count{__reduce_add_sync(peers, weight >> 16)} << 16);
  if (static_cast<int>(threadIdx.x % kWarp) == __ffs(peers) - 1) atomicAdd(histogram + digit, sum);
#else
  atomicAdd(histogram + digit, Count{weight});
#endif
}

// Calls each(i) for this block's part of the row, all threads of a warp together; i may be beyond the row's end.
template <typename Each>
__device__ void for_each_own(int64_t vocabulary, const Each& each) {
  const int64_t step = static_cast<int64_t>(block_count()) * kThreads;
  for (int64_t start = static_cast<int64_t>(block_rank()) * kThreads; start < vocabulary; start += step)
    each(start + threadIdx.x);
}

// The largest key for which the weights of all keys not below it sum to `wanted` or more: wanted_of(the sum of all
// weights), which is from 1 to that sum.
template <typename Key, typename Weight, typename Wanted>
__device__ uint32_t search(int64_t vocabulary, const Key& key, const Weight& weight, const Wanted& wanted_of,
                           Shared& shared) {
  uint32_t found = 0;
  Count wanted = 0;
  for (int i = threadIdx.x; i < 2 * kDigits; i += kThreads) shared.histogram[i / kDigits][i % kDigits] = 0;
  __syncthreads();
  for (int pass = 0; pass < 4; ++pass) {
    const int shift = 24 - 8 * pass;
    Count* const histogram = shared.histogram[pass % 2];
    for_each_own(vocabulary, [&](int64_t i) {
      const uint32_t own = i < vocabulary ? key(i) : 0;
      // Shifts by 32 are not defined, so in two steps.
      const bool active = i < vocabulary && (own >> shift >> 8) == (found >> shift >> 8);
      add_to_histogram(histogram, active, own >> shift & 0xFFu, active ? weight(i) : 0);
    });
    all_blocks_barrier();
    if (threadIdx.x < kWarp) {
      // Eight digits a lane, of the largest ones in lane 0.
      constexpr int kEach = kDigits / kWarp;
      Count counts[kEach], sum = 0;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        counts[k] = 0;
        for (int rank = 0; rank < block_count(); ++rank)
          counts[k] += read_block(histogram + kDigits - 1 - (threadIdx.x * kEach + k), rank);
        sum += counts[k];
      }
      Count before = sum;  // then of the lanes before
#pragma unroll
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const Count other = __shfl_up_sync(~0u, before, offset);
        if (static_cast<int>(threadIdx.x) >= offset) before += other;
      }
      if (pass == 0) wanted = wanted_of(__shfl_sync(~0u, before, kWarp - 1));
      before -= sum;
      if (before < wanted && before + sum >= wanted) {
        int k = 0;
        while (before + counts[k] < wanted) before += counts[k++];
        shared.digit = kDigits - 1 - (static_cast<int>(threadIdx.x) * kEach + k);
        shared.wanted = wanted - before;
      }
    }
    __syncthreads();
    found |= static_cast<uint32_t>(shared.digit) << shift;
    wanted = shared.wanted;
    all_blocks_barrier();  // all have read this histogram, which is the one after the next
    for (int i = threadIdx.x; i < kDigits; i += kThreads) histogram[i] = 0;
  }
  __syncthreads();
  return found;
}

// ---- a row ----------------------------------------------------------------------------------------------------------

template <typename T>
class Row {
 public:
  __device__ Row(const Sample<T>& p, int64_t row)
      : logits_(p.logits + row * p.logits_stride),
        noise_(p.noise ? p.noise + row * p.vocabulary : nullptr),
        temperature_(p.noise ? static_cast<float>(p.temperature) : 1.0f) {}

  __device__ float x(int64_t i) const { return static_cast<float>(widen(logits_[i])) / temperature_; }
  __device__ uint32_t key(int64_t i) const { return key_of(x(i)); }
  __device__ float noise(int64_t i) const { return noise_[i]; }
  __device__ bool has_noise() const { return noise_ != nullptr; }

 private:
  const T* logits_;
  const float* noise_;
  float temperature_;
};

__device__ unsigned probability_units(float x, float largest) {
  return static_cast<unsigned>(rintf(expf(x - largest) * static_cast<float>(kSampleUnits)));
}

// The token, or -1.
template <typename T>
__device__ int draw(const Sample<T>& p, const Row<T>& row, Shared& shared) {
  const auto own_best = [&](const auto& value) {
    Best best = {-INFINITY, 0x7FFFFFFF};
    for_each_own(p.vocabulary, [&](int64_t i) {
      if (i >= p.vocabulary) return;
      const Best other = {value(i), static_cast<int>(i)};
      if (better(other, best)) best = other;
    });
    return best_of(best, shared);
  };
  const Best largest = own_best([&](int64_t i) { return row.x(i); });
  if (!isfinite(largest.value)) return -1;
  if (!row.has_noise()) return largest.index;
  const auto key = [&](int64_t i) { return row.key(i); };
  uint32_t threshold = 0;
  if (p.top_k < p.vocabulary)
    threshold = search(
        p.vocabulary, key, [](int64_t) { return 1u; }, [&](Count) { return static_cast<Count>(p.top_k); }, shared);
  if (p.top_p < 1) {
    const auto units = [&](int64_t i) { return key(i) >= threshold ? probability_units(row.x(i), largest.value) : 0u; };
    const auto wanted = [&](Count total) {
      return max(static_cast<Count>(ceil(p.top_p * static_cast<double>(total))), Count{1});
    };
    threshold = search(p.vocabulary, key, units, wanted, shared);
  }
  const auto score = [&](int64_t i) {
    return key(i) >= threshold ? expf(row.x(i) - largest.value) / row.noise(i) : -1.0f;
  };
  return own_best(score).index;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ Sample<T> p) {
  __shared__ Shared shared;
  const int64_t b = blockIdx.x / block_count();
  const int64_t length = p.lengths[b];
  if (length < 0 || length >= p.sequence_length) {
    if (threadIdx.x == 0)
      device_fail("sample_", "a sequence is full", "length %lld of sequence %lld is not from 0 to %lld\n",
                  static_cast<long long>(length), static_cast<long long>(b),
                  static_cast<long long>(p.sequence_length - 1));
    return;
  }
  const int token = draw(p, Row<T>(p, b), shared);  // all blocks have read the length when it returns
  if (block_rank() == 0 && threadIdx.x == 0) {
    p.sequences[b * p.sequence_length + length] = token;
    p.lengths[b] = length + 1;
  }
}

}  // namespace

template <typename T>
Status sample(const Sample<T>& p, Stream stream) {
  if (p.batch == 0) return cudaSuccess;
  constexpr auto kKernel = sample_kernel<T>;
  cudaLaunchAttribute cluster = cluster_of(kBlocks);
  const bool hopper = built_for_hopper<kKernel>();
  const auto config =
      launch_config(grid_size(p.batch * (hopper ? kBlocks : 1)), kThreads, 0, stream, hopper ? &cluster : nullptr);
  return cudaLaunchKernelEx(&config, kKernel, p);
}

#define GPTKERNELS_INSTANTIATE(T) template Status sample<T>(const Sample<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
