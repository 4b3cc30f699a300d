// A cluster of blocks for each row, which is read once: x stays in shared memory.
//
// A small top_k: each warp has its largest x, and the k-th largest of these is not above the k-th largest of all x. So
// the x not below it, few more than k, are candidates. The first block takes them, counts for each how many are larger,
// and draws. The blocks send each other what they find, and wait for it by barriers in shared memory that count bytes:
// a barrier of all their threads takes longer.
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
constexpr int kCandidates = 1024;  // at most, of each block an equal part, or the radix search is made
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

constexpr int block_count() {
#if __CUDA_ARCH__ >= 900
  return kBlocks;
#else
  return 1;
#endif
}
constexpr int kStep = block_count() * kThreads;  // from one x of a thread to its next

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

// Writes 4 or 8 bytes to the variable of another block, whose `arrived` counts them.
template <typename V>
__device__ void send_to_block(V* shared, const V& value, [[maybe_unused]] uint64_t* arrived,
                              [[maybe_unused]] int rank) {
#if __CUDA_ARCH__ >= 900
  store_in_block(shared, value, arrived, rank);
#else
  *shared = value;
#endif
}

// Tells another block's `arrived` how many bytes this one sends.
__device__ void announce_to_block([[maybe_unused]] uint64_t* arrived, [[maybe_unused]] unsigned bytes,
                                  [[maybe_unused]] int rank) {
#if __CUDA_ARCH__ >= 900
  random_delay();
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(in_block(arrived, rank)),
      "r"(bytes)
      : "memory");
#endif
}

// Waits until this block has all that was announced.
__device__ void await_blocks([[maybe_unused]] uint64_t* arrived) {
#if __CUDA_ARCH__ >= 900
  mbarrier_wait(arrived, 0);
  __syncwarp();
#else
  __syncthreads();
#endif
}

// ---- reductions -----------------------------------------------------------------------------------------------------

// An unsigned number for each x that is larger for a larger x, and the largest for NaN.
__device__ uint32_t key_of(float x) {
  if (isnan(x)) return ~0u;
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

__device__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return isnan(a) || a > b ? a : b;
#endif
}

// What may be the largest: of equal ones the lower index.
struct alignas(8) Best {
  uint32_t key;
  int index;
};
constexpr Best kNone = {0, 0x7FFFFFFF};

__device__ bool better(const Best& a, const Best& b) {
  return a.key > b.key || (a.key == b.key && a.index < b.index);
}

struct Candidates {
  alignas(16) float x[kCandidates];
  int index[kCandidates];
};

struct Shared {
  alignas(16) float kept[kKept];
  Best warps[2][kBlocks * kWarps];  // of all blocks; two, so that none is overwritten while it is read
  union {                           // one or the other way to search
    Count histograms[kPasses][kDigits];
    Candidates candidates;
  };
  union {
    Count totals[kDigits];  // of all blocks
    alignas(16) uint32_t keys[kBlocks * kWarps];
  };
  int digit;
  Count wanted;
  unsigned count;  // of this block's candidates
  uint32_t least;  // of them
  unsigned counts[kBlocks];
  uint64_t warps_arrived[2], candidates_arrived;
};
static_assert(kDigits <= kThreads && kCandidates == kThreads);

// To be called by one thread, before the block takes part in a barrier of all blocks.
__device__ void begin(Shared& shared) {
  shared.count = 0;
  shared.least = ~0u;
#if __CUDA_ARCH__ >= 900
  for (uint64_t& arrived : shared.warps_arrived) mbarrier_init(&arrived);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&shared.candidates_arrived)),
               "r"(block_count())
               : "memory");
  mbarrier_init_fence();
  for (uint64_t& arrived : shared.warps_arrived)
    mbarrier_expect(&arrived, static_cast<unsigned>(block_count() * kWarps * sizeof(Best)));
#endif
}

