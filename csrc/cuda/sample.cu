// A cluster of blocks for each row, which is read once: x stays in shared memory. What top_k and top_p leave is found
// by a radix search for the smallest x that is left: of all x by their first 8 bits, then of those with these bits by
// the next 8, and so on. What is counted are integers, so that the sums have the same bits in any order.
#include <cmath>

#include "../sample.h"
#include "common/assert.cuh"
#include "common/hopper.cuh"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "common/reduce.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 8;   // of a cluster
constexpr int kKept = 8192;  // x of a block in shared memory: all of 65536 logits; further ones are read again
constexpr int kDigits = 256;
constexpr int kPasses = 4;
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
  float kept[kKept];
  Best warps[kWarps];
  Best block;
  Count histograms[kPasses][kDigits];
  Count totals[kDigits];  // of all blocks
  int digit;
  Count wanted;
};

__device__ Best best_of_warp(Best best) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Best other = {__shfl_xor_sync(~0u, best.value, offset), __shfl_xor_sync(~0u, best.index, offset)};
    if (better(other, best)) best = other;
  }
  return best;
}

// The best over all blocks, returned to every thread.
__device__ Best best_of(Best best, Shared& shared) {
  static_assert(kWarps == kWarp);
  best = best_of_warp(best);
  if (threadIdx.x % kWarp == 0) shared.warps[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    best = best_of_warp(shared.warps[threadIdx.x]);
    if (threadIdx.x == 0) shared.block = best;
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

// A search for the k-th largest weighs every x alike.
struct One {};

__device__ Count sum_of(unsigned peers, One) {
  return __popc(peers);
}

__device__ Count sum_of(unsigned peers, unsigned weight) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(peers, weight & 0xFFFFu) + (Count{__reduce_add_sync(peers, weight >> 16)} << 16);
#else
  Count sum = 0;
  for (int lane = 0; lane < kWarp; ++lane)
    if (peers >> lane & 1u) sum += __shfl_sync(peers, weight, lane);
  return sum;
#endif
}

// The threads of a warp that have the same digit add up their weights first: many x have the same first bits.
template <typename Weight>
__device__ void add_to_histogram(Count* histogram, bool active, unsigned digit, Weight weight) {
  const unsigned all = __ballot_sync(~0u, active);
  if (!active) return;  // after the first pass, nearly all
  const unsigned peers = __match_any_sync(all, digit);
  const Count sum = sum_of(peers, weight);
  if (static_cast<int>(threadIdx.x % kWarp) == __ffs(peers) - 1) atomicAdd(histogram + digit, sum);
}

// Calls each(i, slot) for this block's part of the row, all threads of a warp together; i may be beyond the row's end.
// The slots of a part are numbered from 0, and each thread always has the same ones.
template <typename Each>
__device__ void for_each_own(int64_t vocabulary, const Each& each) {
  const int64_t step = static_cast<int64_t>(block_count()) * kThreads;
  int64_t slot = threadIdx.x;
#pragma unroll 4
  for (int64_t start = static_cast<int64_t>(block_rank()) * kThreads; start < vocabulary; start += step) {
    each(start + threadIdx.x, slot);
    slot += kThreads;
  }
}

// By one warp: the largest digit for which the totals of all digits not below it sum to what is wanted or more. Of it
// the rest is wanted.
template <typename Wanted>
__device__ void find_digit(bool first, const Wanted& wanted_of, Shared& shared) {
  constexpr int kEach = kDigits / kWarp;  // of the largest digits in lane 0
  const int lane = static_cast<int>(threadIdx.x), largest = kDigits - 1 - lane * kEach;
  Count wanted = shared.wanted, sum = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) sum += shared.totals[largest - k];
  Count before = sum;  // then of the lanes before
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Count other = __shfl_up_sync(~0u, before, offset);
    if (lane >= offset) before += other;
  }
  const Count total = __shfl_sync(~0u, before, kWarp - 1);
  if (first) wanted = wanted_of(total);
  before -= sum;
  if (before < wanted && before + sum >= wanted) {
    int digit = largest;
    while (before + shared.totals[digit] < wanted) before += shared.totals[digit--];
    shared.digit = digit;
    shared.wanted = wanted - before;
  }
}

