// Draws the next token of each row of logits. One cluster of 8 blocks per row (one block below sm_90). The row is read
// once: x = logits / temperature stays in shared memory.
//
//   maxima[w] = max x of each warp; largest = max of the maxima
//   if not finite(largest): return -1
//   if no noise: return argmax
//   if top_k < V:
//     if top_k <= number of warps in the cluster:
//       bound = k-th largest of `maxima`                        not above the k-th largest x
//       if at most 128 elements per block have x >= bound:      slightly more than k in all for random logits
//         the first block gathers these candidates, ranks each by counting the larger candidates,
//         applies top_k and top_p, draws, and returns
//     threshold = radix search for the k-th largest x
//   if top_p < 1: threshold = radix search for the smallest x that top_p keeps, among those not below threshold
//   return argmax of exp(x - largest) / noise over x >= threshold
//
// A radix search builds a histogram of the first 8 bits over all x, then of the next 8 bits over the x that share the
// digit found, and so on: four passes. Weights are integers, so the sums have the same bits in any order.
//
// Blocks send each other results through distributed shared memory and wait on mbarriers that count bytes, which is
// faster than a barrier of all threads of the cluster.
#include <cmath>

#include "../../sample.h"
#include "cuda/common/assert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/ptx/sm90.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 8;         // blocks per cluster
constexpr int kSlots = 8192;       // x per block in shared memory: 65536 per cluster; further logits are read again
constexpr int kCandidates = 1024;  // maximum per row, an equal share for each block
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
constexpr int kStep = block_count() * kThreads;  // distance between consecutive elements of a thread

// A barrier of all threads of the cluster, split in arrive and wait.
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

// Reads the same shared variable of block `rank` of the cluster.
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

// Writes 4 or 8 bytes to the same shared variable of block `rank`, whose mbarrier `arrived` counts them.
template <typename V>
__device__ void send_to_block(V* shared, const V& value, [[maybe_unused]] uint64_t* arrived,
                              [[maybe_unused]] int rank) {
#if __CUDA_ARCH__ >= 900
  store_in_block(shared, value, arrived, rank);
#else
  *shared = value;
#endif
}

// Announces to the mbarrier `arrived` of block `rank` how many bytes this block sends.
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

// Waits until all announced bytes have arrived in this block. Below sm_90 it is a block barrier.
__device__ void await_blocks([[maybe_unused]] uint64_t* arrived) {
#if __CUDA_ARCH__ >= 900
  mbarrier_wait(arrived, 0);
  __syncwarp();
#else
  __syncthreads();
#endif
}

// ---- reductions -----------------------------------------------------------------------------------------------------

// Maps x to an unsigned integer with the same order; NaN maps to the largest.
__device__ uint32_t key_of(float x) {
  if (isnan(x)) return ~0u;
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// Returns NaN if one of the arguments is NaN.
__device__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return isnan(a) || a > b ? a : b;
#endif
}

// A key with the index of its element.
struct alignas(8) KeyIndex {
  uint32_t key;
  int index;
};
constexpr KeyIndex kNoKeyIndex = {0, 0x7FFFFFFF};

// True if a's key is larger, or the keys are equal and a's index is lower.
__device__ bool precedes(const KeyIndex& a, const KeyIndex& b) {
  return a.key > b.key || (a.key == b.key && a.index < b.index);
}

struct Candidates {
  alignas(16) float x[kCandidates];
  int index[kCandidates];
};

struct Shared {
  alignas(16) float kept[kSlots];
  KeyIndex warps[2][kBlocks * kWarps];  // maxima of all blocks' warps, one array for each of the two calls of row_max
  union {
    Count histograms[kPasses][kDigits];  // radix search
    Candidates candidates;               // top_k by candidates
  };
  union {
    Count totals[kDigits];                        // radix search: histogram summed over the blocks
    alignas(16) uint32_t keys[kBlocks * kWarps];  // top_k by candidates: maxima of the groups of warps
  };
  int digit;                 // radix search: the digit found in this pass
  Count requested;           // radix search: the weight still requested; also the accumulator of block_total
  unsigned count;            // number of candidates of this block
  uint32_t least;            // key of the k-th largest maximum
  unsigned counts[kBlocks];  // `count` of every block
  uint64_t warps_arrived[2], candidates_arrived;
};
static_assert(kDigits <= kThreads && kCandidates == kThreads);

// Initialises the mbarriers and counters. Called by one thread, before the block arrives at the first cluster barrier.
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
    mbarrier_expect(&arrived, static_cast<unsigned>(block_count() * kWarps * sizeof(KeyIndex)));
