// Draws the next token of each row of logits, by a cluster of 8 thread blocks per row (one thread block below sm_90).
// Up to 8192 values of x per thread block stay in shared memory; each pass reads the other logits again.
//
//   x = logits / temperature
//   if max x is not finite: return -1
//   if there is no noise: return argmax x
//   if top_k < V:
//     if top_k <= the number of warps of the row's thread blocks:
//       bound = k-th largest of the maxima of groups of warps   not above the k-th largest x
//       candidates = all x >= bound                             for random logits slightly more than top_k
//       if no thread block has more than kRoom candidates, the first thread block does the rest:
//         keep a candidate if fewer than top_k candidates are larger
//         if top_p < 1: keep only candidates for which the larger ones have less than top_p of the kept probability
//         return argmax of exp(x - max x) / noise over the kept candidates
//     threshold = k-th largest x                              by radix search with weights 1
//   if top_p < 1: threshold = smallest x that top_p keeps     by radix search with weights exp(x - max x)
//   return argmax of exp(x - max x) / noise over x >= threshold
//
// The radix search finds the largest threshold such that the weights of all keys >= threshold sum to at least
// `requested`:
//
//   for each of the threshold's four digits, which have 8 bits, the highest first:
//     histogram[d] = sum of the weights of all keys that begin with the digits found so far, followed by d
//     digit = largest d with sum(histogram[d..255]) >= requested;  requested -= sum(histogram[d+1..255])
//
// Keys are uint32_t that have the order of x. Weights are integers, so their sums have the same bits in any order.
// Thread blocks send maxima and candidates through distributed shared memory; mbarriers that count the bytes are faster
// than cluster barriers.
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
constexpr int kBlocks = 8;    // cluster size
constexpr int kSlots = 8192;  // x in shared memory
constexpr int kCandidates = 1024;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kPasses = 32 / kDigitBits;
using Count = unsigned long long;

// ---- the thread blocks of a row -------------------------------------------------------------------------------------

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
constexpr int kStep = block_count() * kThreads;
constexpr int kRoom = kCandidates / block_count();  // candidates per thread block

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

__device__ Count read_block(const Count* shared, [[maybe_unused]] int rank) {
#if __CUDA_ARCH__ >= 900
  Count value;
  asm volatile("ld.shared::cluster.b64 %0, [%1];" : "=l"(value) : "r"(in_block(shared, rank)));
  return value;
#else
  return *shared;
#endif
}

// The mbarrier `arrived` of the receiving thread block counts the 4 or 8 bytes.
template <typename V>
__device__ void send_to_block(V* shared, const V& value, [[maybe_unused]] uint64_t* arrived,
                              [[maybe_unused]] int rank) {
#if __CUDA_ARCH__ >= 900
  store_in_block(shared, value, arrived, rank);
#else
  *shared = value;
#endif
}

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

__device__ void await_blocks([[maybe_unused]] uint64_t* arrived) {
#if __CUDA_ARCH__ >= 900
  mbarrier_wait(arrived, 0);
  __syncwarp();
#else
  __syncthreads();
#endif
}

// ---- keys and their maxima ------------------------------------------------------------------------------------------

// NaN has the largest key.
__device__ uint32_t key_of(float x) {
  if (isnan(x)) return ~0u;
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

__device__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

struct alignas(8) KeyIndex {
  uint32_t key;
  int index;
};
constexpr KeyIndex kNoKeyIndex = {0, 0x7FFFFFFF};

__device__ bool precedes(const KeyIndex& a, const KeyIndex& b) {
  return a.key > b.key || (a.key == b.key && a.index < b.index);
}

// Thread block 0 holds all candidates; those of thread block b begin at index b * kRoom.
struct Candidates {
  alignas(16) float x[kCandidates];
  int index[kCandidates];
};

struct Shared {
  alignas(16) float x[kSlots];
  KeyIndex warp_maxima[2][kBlocks * kWarps];  // for two calls of row_max()
  union {
    Count histograms[kPasses][kDigits];  // of this thread block
    Candidates candidates;
  };
  union {
    Count histogram[kDigits];                             // of the row
    alignas(16) uint32_t group_maxima[kBlocks * kWarps];  // largest keys
  };
  int digit;                           // radix search: found in this pass
  Count requested;                     // radix search: remaining weight; also the sum of block_total()
  unsigned candidate_count;            // of this thread block
  uint32_t bound;                      // k-th largest group_maxima
  unsigned candidate_counts[kBlocks];  // of every thread block
  uint64_t maxima_arrived[2], candidates_arrived;
};
static_assert(kDigits <= kThreads && kCandidates == kThreads);

// Must precede the thread block's first arrival at the cluster barrier.
__device__ void init_shared(Shared& shared) {
  shared.candidate_count = 0;
  shared.bound = ~0u;
#if __CUDA_ARCH__ >= 900
  for (uint64_t& arrived : shared.maxima_arrived) mbarrier_init(&arrived);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&shared.candidates_arrived)),
               "r"(block_count())
               : "memory");
  mbarrier_init_fence();
  for (uint64_t& arrived : shared.maxima_arrived)
    mbarrier_expect(&arrived, static_cast<unsigned>(block_count() * kWarps * sizeof(KeyIndex)));