// The largest key for which the weights of all keys not below it sum to `wanted` or more: wanted_of(the sum of all
// weights), which is from 1 to that sum.
template <typename Key, typename Weight, typename Wanted>
__device__ uint32_t search(int64_t vocabulary, const Key& key, const Weight& weight, const Wanted& wanted_of,
                           Shared& shared) {
  for (int i = threadIdx.x; i < kPasses * kDigits; i += kThreads) shared.histograms[i / kDigits][i % kDigits] = 0;
  __syncthreads();
  uint32_t found = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const int shift = 24 - 8 * pass;
    Count* const histogram = shared.histograms[pass];
    for_each_own(vocabulary, [&](int64_t i, int64_t slot) {
      const uint32_t own = i < vocabulary ? key(i, slot) : 0;
      // Shifts by 32 are not defined, so in two steps.
      const bool active = i < vocabulary && (own >> shift >> 8) == (found >> shift >> 8);
      add_to_histogram(histogram, active, own >> shift & 0xFFu, weight(i, slot, active));
    });
    all_blocks_barrier();
    if (threadIdx.x < kDigits) {
      Count total = 0;
      for (int rank = 0; rank < block_count(); ++rank) total += read_block(histogram + threadIdx.x, rank);
      shared.totals[threadIdx.x] = total;
    }
    __syncthreads();
    if (threadIdx.x < kWarp) find_digit(pass == 0, wanted_of, shared);
    __syncthreads();
    found |= static_cast<uint32_t>(shared.digit) << shift;
  }
  all_blocks_barrier();  // all have read the histograms
  return found;
}

// ---- a row ----------------------------------------------------------------------------------------------------------

template <typename T>
class Row {
 public:
  __device__ Row(const Sample<T>& p, int64_t row, float* kept)
      : kept_(kept),
        logits_(p.logits + row * p.logits_stride),
        noise_(p.noise ? p.noise + row * p.vocabulary : nullptr),
        temperature_(p.noise ? static_cast<float>(p.temperature) : 1.0f) {}

  // To be called for every slot before x.
  __device__ float load(int64_t i, int64_t slot) const {
    const float value = static_cast<float>(widen(logits_[i])) / temperature_;
    if (slot < kKept) kept_[slot] = value;
    return value;
  }
  __device__ float x(int64_t i, int64_t slot) const {
    return slot < kKept ? kept_[slot] : static_cast<float>(widen(logits_[i])) / temperature_;
  }
  __device__ uint32_t key(int64_t i, int64_t slot) const { return key_of(x(i, slot)); }
  __device__ float noise(int64_t i) const { return noise_[i]; }
  __device__ bool has_noise() const { return noise_ != nullptr; }

 private:
  float* kept_;
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
    for_each_own(p.vocabulary, [&](int64_t i, int64_t slot) {
      if (i >= p.vocabulary) return;
      const Best other = {value(i, slot), static_cast<int>(i)};
      if (better(other, best)) best = other;
    });
    return best_of(best, shared);
  };
  const Best largest = own_best([&](int64_t i, int64_t slot) { return row.load(i, slot); });
  if (!isfinite(largest.value)) return -1;
  if (!row.has_noise()) return largest.index;
  const auto key = [&](int64_t i, int64_t slot) { return row.key(i, slot); };
  uint32_t threshold = 0;
  if (p.top_k < p.vocabulary)
    threshold = search(
        p.vocabulary, key, [](int64_t, int64_t, bool) { return One{}; },
        [&](Count) { return static_cast<Count>(p.top_k); }, shared);
  if (p.top_p < 1) {
    const auto units = [&](int64_t i, int64_t slot, bool active) {
      return active && key(i, slot) >= threshold ? probability_units(row.x(i, slot), largest.value) : 0u;
    };
    const auto wanted = [&](Count total) {
      return max(static_cast<Count>(ceil(p.top_p * static_cast<double>(total))), Count{1});
    };
    threshold = search(p.vocabulary, key, units, wanted, shared);
  }
  const auto score = [&](int64_t i, int64_t slot) {
    return key(i, slot) >= threshold ? expf(row.x(i, slot) - largest.value) / row.noise(i) : -1.0f;
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
  const int token = draw(p, Row<T>(p, b, shared.kept), shared);  // all blocks have read the length when it returns
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