#endif
}

__device__ KeyIndex warp_max(KeyIndex best) {
#if __CUDA_ARCH__ >= 800
  const uint32_t key = __reduce_max_sync(~0u, best.key);
  return {key, __reduce_min_sync(~0u, best.key == key ? best.index : kNoKeyIndex.index)};
#else
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const KeyIndex other = {__shfl_xor_sync(~0u, best.key, offset), __shfl_xor_sync(~0u, best.index, offset)};
    if (precedes(other, best)) best = other;
  }
  return best;
#endif
}

// Reduces over all blocks and returns the result to every thread. The maximum of each warp stays in shared.warps[turn].
// All blocks must have called begin() before.
__device__ KeyIndex row_max(KeyIndex best, int turn, Shared& shared) {
  const int lane = threadIdx.x % kWarp, own = block_rank() * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  best = warp_max(best);
  if (lane < block_count()) send_to_block(&shared.warps[turn][own], best, &shared.warps_arrived[turn], lane);
  await_blocks(&shared.warps_arrived[turn]);
  best = kNoKeyIndex;
  for (int i = lane; i < block_count() * kWarps; i += kWarp)
    if (precedes(shared.warps[turn][i], best)) best = shared.warps[turn][i];
  return warp_max(best);
}

// ---- radix search ---------------------------------------------------------------------------------------------------

// Weight 1 for every element, for the search of the k-th largest.
struct UnitWeight {};

// Sums the weights of the lanes in the mask `peers`.
__device__ Count sum_of(unsigned peers, UnitWeight) {
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

// Lanes with the same digit sum their weights first, so that one of them makes the atomic addition: many x share their
// first bits.
template <typename Weight>
__device__ void add_to_histogram(Count* histogram, bool active, unsigned digit, Weight weight) {
  const unsigned all = __ballot_sync(~0u, active);
  if (!active) return;  // nearly all lanes after the first pass
  const unsigned peers = __match_any_sync(all, digit);
  const Count sum = sum_of(peers, weight);
  if (static_cast<int>(threadIdx.x % kWarp) == __ffs(peers) - 1) atomicAdd(histogram + digit, sum);
}

// Calls each(i, slot) for every element i of the row that this thread processes, and its slot in the block's shared
// memory. All lanes of a warp make the same number of calls, so i may be beyond the end of the row. A thread always
// gets the same elements.
template <typename Each>
__device__ void for_each_of_thread(int64_t vocabulary, const Each& each) {
  int64_t slot = threadIdx.x;
#pragma unroll 4
  for (int64_t start = block_rank() * kThreads; start < vocabulary; start += kStep) {
    each(start + threadIdx.x, slot);
    slot += kThreads;
  }
}

// Finds the largest digit d for which sum(totals[d..255]) >= shared.requested, and replaces shared.requested by the
// part of it that elements with the digit d must still contribute. Called by the first warp. In the first pass the
// requested weight is computed from the total.
template <typename Requested>
__device__ void find_digit(bool first, const Requested& requested_of, Shared& shared) {
  constexpr int kEach = kDigits / kWarp;  // digits per lane; lane 0 holds the largest
  const int lane = static_cast<int>(threadIdx.x), largest = kDigits - 1 - lane * kEach;
  Count requested = shared.requested, sum = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) sum += shared.totals[largest - k];
  Count before = sum;  // inclusive prefix sum over the lanes, made exclusive below
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Count other = __shfl_up_sync(~0u, before, offset);
    if (lane >= offset) before += other;
  }
  const Count total = __shfl_sync(~0u, before, kWarp - 1);
  if (first) requested = requested_of(total);
  before -= sum;
  if (before < requested && before + sum >= requested) {
    int digit = largest;
    while (before + shared.totals[digit] < requested) before += shared.totals[digit--];
    shared.digit = digit;
    shared.requested = requested - before;
  }
}

