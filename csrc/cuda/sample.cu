// A cluster of blocks for each row, which is read once: x stays in shared memory.
//
// A small top_k: each warp has its largest x, and the k-th largest of these is not above the k-th largest of all x. So
// the x not below it, few more than k, are candidates. The first block takes them, counts for each how many are larger,
// and draws.
//
// Otherwise, what top_k and top_p leave is found by a radix search for the smallest x that is left: of all x by their
// first 8 bits, then of those with these bits by the next 8, and so on. What is counted are integers, so that the sums
// have the same bits in any order.
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
constexpr int kBlocks = 8;         // of a cluster
constexpr int kKept = 8192;        // x of a block in shared memory: all of 65536 logits; further ones are read again
constexpr int kCandidates = 1024;  // at most, or the radix search is made
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

// The two halves of a barrier of all blocks' threads.
__device__ void all_blocks_arrive() {
#if __CUDA_ARCH__ >= 900
  cluster_arrive();
#endif
}

__device__ void all_blocks_wait() {
#if __CUDA_ARCH__ >= 900
  cluster_wait();
#else
  __syncthreads();
#endif
}

__device__ void all_blocks_barrier() {
  all_blocks_arrive();
  all_blocks_wait();
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

// Writes 4 or 8 bytes to the variable of another block.
template <typename V>
__device__ void write_block(V* shared, const V& value, int rank) {
#if __CUDA_ARCH__ >= 900
  static_assert(sizeof(V) == 4 || sizeof(V) == 8);
  if constexpr (sizeof(V) == 4)
    asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(in_block(shared, rank)),
                 "r"(reinterpret_cast<const uint32_t&>(value))
                 : "memory");
  else
    asm volatile("st.shared::cluster.b64 [%0], %1;" ::"r"(in_block(shared, rank)),
                 "l"(reinterpret_cast<const uint64_t&>(value))
                 : "memory");
#else
  *shared = value;
#endif
}

// Adds one to the variable of another block, and returns what it was.
__device__ unsigned count_block(unsigned* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  unsigned before;
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "r"(in_block(shared, rank))
               : "memory");
  return before;
#else
  return atomicAdd(shared, 1u);
#endif
}

// ---- reductions -----------------------------------------------------------------------------------------------------

// What may be the largest: of equal ones the lower index, of NaN and a number the NaN.
struct alignas(8) Best {
  float value;
  int index;
};
constexpr Best kNone = {-INFINITY, 0x7FFFFFFF};

__device__ bool better(const Best& a, const Best& b) {
  if (isnan(a.value) || isnan(b.value)) return isnan(a.value) && !isnan(b.value);
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

struct Candidates {
  float x[kCandidates];
  int index[kCandidates];
};

struct Shared {
  float kept[kKept];
  Best warps[2][kBlocks * kWarps];  // of all blocks; two, so that none is overwritten while it is read
  union {                           // one or the other way to search
    Count histograms[kPasses][kDigits];
    Candidates candidates;
  };
  union {
    Count totals[kDigits];  // of all blocks
    uint32_t keys[kBlocks * kWarps];
  };
  int digit;
  Count wanted;
  unsigned count;  // of candidates
  uint32_t least;  // of them
};
static_assert(kDigits <= kThreads && kCandidates <= kThreads);

__device__ Best best_of_warp(Best best) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Best other = {__shfl_xor_sync(~0u, best.value, offset), __shfl_xor_sync(~0u, best.index, offset)};
    if (better(other, best)) best = other;
  }
  return best;
}