__device__ Best best_of_warp(Best best) {
#if __CUDA_ARCH__ >= 800
  const uint32_t key = __reduce_max_sync(~0u, best.key);
  return {key, __reduce_min_sync(~0u, best.key == key ? best.index : kNone.index)};
#else
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Best other = {__shfl_xor_sync(~0u, best.key, offset), __shfl_xor_sync(~0u, best.index, offset)};
    if (better(other, best)) best = other;
  }
  return best;
#endif
}

// The best over all blocks, returned to every thread; the best of each warp stays in shared.warps[turn]. The other
// blocks must have begun.
__device__ Best best_of(Best best, int turn, Shared& shared) {
  const int lane = threadIdx.x % kWarp, own = block_rank() * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  best = best_of_warp(best);
  if (lane < block_count()) send_to_block(&shared.warps[turn][own], best, &shared.warps_arrived[turn], lane);
  await_blocks(&shared.warps_arrived[turn]);
  best = kNone;
  for (int i = lane; i < block_count() * kWarps; i += kWarp)
    if (better(shared.warps[turn][i], best)) best = shared.warps[turn][i];
  return best_of_warp(best);
}

// ---- the search -----------------------------------------------------------------------------------------------------

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

// Calls each(i, slot) for a thread's part of the row, all threads of a warp together; i may be beyond the row's end.
// The slots of a block are numbered from 0, and each thread always has the same ones.
template <typename Each>
__device__ void for_each_own(int64_t vocabulary, const Each& each) {
  int64_t slot = threadIdx.x;
#pragma unroll 4
  for (int64_t start = block_rank() * kThreads; start < vocabulary; start += kStep) {
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

  // Keeps a thread's part of the row, and returns the largest of it. To be called before x().
  __device__ Best load(int64_t vocabulary) const {
    constexpr int kAtOnce = kKept / kThreads;  // on their way
    float largest = -INFINITY;
    int at = kNone.index;
    int slot = static_cast<int>(threadIdx.x);
    for (int64_t i = block_rank() * kThreads + slot; i < vocabulary; i += kAtOnce * kStep, slot += kAtOnce * kThreads) {
      const T* const from = logits_ + i;
      const int left = static_cast<int>(vocabulary - i);
      T logits[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (k * kStep < left) logits[k] = from[k * kStep];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (k * kStep >= left) break;
        const float x = scale(logits[k]);
        if (slot < kKept) kept_[slot + k * kThreads] = x;
        if (x > largest || at == kNone.index) at = static_cast<int>(i) + k * kStep;
        largest = max_or_nan(largest, x);
      }
    }
    return {at == kNone.index ? kNone.key : key_of(largest), at};
  }
  __device__ float x(int64_t i, int64_t slot) const { return slot < kKept ? kept_[slot] : scale(logits_[i]); }
  __device__ uint32_t key(int64_t i, int64_t slot) const { return key_of(x(i, slot)); }
  __device__ float noise(int64_t i) const { return noise_[i]; }
  __device__ bool has_noise() const { return noise_ != nullptr; }
  // Asks for the noise in the L2 cache: it may have been written long ago.
  __device__ void prefetch_noise(int64_t vocabulary) const {
    if (!noise_) return;
    for_each_own(vocabulary, [&](int64_t i, int64_t) {
      if (i < vocabulary) asm volatile("prefetch.global.L2 [%0];" ::"l"(noise_ + i));
    });
  }

 private:
  __device__ float scale(T logit) const {
    const float value = static_cast<float>(widen(logit));
    return temperature_ == 1.0f ? value : value / temperature_;
  }

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

// The k-th largest of kGroups maxima, each of an equal number of warps; NaN, which nothing is below, if some that had
// none are among these k.
template <int kGroups>
__device__ float kth_largest(int64_t k, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x), each = block_count() * kWarps / kGroups;
  if (thread < kGroups) {
    uint32_t largest = 0;
    for (int i = 0; i < each; ++i) largest = max(largest, shared.warps[0][thread * each + i].key);
    shared.keys[thread] = largest;
  }
  __syncthreads();
  // Some threads for each: how many are larger?
  constexpr int kTeam = kThreads / kGroups < kWarp ? kThreads / kGroups : kWarp;
  if (thread / kTeam < kGroups) {
    const uint32_t own = shared.keys[thread / kTeam];
    unsigned larger = 0;
#pragma unroll
    for (int i = thread % kTeam; i < kGroups; i += kTeam) larger += shared.keys[i] > own;
#pragma unroll
    for (int offset = 1; offset < kTeam; offset *= 2) larger += __shfl_xor_sync(~0u, larger, offset);
    uint32_t least = larger < k ? own : ~0u;
#if __CUDA_ARCH__ >= 800
    least = __reduce_min_sync(~0u, least);
    if (thread % kWarp == 0)
#endif
      atomicMin(&shared.least, least);
  }
  __syncthreads();
  return value_of(shared.least);
}

// Whether top_k left few enough candidates; if so, the first block has them.
template <typename T>
__device__ bool find_candidates(const Sample<T>& p, const Row<T>& row, Shared& shared) {
  // Fewer groups are ranked sooner, but leave more candidates: with 64, 62 for the 40 largest in random places, not 44.
  constexpr int kFew = 64, kMostOfFew = 48;
  constexpr int blocks = block_count(), room = kCandidates / blocks;
  const int rank = block_rank();
  if (p.top_k > blocks * kWarps) return false;
  const bool few = p.top_k <= kMostOfFew && p.vocabulary >= int64_t{blocks} * kThreads;
  const float least = blocks < kBlocks ? kth_largest<kWarps>(p.top_k, shared)
                      : few            ? kth_largest<kFew>(p.top_k, shared)
                                       : kth_largest<kBlocks * kWarps>(p.top_k, shared);
  for_each_own(p.vocabulary, [&](int64_t i, int64_t slot) {
    if (i >= p.vocabulary || row.x(i, slot) < least) return;
    const int at = static_cast<int>(atomicAdd(&shared.count, 1u));
    if (at >= room) return;
    send_to_block(&shared.candidates.x[rank * room + at], row.x(i, slot), &shared.candidates_arrived, 0);
    send_to_block(&shared.candidates.index[rank * room + at], static_cast<int>(i), &shared.candidates_arrived, 0);
  });
  __syncthreads();
  if (const int to = static_cast<int>(threadIdx.x); to < blocks) {
    const unsigned sent = to == 0 ? min(shared.count, static_cast<unsigned>(room)) * 8 : 0;
    send_to_block(&shared.counts[rank], shared.count, &shared.candidates_arrived, to);
    announce_to_block(&shared.candidates_arrived, sent + sizeof(unsigned), to);
  }
  await_blocks(&shared.candidates_arrived);
  bool fit = true;
  for (int from = 0; from < blocks; ++from) fit = fit && shared.counts[from] <= static_cast<unsigned>(room);
  return fit;
}

// Calls each(x) for the candidates, which are at the beginning of `kept`, and up to three times more for -infinity.
template <typename Each>
__device__ void for_each_candidate(const Shared& shared, int count, const Each& each) {
#pragma unroll 4
  for (int i = 0; i < count; i += 4) {
    const float4 x = *reinterpret_cast<const float4*>(shared.kept + i);
    each(x.x);
    each(x.y);
    each(x.z);
    each(x.w);
  }
}

// By the first block, of its candidates.
template <typename T>
__device__ int draw_candidate(const Sample<T>& p, const Row<T>& row, float largest, Shared& shared) {
  constexpr int kRoom = kCandidates / block_count();
  const int thread = static_cast<int>(threadIdx.x), from = thread / kRoom;
  const bool is_one = thread % kRoom < static_cast<int>(shared.counts[from]);
  const float x = is_one ? shared.candidates.x[thread] : -INFINITY;
  const int index = is_one ? shared.candidates.index[thread] : kNone.index;
  const float noise = is_one ? row.noise(index) : 1.0f;
  // One after another, without the gaps, in the place of what is kept of the row.
  int count = 0, own = thread % kRoom;
#pragma unroll
  for (int k = 0; k < block_count(); ++k) {
    own += k < from ? static_cast<int>(shared.counts[k]) : 0;
    count += static_cast<int>(shared.counts[k]);
  }
  if (is_one) shared.kept[own] = x;
  if (thread < 3) shared.kept[count + thread] = -INFINITY;
  __syncthreads();
  int larger = 0;
  if (is_one) for_each_candidate(shared, count, [&](float other) { larger += other > x; });
  bool left = is_one && larger < p.top_k;
  if (p.top_p < 1) {
    const Count total = block_sum_of(left ? probability_units(x, largest) : 0u, shared);
    const Count wanted = wanted_units(p, total);
    Count before = 0;
    if (left)
      for_each_candidate(shared, count, [&](float other) {
        if (other > x) before += probability_units(other, largest);
      });
    left = left && before < wanted;
  }
  Best best = kNone;
  if (left) best = {key_of(expf(x - largest) / noise), index};
  best = best_of_warp(best);
  if (threadIdx.x % kWarp == 0) shared.warps[1][threadIdx.x / kWarp] = best;
  __syncthreads();
  return best_of_warp(shared.warps[1][threadIdx.x % kWarp]).index;
}

// The token, or -1; to be used by the first block.
template <typename T>
__device__ int draw(const Sample<T>& p, const Row<T>& row, Shared& shared) {
  Best own = row.load(p.vocabulary);
  all_blocks_wait();  // all have begun
  const Best best = best_of(own, 0, shared);
  const float largest = value_of(best.key);
  if (!isfinite(largest)) return -1;
  if (!row.has_noise()) return best.index;
  const auto key = [&](int64_t i, int64_t slot) { return row.key(i, slot); };
  uint32_t threshold = 0;
  if (p.top_k < p.vocabulary) {
    if (find_candidates(p, row, shared)) return block_rank() == 0 ? draw_candidate(p, row, largest, shared) : 0;
    threshold = search(
        p.vocabulary, key, [](int64_t, int64_t, bool) { return One{}; },
        [&](Count) { return static_cast<Count>(p.top_k); }, shared);
  }
  if (p.top_p < 1) {
    const auto units = [&](int64_t i, int64_t slot, bool active) {
      return active && key(i, slot) >= threshold ? probability_units(row.x(i, slot), largest) : 0u;
    };
    threshold = search(p.vocabulary, key, units, [&](Count total) { return wanted_units(p, total); }, shared);
  }
  own = kNone;
  for_each_own(p.vocabulary, [&](int64_t i, int64_t slot) {
    if (i >= p.vocabulary) return;
    const float value = key(i, slot) >= threshold ? expf(row.x(i, slot) - largest) / row.noise(i) : -1.0f;
    const Best other = {key_of(value), static_cast<int>(i)};
    if (better(other, own)) own = other;
  });
  return best_of(own, 1, shared).index;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ Sample<T> p) {
  __shared__ Shared shared;
  if (threadIdx.x == 0) begin(shared);
  __syncthreads();
  all_blocks_arrive();
  const int64_t b = blockIdx.x / block_count();
  const Row<T> row(p, b, shared.kept);
  row.prefetch_noise(p.vocabulary);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t length = p.lengths[b];
  const int token = draw(p, row, shared);
  if (block_rank() != 0 || threadIdx.x != 0) return;
  if (length < 0 || length >= p.sequence_length) {
    device_fail("sample_", "a sequence is full", "length %lld of sequence %lld is not from 0 to %lld\n",
                static_cast<long long>(length), static_cast<long long>(b),
                static_cast<long long>(p.sequence_length - 1));
    return;
  }
  p.sequences[b * p.sequence_length + length] = token;
  p.lengths[b] = length + 1;
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