// Returns the largest key for which the weights of all elements with at least this key sum to the requested weight or
// more. The requested weight is requested_of(sum of all weights), from 1 to that sum.
template <typename Key, typename Weight, typename Requested>
__device__ uint32_t search(int64_t vocabulary, const Key& key, const Weight& weight, const Requested& requested_of,
                           Shared& shared) {
  for (int i = threadIdx.x; i < kPasses * kDigits; i += kThreads) shared.histograms[i / kDigits][i % kDigits] = 0;
  __syncthreads();
  uint32_t found = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const int shift = 24 - 8 * pass;
    Count* const histogram = shared.histograms[pass];
    for_each_of_thread(vocabulary, [&](int64_t i, int64_t slot) {
      const uint32_t own = i < vocabulary ? key(i, slot) : 0;
      // Two shifts, because a shift by 32 is undefined.
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
    if (threadIdx.x < kWarp) find_digit(pass == 0, requested_of, shared);
    __syncthreads();
    found |= static_cast<uint32_t>(shared.digit) << shift;
  }
  all_blocks_barrier();  // all blocks have read the histograms
  return found;
}

// ---- a row ----------------------------------------------------------------------------------------------------------

// Access to x = logits / temperature and the noise of a row.
template <typename T>
class Row {
 public:
  __device__ Row(const Sample<T>& p, int64_t row, float* kept)
      : kept_(kept),
        logits_(p.logits + row * p.logits_stride),
        noise_(p.noise ? p.noise + row * p.vocabulary : nullptr),
        temperature_(p.noise ? static_cast<float>(p.temperature) : 1.0f) {}

  // Stores the thread's elements in shared memory and returns the largest. Must be called before x().
  __device__ KeyIndex load(int64_t vocabulary) const {
    constexpr int kAtOnce = kSlots / kThreads;  // loads in flight per thread
    float largest = -INFINITY;
    int at = kNoKeyIndex.index;
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
        if (slot < kSlots) kept_[slot + k * kThreads] = x;
        if (x > largest || at == kNoKeyIndex.index) at = static_cast<int>(i) + k * kStep;
        largest = max_or_nan(largest, x);
      }
    }
    return {at == kNoKeyIndex.index ? kNoKeyIndex.key : key_of(largest), at};
  }
  __device__ float x(int64_t i, int64_t slot) const { return slot < kSlots ? kept_[slot] : scale(logits_[i]); }
  __device__ uint32_t key(int64_t i, int64_t slot) const { return key_of(x(i, slot)); }
  __device__ float noise(int64_t i) const { return noise_[i]; }
  __device__ bool has_noise() const { return noise_ != nullptr; }
  // Prefetches the noise into L2: if it was written long ago, it may have been evicted.
  __device__ void prefetch_noise(int64_t vocabulary) const {
    if (!noise_) return;
    for_each_of_thread(vocabulary, [&](int64_t i, int64_t) {
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

// exp(x - largest) as a multiple of 2^-31.
__device__ unsigned probability_units(float x, float largest) {
  return static_cast<unsigned>(rintf(expf(x - largest) * static_cast<float>(kSampleUnits)));
}

// Returns the weight that the elements kept by top_p must reach, at least 1.
template <typename T>
__device__ Count requested_units(const Sample<T>& p, Count total) {
  return max(static_cast<Count>(ceil(p.top_p * static_cast<double>(total))), Count{1});
}

// Sums over the block, and returns the sum to every thread.
__device__ Count block_total(unsigned value, Shared& shared) {
  if (threadIdx.x == 0) shared.requested = 0;
  __syncthreads();
  const Count sum = sum_of(~0u, value);
  if (threadIdx.x % kWarp == 0 && sum > 0) atomicAdd(&shared.requested, sum);
  __syncthreads();
  return shared.requested;
}

// Returns the k-th largest of kGroups maxima, each over an equal number of warps. It is not above the k-th largest x,
// because each of the first k groups has an x that is not below it. If fewer than k groups have an element, it returns
// NaN, and `x < NaN` excludes nothing.
template <int kGroups>
__device__ float kth_largest(int64_t k, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x), each = block_count() * kWarps / kGroups;
  if (thread < kGroups) {
    uint32_t largest = 0;
    for (int i = 0; i < each; ++i) largest = max(largest, shared.warps[0][thread * each + i].key);
    shared.keys[thread] = largest;
  }
  __syncthreads();
  // A team of threads per maximum counts how many are larger.
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

// Sends all elements that may be among the top_k to the first block. Returns false if they may not fit there.
template <typename T>
__device__ bool find_candidates(const Sample<T>& p, const Row<T>& row, Shared& shared) {
  // Fewer groups are ranked faster but leave more candidates: for top_k = 40 and random positions, 64 groups leave 62
  // candidates, 256 groups 44.
  constexpr int kFewGroups = 64, kMaxKForFewGroups = 48;
  constexpr int blocks = block_count(), room = kCandidates / blocks;
  const int rank = block_rank();
  if (p.top_k > blocks * kWarps) return false;
  const bool few = p.top_k <= kMaxKForFewGroups && p.vocabulary >= int64_t{blocks} * kThreads;
  const float least = blocks < kBlocks ? kth_largest<kWarps>(p.top_k, shared)
                      : few            ? kth_largest<kFewGroups>(p.top_k, shared)
                                       : kth_largest<kBlocks * kWarps>(p.top_k, shared);
  for_each_of_thread(p.vocabulary, [&](int64_t i, int64_t slot) {
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

// Calls each(x) for the `count` candidates at the start of `kept`, padded with -infinity to a multiple of 4.
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

// Draws a token from the candidates. Called by the first block; each thread owns the candidate with its index.
template <typename T>
__device__ int draw_candidate(const Sample<T>& p, const Row<T>& row, float largest, Shared& shared) {
  constexpr int kRoom = kCandidates / block_count();
  const int thread = static_cast<int>(threadIdx.x), from = thread / kRoom;
  const bool active = thread % kRoom < static_cast<int>(shared.counts[from]);
  const float x = active ? shared.candidates.x[thread] : -INFINITY;
  const int index = active ? shared.candidates.index[thread] : kNoKeyIndex.index;
  const float noise = active ? row.noise(index) : 1.0f;
  // Compact the candidates into `kept`, which is no longer needed for the row.
  int count = 0, own = thread % kRoom;
#pragma unroll
  for (int k = 0; k < block_count(); ++k) {
    own += k < from ? static_cast<int>(shared.counts[k]) : 0;
    count += static_cast<int>(shared.counts[k]);
  }
  if (active) shared.kept[own] = x;
  if (thread < 3) shared.kept[count + thread] = -INFINITY;
  __syncthreads();
  int larger = 0;
  if (active) for_each_candidate(shared, count, [&](float other) { larger += other > x; });
  bool left = active && larger < p.top_k;
  if (p.top_p < 1) {
    const Count total = block_total(left ? probability_units(x, largest) : 0u, shared);
    const Count requested = requested_units(p, total);
    Count before = 0;
    if (left)
      for_each_candidate(shared, count, [&](float other) {
        if (other > x) before += probability_units(other, largest);
      });
    left = left && before < requested;
  }
  KeyIndex best = kNoKeyIndex;
  if (left) best = {key_of(expf(x - largest) / noise), index};
  best = warp_max(best);
  if (threadIdx.x % kWarp == 0) shared.warps[1][threadIdx.x / kWarp] = best;
  __syncthreads();
  return warp_max(shared.warps[1][threadIdx.x % kWarp]).index;
}

// Returns the token, or -1 if there is a NaN or the largest x is not finite. Valid in the first block only.
template <typename T>
__device__ int draw(const Sample<T>& p, const Row<T>& row, Shared& shared) {
  KeyIndex own = row.load(p.vocabulary);
  all_blocks_wait();  // all blocks have called begin()
  const KeyIndex best = row_max(own, 0, shared);
  const float largest = value_of(best.key);
  if (!isfinite(largest)) return -1;
  if (!row.has_noise()) return best.index;
  const auto key = [&](int64_t i, int64_t slot) { return row.key(i, slot); };
  uint32_t threshold = 0;
  if (p.top_k < p.vocabulary) {
    if (find_candidates(p, row, shared)) return block_rank() == 0 ? draw_candidate(p, row, largest, shared) : 0;
    threshold = search(
        p.vocabulary, key, [](int64_t, int64_t, bool) { return UnitWeight{}; },
        [&](Count) { return static_cast<Count>(p.top_k); }, shared);
  }
  if (p.top_p < 1) {
    const auto units = [&](int64_t i, int64_t slot, bool active) {
      return active && key(i, slot) >= threshold ? probability_units(row.x(i, slot), largest) : 0u;
    };
    threshold = search(p.vocabulary, key, units, [&](Count total) { return requested_units(p, total); }, shared);
  }
  own = kNoKeyIndex;
  for_each_of_thread(p.vocabulary, [&](int64_t i, int64_t slot) {
    if (i >= p.vocabulary) return;
    const float value = key(i, slot) >= threshold ? expf(row.x(i, slot) - largest) / row.noise(i) : -1.0f;
    const KeyIndex other = {key_of(value), static_cast<int>(i)};
    if (precedes(other, own)) own = other;
  });
  return row_max(own, 1, shared).index;
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
  // Graph capture supports programmatic dependent launch from CUDA 12.3 on.
  config.numAttrs = !hopper ? 0 : CUDART_VERSION >= 12030 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kKernel, p);
}

#define GPTKERNELS_INSTANTIATE(T) template Status sample<T>(const Sample<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