#endif
}

__device__ KeyIndex warp_max(KeyIndex best) {
  const uint32_t key = __reduce_max_sync(~0u, best.key);
  return {key, __reduce_min_sync(~0u, best.key == key ? best.index : kNoKeyIndex.index)};
}

// The maximum over the cluster. All thread blocks must have called init_shared() before.
__device__ KeyIndex row_max(KeyIndex best, int call, Shared& shared) {
  const int lane = threadIdx.x % kWarp, warp = block_rank() * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  best = warp_max(best);
  if (lane < block_count()) send_to_block(&shared.warp_maxima[call][warp], best, &shared.maxima_arrived[call], lane);
  await_blocks(&shared.maxima_arrived[call]);
  best = kNoKeyIndex;
  for (int i = lane; i < block_count() * kWarps; i += kWarp)
    if (precedes(shared.warp_maxima[call][i], best)) best = shared.warp_maxima[call][i];
  return warp_max(best);
}

// ---- a row of logits ------------------------------------------------------------------------------------------------

// Calls each(i, slot) for the thread's logits, which are the same in every pass, and their slots in shared memory. i
// may be beyond the row, because all lanes of a warp make the same number of calls.
template <typename Each>
__device__ void for_each_logit(int64_t vocabulary, const Each& each) {
  int64_t slot = threadIdx.x;
#pragma unroll 4
  for (int64_t start = block_rank() * kThreads; start < vocabulary; start += kStep) {
    each(start + threadIdx.x, slot);
    slot += kThreads;
  }
}

template <typename T>
class Row {
 public:
  __device__ Row(const Sample<T>& p, int64_t row, float* shared_x)
      : shared_x_(shared_x),
        logits_(p.logits + row * p.logits_stride),
        noise_(p.noise ? p.noise + row * p.vocabulary : nullptr),
        temperature_(p.noise ? static_cast<float>(p.temperature) : 1.0f) {}

  __device__ KeyIndex load(int64_t vocabulary) const {
    constexpr int kAtOnce = kSlots / kThreads;
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
        if (slot < kSlots) shared_x_[slot + k * kThreads] = x;
        if (x > largest || at == kNoKeyIndex.index) at = static_cast<int>(i) + k * kStep;
        largest = max_or_nan(largest, x);
      }
    }
    return {at == kNoKeyIndex.index ? kNoKeyIndex.key : key_of(largest), at};
  }
  __device__ float x(int64_t i, int64_t slot) const { return slot < kSlots ? shared_x_[slot] : scale(logits_[i]); }
  __device__ uint32_t key(int64_t i, int64_t slot) const { return key_of(x(i, slot)); }
  __device__ float noise(int64_t i) const { return noise_[i]; }
  __device__ bool has_noise() const { return noise_ != nullptr; }
  // The noise may have been written long ago, and evicted from L2.
  __device__ void prefetch_noise(int64_t vocabulary) const {
    if (!noise_) return;
    for_each_logit(vocabulary, [&](int64_t i, int64_t) {
      if (i < vocabulary) asm volatile("prefetch.global.L2 [%0];" ::"l"(noise_ + i));
    });
  }

 private:
  __device__ float scale(T logit) const {
    const float value = static_cast<float>(widen(logit));
    return temperature_ == 1.0f ? value : value / temperature_;
  }

  float* shared_x_;
  const T* logits_;
  const float* noise_;
  float temperature_;
};