// The best over all blocks, returned to every thread; the best of each warp stays in shared.warps[turn]. The other
// blocks must have started.
__device__ Best best_of(Best best, int turn, Shared& shared) {
  const int lane = threadIdx.x % kWarp, own = block_rank() * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  best = best_of_warp(best);
  if (lane < block_count()) write_block(&shared.warps[turn][own], best, lane);
  all_blocks_barrier();
  best = kNone;
  for (int i = lane; i < block_count() * kWarps; i += kWarp)
    if (better(shared.warps[turn][i], best)) best = shared.warps[turn][i];
  return best_of_warp(best);
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

// Of the sum of all, what top_p leaves comes to this or more.
template <typename T>
__device__ Count wanted_units(const Sample<T>& p, Count total) {
  return max(static_cast<Count>(ceil(p.top_p * static_cast<double>(total))), Count{1});
}

// The sum over the block of two halves, returned to every thread.
__device__ Count block_sum_of(unsigned value, Shared& shared) {
  if (threadIdx.x == 0) shared.wanted = 0;
  __syncthreads();
  const Count sum = sum_of(~0u, value);
  if (threadIdx.x % kWarp == 0 && sum > 0) atomicAdd(&shared.wanted, sum);
  __syncthreads();
  return shared.wanted;
}

// Whether top_k left few enough candidates; if so, the first block has them.
template <typename T>
__device__ bool find_candidates(const Sample<T>& p, const Row<T>& row, Shared& shared) {
  const int warps = block_count() * kWarps;
  if (p.top_k > warps) return false;
  if (threadIdx.x < warps) shared.keys[threadIdx.x] = key_of(shared.warps[0][threadIdx.x].value);
  if (threadIdx.x == 0) shared.least = ~0u;
  __syncthreads();
  // Four threads for each warp's largest x: how many are larger?
  constexpr int kEach = 4;
  const uint32_t own = shared.keys[min(static_cast<int>(threadIdx.x) / kEach, warps - 1)];
  unsigned larger = 0;
#pragma unroll 8
  for (int i = threadIdx.x % kEach; i < warps; i += kEach) larger += shared.keys[i] > own;
#pragma unroll
  for (int offset = 1; offset < kEach; offset *= 2) larger += __shfl_xor_sync(~0u, larger, offset);
  if (larger < p.top_k) atomicMin(&shared.least, own);
  __syncthreads();
  for_each_own(p.vocabulary, [&](int64_t i, int64_t slot) {
    if (i >= p.vocabulary || row.key(i, slot) < shared.least) return;
    const unsigned at = count_block(&shared.count, 0);
    if (at >= kCandidates) return;
    write_block(&shared.candidates.x[at], row.x(i, slot), 0);
    write_block(&shared.candidates.index[at], static_cast<int>(i), 0);
  });
  all_blocks_barrier();
  return read_block(&shared.count, 0) <= kCandidates;
}

// By the first block, of its candidates.
template <typename T>
__device__ int draw_candidate(const Sample<T>& p, const Row<T>& row, float largest, Shared& shared) {
  const int count = static_cast<int>(shared.count), own = static_cast<int>(threadIdx.x);
  const Candidates& all = shared.candidates;
  const float x = own < count ? all.x[own] : -INFINITY;
  const float noise = own < count ? row.noise(all.index[own]) : 1.0f;
  int larger = 0;
  if (own < count)
    for (int i = 0; i < count; ++i) larger += all.x[i] > x;
  bool left = own < count && larger < p.top_k;
  if (p.top_p < 1) {
    const Count total = block_sum_of(left ? probability_units(x, largest) : 0u, shared);
    const Count wanted = wanted_units(p, total);
    Count before = 0;
    if (left)
      for (int i = 0; i < count; ++i)
        if (all.x[i] > x) before += probability_units(all.x[i], largest);
    left = left && before < wanted;
  }
  Best best = kNone;
  if (left) best = {expf(x - largest) / noise, all.index[own]};
  best = best_of_warp(best);
  if (threadIdx.x % kWarp == 0) shared.warps[1][threadIdx.x / kWarp] = best;
  __syncthreads();
  return best_of_warp(shared.warps[1][threadIdx.x % kWarp]).index;
}

// The token, or -1; to be used by the first block.
template <typename T>
__device__ int draw(const Sample<T>& p, const Row<T>& row, Shared& shared) {
  Best own = kNone;
  const auto take = [&](float value, int64_t i) {
    const Best other = {value, static_cast<int>(i)};
    if (better(other, own)) own = other;
  };
  for_each_own(p.vocabulary, [&](int64_t i, int64_t slot) {
    if (i < p.vocabulary) take(row.load(i, slot), i);
  });
  all_blocks_wait();  // all have started
  const Best largest = best_of(own, 0, shared);
  if (!isfinite(largest.value)) return -1;
  if (!row.has_noise()) return largest.index;
  const auto key = [&](int64_t i, int64_t slot) { return row.key(i, slot); };
  uint32_t threshold = 0;
  if (p.top_k < p.vocabulary) {
    if (find_candidates(p, row, shared)) {
      all_blocks_arrive();  // this one has read the first block's count
      const int token = block_rank() == 0 ? draw_candidate(p, row, largest.value, shared) : 0;
      all_blocks_wait();
      return token;
    }
    threshold = search(
        p.vocabulary, key, [](int64_t, int64_t, bool) { return One{}; },
        [&](Count) { return static_cast<Count>(p.top_k); }, shared);
  }
  if (p.top_p < 1) {
    const auto units = [&](int64_t i, int64_t slot, bool active) {
      return active && key(i, slot) >= threshold ? probability_units(row.x(i, slot), largest.value) : 0u;
    };
    threshold = search(p.vocabulary, key, units, [&](Count total) { return wanted_units(p, total); }, shared);
  }
  own = kNone;
  for_each_own(p.vocabulary, [&](int64_t i, int64_t slot) {
    if (i >= p.vocabulary) return;
    take(key(i, slot) >= threshold ? expf(row.x(i, slot) - largest.value) / row.noise(i) : -1.0f, i);
  });
  return best_of(own, 1, shared).index;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ Sample<T> p) {
  __shared__ Shared shared;
  if (threadIdx.x == 0) shared.count = 0;
  all_blocks_arrive();
  wait_for_previous_kernel();
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
  const bool hopper = built_for_hopper<kKernel>();
  cudaLaunchAttribute attributes[2] = {cluster_of(kBlocks)};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config =
      launch_config(grid_size(p.batch * (hopper ? kBlocks : 1)), kThreads, 0, stream, attributes);
  config.numAttrs = !hopper ? 0 : CUDART_VERSION >= 12030 ? 2 : 1;  // under graph capture from CUDA 12.3 on
  return cudaLaunchKernelEx(&config, kKernel, p);
}

#define GPTKERNELS_INSTANTIATE(T) template Status sample<T>(const Sample<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