// ---- radix search ---------------------------------------------------------------------------------------------------

struct UnitWeight {};

__device__ Count sum_of(unsigned lanes, UnitWeight) {
  return __popc(lanes);
}

__device__ Count sum_of(unsigned lanes, unsigned weight) {
  // Two sums of 16-bit parts, because a sum of 32-bit weights may overflow.
  return __reduce_add_sync(lanes, weight & 0xFFFFu) + (Count{__reduce_add_sync(lanes, weight >> 16)} << 16);
}

// Lanes with the same digit share one atomic addition, because many x have the same first bits.
template <typename Weight>
__device__ void add_to_histogram(Count* histogram, bool active, unsigned digit, Weight weight) {
  const unsigned all = __ballot_sync(~0u, active);
  if (!active) return;  // after the first pass, nearly all lanes return here
  const unsigned same_digit = __match_any_sync(all, digit);
  const Count sum = sum_of(same_digit, weight);
  if (static_cast<int>(threadIdx.x % kWarp) == __ffs(same_digit) - 1) atomicAdd(histogram + digit, sum);
}

// Called by the first warp. The first pass computes `requested` from the sum of all weights.
template <typename Requested>
__device__ void find_digit(bool first_pass, const Requested& requested_of, Shared& shared) {
  constexpr int kEach = kDigits / kWarp;  // lane 0 has the largest digits
  const int lane = static_cast<int>(threadIdx.x), largest = kDigits - 1 - lane * kEach;
  Count requested = shared.requested, sum = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) sum += shared.histogram[largest - k];
  Count prefix_sum = sum;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Count other = __shfl_up_sync(~0u, prefix_sum, offset);
    if (lane >= offset) prefix_sum += other;
  }
  const Count total = __shfl_sync(~0u, prefix_sum, kWarp - 1);
  if (first_pass) requested = requested_of(total);
  Count above = prefix_sum - sum;
  if (above < requested && above + sum >= requested) {
    int digit = largest;
    while (above + shared.histogram[digit] < requested) above += shared.histogram[digit--];
    shared.digit = digit;
    shared.requested = requested - above;
  }
}

// weight(i, slot, active) is the weight of logit i; its value is not used unless `active`.
template <typename T, typename Weight, typename Requested>
__device__ uint32_t radix_search(int64_t vocabulary, const Row<T>& row, const Weight& weight,
                                 const Requested& requested_of, Shared& shared) {
  for (int i = threadIdx.x; i < kPasses * kDigits; i += kThreads) shared.histograms[i / kDigits][i % kDigits] = 0;
  __syncthreads();
  uint32_t found = 0;  // digits so far, then zeros
  for (int pass = 0; pass < kPasses; ++pass) {
    const int shift = 32 - kDigitBits * (pass + 1);
    Count* const histogram = shared.histograms[pass];
    for_each_logit(vocabulary, [&](int64_t i, int64_t slot) {
      const uint32_t key = i < vocabulary ? row.key(i, slot) : 0;
      // Two shifts, because a shift by 32 is undefined.
      const bool active = i < vocabulary && (key >> shift >> kDigitBits) == (found >> shift >> kDigitBits);
      add_to_histogram(histogram, active, key >> shift & (kDigits - 1), weight(i, slot, active));
    });
    all_blocks_barrier();
    if (threadIdx.x < kDigits) {
      Count sum = 0;
      for (int rank = 0; rank < block_count(); ++rank) sum += read_block(histogram + threadIdx.x, rank);
      shared.histogram[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x < kWarp) find_digit(pass == 0, requested_of, shared);
    __syncthreads();
    found |= static_cast<uint32_t>(shared.digit) << shift;
  }
  all_blocks_barrier();  // all thread blocks have read the histograms
  return found;
}

// ---- top_p ----------------------------------------------------------------------------------------------------------

// exp(x - largest) in units of 2^-31.
__device__ unsigned probability_units(float x, float largest) {
  return static_cast<unsigned>(rintf(expf(x - largest) * static_cast<float>(kSampleUnits)));
}

template <typename T>
__device__ Count requested_units(const Sample<T>& p, Count total) {
  return max(static_cast<Count>(ceil(p.top_p * static_cast<double>(total))), Count{1});
}

__device__ Count block_total(unsigned value, Shared& shared) {
  if (threadIdx.x == 0) shared.requested = 0;
  __syncthreads();
  const Count sum = sum_of(~0u, value);
  if (threadIdx.x % kWarp == 0 && sum > 0) atomicAdd(&shared.requested, sum);
  __syncthreads();
  return shared.requested;
}

// ---- candidates -----------------------------------------------------------------------------------------------------

// Returns the k-th largest of kGroups maxima, each over an equal number of warps. It is not above the k-th largest x,
// because each of the k largest maxima is an x. If fewer than k groups have logits, the result is NaN, and `x < NaN`
// excludes nothing.
template <int kGroups>
__device__ float kth_largest_maximum(int64_t k, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x), each = block_count() * kWarps / kGroups;
  if (thread < kGroups) {
    uint32_t largest = 0;
    for (int i = 0; i < each; ++i) largest = max(largest, shared.warp_maxima[0][thread * each + i].key);
    shared.group_maxima[thread] = largest;
  }
  __syncthreads();
  // Each team of kTeam threads counts the maxima that are larger than the team's own maximum.
  constexpr int kTeam = kThreads / kGroups < kWarp ? kThreads / kGroups : kWarp;
  if (thread / kTeam < kGroups) {
    const uint32_t key = shared.group_maxima[thread / kTeam];
    unsigned larger = 0;
#pragma unroll
    for (int i = thread % kTeam; i < kGroups; i += kTeam) larger += shared.group_maxima[i] > key;
#pragma unroll
    for (int offset = 1; offset < kTeam; offset *= 2) larger += __shfl_xor_sync(~0u, larger, offset);
    const uint32_t least = __reduce_min_sync(~0u, larger < k ? key : ~0u);
    if (thread % kWarp == 0) atomicMin(&shared.bound, least);
  }
  __syncthreads();
  return value_of(shared.bound);
}

template <typename T>
__device__ float bound_of_top_k(const Sample<T>& p, Shared& shared) {
  // Fewer groups are ranked faster but leave more candidates: for top_k = 40 and random positions, 64 groups leave 62
  // on average, and 256 groups leave 43.
  constexpr int kFewGroups = 64, kMaxKForFewGroups = 48;
  if (block_count() < kBlocks) return kth_largest_maximum<kWarps>(p.top_k, shared);
  if (p.top_k <= kMaxKForFewGroups && p.vocabulary >= int64_t{block_count()} * kThreads)
    return kth_largest_maximum<kFewGroups>(p.top_k, shared);
  return kth_largest_maximum<kBlocks * kWarps>(p.top_k, shared);
}

// Sends the x that may be among the top_k to the first thread block. Returns false if a thread block has more than
// kRoom candidates, or if top_k exceeds the number of warps that process the row.
template <typename T>
__device__ bool find_candidates(const Sample<T>& p, const Row<T>& row, Shared& shared) {
  constexpr int blocks = block_count();
  const int rank = block_rank();
  if (p.top_k > blocks * kWarps) return false;
  const float bound = bound_of_top_k(p, shared);
  for_each_logit(p.vocabulary, [&](int64_t i, int64_t slot) {
    if (i >= p.vocabulary || row.x(i, slot) < bound) return;
    const int at = static_cast<int>(atomicAdd(&shared.candidate_count, 1u));
    if (at >= kRoom) return;
    send_to_block(&shared.candidates.x[rank * kRoom + at], row.x(i, slot), &shared.candidates_arrived, 0);
    send_to_block(&shared.candidates.index[rank * kRoom + at], static_cast<int>(i), &shared.candidates_arrived, 0);
  });
  __syncthreads();
  if (const int to = static_cast<int>(threadIdx.x); to < blocks) {
    const unsigned sent = to == 0 ? min(shared.candidate_count, static_cast<unsigned>(kRoom)) * 8 : 0;
    send_to_block(&shared.candidate_counts[rank], shared.candidate_count, &shared.candidates_arrived, to);
    announce_to_block(&shared.candidates_arrived, sent + sizeof(unsigned), to);
  }
  await_blocks(&shared.candidates_arrived);
  bool fit = true;
  for (int from = 0; from < blocks; ++from) fit = fit && shared.candidate_counts[from] <= static_cast<unsigned>(kRoom);
  return fit;
}

// Candidates are padded with -infinity to a multiple of 4.
template <typename Each>
__device__ void for_each_candidate(const Shared& shared, int count, const Each& each) {
#pragma unroll 4
  for (int i = 0; i < count; i += 4) {
    const float4 x = *reinterpret_cast<const float4*>(shared.x + i);
    each(x.x);
    each(x.y);
    each(x.z);
    each(x.w);
  }
}

// Copies the candidates to the start of shared.x, which is no longer needed for the row's x, and returns the number of
// candidates.
__device__ int compact_candidates(float x, bool active, int from, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  int count = 0, place = thread % kRoom;
#pragma unroll
  for (int rank = 0; rank < block_count(); ++rank) {
    place += rank < from ? static_cast<int>(shared.candidate_counts[rank]) : 0;
    count += static_cast<int>(shared.candidate_counts[rank]);
  }
  if (active) shared.x[place] = x;
  if (thread < 3) shared.x[count + thread] = -INFINITY;
  __syncthreads();
  return count;
}

template <typename T>
__device__ int draw_candidate(const Sample<T>& p, const Row<T>& row, float largest, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x), from = thread / kRoom;
  const bool active = thread % kRoom < static_cast<int>(shared.candidate_counts[from]);
  const float x = active ? shared.candidates.x[thread] : -INFINITY;
  const int index = active ? shared.candidates.index[thread] : kNoKeyIndex.index;
  const float noise = active ? row.noise(index) : 1.0f;
  const int count = compact_candidates(x, active, from, shared);
  int larger = 0;
  if (active) for_each_candidate(shared, count, [&](float other) { larger += other > x; });
  bool kept = active && larger < p.top_k;
  if (p.top_p < 1) {
    const Count total = block_total(kept ? probability_units(x, largest) : 0u, shared);
    const Count requested = requested_units(p, total);
    Count above = 0;
    if (kept)
      for_each_candidate(shared, count, [&](float other) {
        if (other > x) above += probability_units(other, largest);
      });
    kept = kept && above < requested;
  }
  KeyIndex best = kNoKeyIndex;
  if (kept) best = {key_of(expf(x - largest) / noise), index};
  best = warp_max(best);
  if (threadIdx.x % kWarp == 0) shared.warp_maxima[1][threadIdx.x / kWarp] = best;
  __syncthreads();
  return warp_max(shared.warp_maxima[1][threadIdx.x % kWarp]).index;
}

// ---- the draw -------------------------------------------------------------------------------------------------------

// Returns -1 if there is a NaN or the largest x is not finite. The result is valid only in the first thread block.
template <typename T>
__device__ int draw(const Sample<T>& p, const Row<T>& row, Shared& shared) {
  KeyIndex own = row.load(p.vocabulary);
  all_blocks_wait();  // all thread blocks have called init_shared()
  const KeyIndex best = row_max(own, 0, shared);
  const float largest = value_of(best.key);
  if (!isfinite(largest)) return -1;
  if (!row.has_noise()) return best.index;
  uint32_t threshold = 0;
  if (p.top_k < p.vocabulary) {
    if (find_candidates(p, row, shared)) return block_rank() == 0 ? draw_candidate(p, row, largest, shared) : 0;
    threshold = radix_search(
        p.vocabulary, row, [](int64_t, int64_t, bool) { return UnitWeight{}; },
        [&](Count) { return static_cast<Count>(p.top_k); }, shared);
  }
  if (p.top_p < 1) {
    const auto units = [&](int64_t i, int64_t slot, bool active) {
      return active && row.key(i, slot) >= threshold ? probability_units(row.x(i, slot), largest) : 0u;
    };
    threshold = radix_search(p.vocabulary, row, units, [&](Count total) { return requested_units(p, total); }, shared);
  }
  own = kNoKeyIndex;
  for_each_logit(p.vocabulary, [&](int64_t i, int64_t slot) {
    if (i >= p.vocabulary) return;
    const float value = row.key(i, slot) >= threshold ? expf(row.x(i, slot) - largest) / row.noise(i) : -1.0f;
    const KeyIndex other = {key_of(value), static_cast<int>(i)};
    if (precedes(other, own)) own = other;
  });
  return row_max(own, 1, shared).index;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ Sample<T> p) {
  __shared__ Shared shared;
  if (threadIdx.x == 0) init_shared(shared);
  __syncthreads();
  all_blocks_arrive();
  const int64_t b = blockIdx.x / block_count();
  const Row<T> row(p, b, shared.x);
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
