// Softmax over the rows of a matrix, and its backward: over whole rows, or over the columns that the causal mask
// leaves.
//
// Every input is read once and the output written once, so the time is that of the bytes, if only enough of them are
// under way at any time. Where a row stays between its load and its store:
//
//   up to 128 packs of 16 bytes    in registers of 8, 16 or 32 lanes                softmax_*_lanes_kernel
//   up to 4096 packs (64 KB)       in registers of a block                          softmax_*_block_kernel
//   up to about 160 KB             in registers and shared memory of a block        softmax_*_block_kernel
//   up to 4 MB (from sm_90 on)     in those of a cluster of up to 16 blocks         softmax_*_cluster_kernel
//   else                           nowhere: read in each pass (wide_row.cuh)        softmax_*_simple_kernel
//
// A thread writes only columns that it has read itself, so the output may take the place of an input.
#pragma once

#include <cuda_pipeline.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "approximate.cuh"
#include "hopper.cuh"
#include "launch.cuh"
#include "packed.cuh"
#include "reduce.cuh"
#include "row.cuh"
#include "softmax_sum.cuh"
#include "wide_row.cuh"

namespace gptkernels::cuda {

// ---------------------------------------------------------------------------------------------------------------------
// Where the warps that share a row make one value of theirs, once a kernel: meeting(value, merge), where merge(value)
// gives every lane what the values of a warp's lanes make together.

constexpr int kMostBlocks = 16;  // of a cluster

struct NoMeeting {
  template <typename V, typename Merge>
  __device__ void operator()(V&, const Merge&) {}
};

template <typename V>
struct BlockMeeting {
  template <typename Merge>
  __device__ void operator()(V& value, const Merge& merge) {
    __shared__ V values[kWarp];
    const int lane = threadIdx.x % kWarp;
    if (lane == 0) values[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = lane < static_cast<int>(blockDim.x) / kWarp ? values[lane] : V();
    merge(value);
  }
};

#if GPTKERNELS_HOPPER
// Each block sends its value to all and waits for theirs. That every block is there to be sent to is found out while
// the row is on its way: the meeting is made before the loads.
template <typename V>
class ClusterMeeting {
 public:
  __device__ ClusterMeeting() {
    if (threadIdx.x == 0) {
      mbarrier_init(&shared().met);
      mbarrier_init_fence();
      mbarrier_expect(&shared().met, cluster_blocks() * sizeof(V));
    }
    cluster_arrive();
  }

  template <typename Merge>
  __device__ void operator()(V& value, const Merge& merge) {
    BlockMeeting<V>()(value, merge);
    cluster_wait();
    if (threadIdx.x < cluster_blocks())
      store_in_block(&shared().values[cluster_rank()], value, &shared().met, threadIdx.x);
    mbarrier_wait(&shared().met, 0);
    const unsigned lane = threadIdx.x % kWarp;
    value = lane < cluster_blocks() ? shared().values[lane] : V();
    merge(value);
  }

 private:
  struct Shared {
    V values[kMostBlocks];
    uint64_t met;
  };
  static __device__ Shared& shared() {
    __shared__ Shared shared;
    return shared;
  }
};
#endif

// A row and the threads that share it: kLanes neighbours in a warp, a block, or the blocks of a cluster.

// Of a block whose rows have lanes. Small blocks come and go most evenly.
template <int kItems>
constexpr int kLanesThreads = kItems == 1 ? 128 : 64;

template <int kLanes, int kThreads>
struct Lanes {
  static constexpr int kOfWarp = kLanes;
  static constexpr bool kOneWarp = true;
  template <typename V>
  using Meeting = NoMeeting;
  static __device__ int64_t row() { return int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes; }
  static __device__ int thread() { return threadIdx.x % kLanes; }
  static __device__ int threads() { return kLanes; }
};

struct Block {
  static constexpr int kOfWarp = kWarp;
  static constexpr bool kOneWarp = false;
  template <typename V>
  using Meeting = BlockMeeting<V>;
  static __device__ int64_t row() { return blockIdx.x; }
  static __device__ int thread() { return threadIdx.x; }
  static __device__ int threads() { return blockDim.x; }
};

#if GPTKERNELS_HOPPER
struct Cluster {
  static constexpr int kOfWarp = kWarp;
  static constexpr bool kOneWarp = false;
  template <typename V>
  using Meeting = ClusterMeeting<V>;
  static __device__ int64_t row() { return blockIdx.x / cluster_blocks(); }
  static __device__ int thread() { return cluster_rank() * blockDim.x + threadIdx.x; }
  static __device__ int threads() { return cluster_blocks() * blockDim.x; }
};
#endif

// How many of a row's columns take part: all, or under the causal mask those up to the diagonal of its square matrix.
template <bool kCausal, typename Index>
__device__ Index columns_of(Index row, Index width) {
  return kCausal ? row % width + 1 : width;
}

// A thread's columns of its row: every threads()-th pack, and at most one single element. Packs lie at multiples of 16
// bytes wherever the row begins. What is left before the first and behind the last of them, less than a pack each, are
// the singles of the row's first 2 * kVec threads; where there are none (kSingles = false) nobody looks for them. Packs
// may also begin with those before the row that share a 128-byte line with its first one (kLines): no thread has these,
// but the packs of a warp fill whole lines, which no two warps then write parts of.
template <typename T, typename Team, bool kSingles, bool kCausal, bool kLines>
class RowColumns {
 public:
  static constexpr int kVec = kPack<T>;
  static constexpr int kLine = 128 / sizeof(T);
  static constexpr bool kMasked = kCausal;

  // Of a row of one of so many rows that begin at `base`; beyond the last row there are no columns.
  __device__ RowColumns(const T* base, int64_t rows, int64_t width) : begin_(Team::row() * width) {
    if (Team::row() >= rows) width = 0;
    width_ = static_cast<int>(width);
    columns_ =
        kCausal && width ? columns_of<true>(static_cast<unsigned>(Team::row()), static_cast<unsigned>(width)) : width_;
    const int thread = Team::thread();
    const int head = kSingles ? min(elements_to(kVec, base + begin_), width_) : 0;
    const int before = kLines ? (kLine - elements_to(kLine, base + begin_ + head)) % kLine : 0;
    first_ = head - before + thread * kVec;
    end_ = kSingles ? head + (width_ - head) / kVec * kVec : width_;
    if (kSingles) single_ = thread >= kVec ? end_ + thread - kVec : thread < head ? thread : width_;
  }

  __device__ int64_t begin() const { return begin_; }  // of the row

  // Pack i: its first column, whether the row has it, whether any of it takes part.
  __device__ int column(int i) const { return first_ + i * Team::threads() * kVec; }
  __device__ bool has(int i) const { return within(column(i), end_); }
  __device__ bool counts(int i) const { return within(column(i), kCausal ? min(columns_, end_) : end_); }

  __device__ int single() const { return single_; }
  __device__ bool has_single() const { return kSingles && single_ < width_; }
  __device__ bool single_counts() const { return kSingles && single_ < (kCausal ? columns_ : width_); }

  // Replaces what the mask hides of pack i.
  template <typename Element>
  __device__ void mask(Element (&x)[kVec], int i, Element by) const {
    if constexpr (kCausal) {
      if (column(i) + kVec <= columns_) return;
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        if (column(i) + k >= columns_) x[k] = by;
    }
  }

 private:
  // From p to the next multiple of so many.
  static __device__ int elements_to(int multiple, const T* p) {
    return static_cast<int>(-reinterpret_cast<uintptr_t>(p) / sizeof(T) % multiple);
  }

  static __device__ bool within(int column, int end) {
    return kLines ? static_cast<unsigned>(column) < static_cast<unsigned>(end) : column < end;
  }

  int64_t begin_;
  int width_;
  int columns_;  // that take part
  int first_;
  int end_;
  int single_ = 0;
};

// What a thread has loaded of a row, as it is in memory: 16-bit types take half the registers of their accumulators.
// Its first kItems packs are in registers, what may come behind them (kMore) in the thread's own places of shared
// memory.
template <typename T, int kItems, bool kMore>
class RowPart {
 public:
  static constexpr int kVec = kPack<T>;

  // Every load is under way before anything waits for one: bandwidth is bytes in flight. `places` are the block's, one
  // for each thread and pack beyond kItems.
  template <typename Columns>
  __device__ RowPart(const T* base, const Columns& at, void* places) : more_(static_cast<Packed<T, kVec>*>(places)) {
    const T* row = base + at.begin();
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (at.counts(i)) packs_[i] = load<kVec>(row + at.column(i));
    if constexpr (kMore) {
      for (int i = kItems; at.counts(i); ++i) __pipeline_memcpy_async(place(i), row + at.column(i), sizeof(*more_));
      __pipeline_commit();
    }
    if (at.single_counts()) single_ = row[at.single()];
  }

  // Before the first look at what is not in registers.
  __device__ void wait_for_more() const {
    if constexpr (kMore) __pipeline_wait_prior(0);
  }

  __device__ float single() const { return widen(single_); }
  __device__ const Packed<T, kVec>& pack(int i) const { return packs_[i]; }

  // Pack i as accumulators. The compiler must not know that it has widened this pack before: it would keep the result
  // from pass to pass, twice the registers to save an instruction.
  __device__ void widened(float (&x)[kVec], int i) {
    if constexpr (sizeof(T) == 2) {
      auto& words = reinterpret_cast<uint4&>(packs_[i]);
      asm("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    }
    widen(x, packs_[i]);
  }

  // Replaces what the mask hides of pack i.
  template <typename Columns>
  __device__ void mask(const Columns& at, int i, float by) {
    at.mask(packs_[i].v, i, narrow<T>(by));
  }
  template <typename Columns>
  __device__ void mask_more(const Columns& at, int i, float by) const {
    at.mask(place(i)->v, i, narrow<T>(by));
  }

  // A pack beyond kItems.
  __device__ Packed<T, kVec>* place(int i) const { return more_ + (i - kItems) * blockDim.x + threadIdx.x; }

 private:
  Packed<T, kVec> packs_[kItems];
  Packed<T, kVec>* more_;
  T single_;
};

// Writes a thread's part of a row: of pack(y, i) the y, of more(y, i) that of packs beyond kItems, of single() the
// result, and zeros where the mask hides all.
template <int kItems, bool kMore, typename T, typename Columns, typename Pack, typename More, typename Single>
__device__ void store_part(T* base, const Columns& at, const Pack& pack, const More& more, const Single& single) {
  constexpr int kVec = kPack<T>;
  T* row = base + at.begin();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.has(i)) continue;
    float y[kVec] = {};
    if (at.counts(i)) {
      pack(y, i);
      at.mask(y, i, 0.f);
    }
    store_narrow<kVec>(row + at.column(i), y);
  }
  if constexpr (kMore)
    for (int i = kItems; at.has(i); ++i) {
      float y[kVec] = {};
      if (!Columns::kMasked || at.counts(i)) more(y, i);
      at.mask(y, i, 0.f);
      store_narrow<kVec>(row + at.column(i), y);
    }
  if (at.has_single()) row[at.single()] = narrow<T>(at.single_counts() ? single() : 0.f);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward: reads x, writes out.

template <typename T>
struct SoftmaxRows {
  T* out;
  const T* x;
  int64_t rows;
  int64_t width;
  accumulate_t<T> scale;  // of x
};

// exp(scale * x): exp_for with the scale in the factor that 2^x needs anyway.
template <typename T>
struct ScaledExp {
  float factor;

  __device__ explicit ScaledExp(float scale) : factor(kSixteenBits<T> ? scale * kLog2E : scale) {}

  __device__ float operator()(float x) const {
    return kSixteenBits<T> ? exp2_approximately(x * factor) : expf(x * factor);
  }

  // exp(scale * x) / 2^y, for 16-bit types.
  __device__ float over_power(float x, float y) const { return exp2_approximately(fmaf(x, factor, -y)); }
};

template <typename T, int kVec>
__device__ float largest_of(const Packed<T, kVec>& pack) {
  if constexpr (sizeof(T) == 2) {  // pairs, before they are widened
    using Pair = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat162, __half2>;
    const auto& pairs = reinterpret_cast<const Pair(&)[4]>(pack);
    const Pair largest = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(widen(largest.x), widen(largest.y));
  } else {
    return fmaxf(fmaxf(pack.v[0], pack.v[1]), fmaxf(pack.v[2], pack.v[3]));
  }
}

// What exponentials become when their sum is known.
template <typename T>
class Quotient {
 public:
  __device__ explicit Quotient(float total) : total_(total), reciprocal_(1 / total) {}

  // For float32 the product alone would be off by one more rounding than the division: a step of Newton's takes it
  // back.
  __device__ float operator()(float e) const {
    const float q = e * reciprocal_;
    return sizeof(T) == 2 ? q : fmaf(fmaf(-q, total_, e), reciprocal_, q);
  }

 private:
  float total_;
  float reciprocal_;
};

// The maximum of some x, and the sum of exp(scale * (x - max)). It starts at the lowest finite number, so that nothing
// but -inf has a sum of 0; NaNs are passed over, they are in the sum.
template <typename T>
struct MaxSum {
  float max = std::numeric_limits<float>::lowest();
  sum_t<T> total = 0;
};

// Maxima are those of x, so the scale must be positive.
template <typename T, typename Team, int kItems, bool kSingles, bool kCausal, bool kMore>
__device__ void softmax_row(const SoftmaxRows<T>& p, void* places) {
  constexpr int kVec = kPack<T>;
  // Exponentials are kept where they fit; else they are taken again from x, of which 16-bit packs are half as large.
  constexpr bool kKept = sizeof(T) == 4 || kItems <= 2;
  typename Team::template Meeting<MaxSum<T>> meeting;
  const RowColumns<T, Team, kSingles, kCausal, kMore> at(p.out, p.rows, p.width);
  RowPart<T, kItems, kMore> x(p.x, at, places);

  MaxSum<T> own;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.counts(i)) continue;
    x.mask(at, i, -INFINITY);
    own.max = fmaxf(own.max, largest_of(x.pack(i)));
  }
  x.wait_for_more();
  if constexpr (kMore)
    for (int i = kItems; at.counts(i); ++i) {
      x.mask_more(at, i, -INFINITY);
      own.max = fmaxf(own.max, largest_of(*x.place(i)));
    }
  if (at.single_counts()) own.max = fmaxf(own.max, x.single());
  own.max = warp_reduce<FiniteMax, Team::kOfWarp>(own.max);

  // Each warp sums relative to its own maximum: warps meet once, not twice.
  const ScaledExp<T> exponential(p.scale);
  float kept[kItems][kVec], kept_single = 0;
  const auto add_exponentials = [&](float (&e)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      e[k] = exponential(e[k] - own.max);
      own.total += e[k];
    }
  };
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.counts(i)) continue;
    float e[kVec];
    x.widened(e, i);
    add_exponentials(e);
    if constexpr (kKept)
#pragma unroll
      for (int k = 0; k < kVec; ++k) kept[i][k] = e[k];
  }
  if constexpr (kMore)
    for (int i = kItems; at.counts(i); ++i) {
      float e[kVec];
      widen(e, *x.place(i));
      add_exponentials(e);
    }
  if (at.single_counts()) {
    kept_single = exponential(x.single() - own.max);
    own.total += kept_single;
  }
  own.total = warp_reduce<Sum, Team::kOfWarp>(own.total);

  MaxSum<T> all = own;
  meeting(all, [&](MaxSum<T>& of_lane) {
    const float max = warp_reduce<FiniteMax>(of_lane.max);
    of_lane.total = warp_reduce<Sum>(of_lane.total * sum_t<T>(exponential(of_lane.max - max)));
    of_lane.max = max;
  });

  if constexpr (kKept) {
    const Quotient<T> quotient(static_cast<float>(all.total));
    const float factor = Team::kOneWarp ? 1.f : exponential(own.max - all.max);
    const auto quotients = [&](float (&y)[kVec], int i) {
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(kept[i][k] * factor);
    };
    const auto more = [&](float (&y)[kVec], int i) {
      widen(y, *x.place(i));
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(exponential(y[k] - all.max));
    };
    store_part<kItems, kMore>(p.out, at, quotients, more, [&] { return quotient(kept_single * factor); });
  } else {
    const float log_total = __log2f(all.total);
    const auto quotient = [&](float x) { return exponential.over_power(x - all.max, log_total); };
    const auto quotients = [&](float (&y)[kVec], int i) {
      x.widened(y, i);
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(y[k]);
    };
    const auto more = [&](float (&y)[kVec], int i) {
      widen(y, *x.place(i));
#pragma unroll
      for (int k = 0; k < kVec; ++k) y[k] = quotient(y[k]);
    };
    store_part<kItems, kMore>(p.out, at, quotients, more, [&] { return quotient(x.single()); });
  }
}

// Two such blocks fit on a multiprocessor, so that one loads while the other computes: 32 registers a thread, or as
// many more as the code takes.
template <typename T, bool kSingles, bool kCausal, bool kMore>
constexpr int kForwardThreads = kCausal && kMore                                    ? 512
                                : kCausal || (kMore && (kSingles || sizeof(T) > 2)) ? 768
                                                                                    : 1024;

template <typename T, int kLanes, int kItems, bool kSingles, bool kCausal>
__global__ void __launch_bounds__(kLanesThreads<kItems>) softmax_forward_lanes_kernel(const SoftmaxRows<T> p) {
  softmax_row<T, Lanes<kLanes, kLanesThreads<kItems>>, kItems, kSingles, kCausal, false>(p, nullptr);
}

template <typename T, int kItems, bool kSingles, bool kCausal, bool kMore>
__global__ void __launch_bounds__(kForwardThreads<T, kSingles, kCausal, kMore>,
                                  kTwoBlocks<kForwardThreads<T, kSingles, kCausal, kMore>>)
    softmax_forward_block_kernel(const SoftmaxRows<T> p) {
  extern __shared__ uint4 places[];
  softmax_row<T, Block, kItems, kSingles, kCausal, kMore>(p, places);
}

template <typename T, int kItems, bool kSingles, bool kCausal>
__global__ void __launch_bounds__(kForwardThreads<T, kSingles, kCausal, true>,
                                  kTwoBlocks<kForwardThreads<T, kSingles, kCausal, true>>)
    softmax_forward_cluster_kernel(const SoftmaxRows<T> p) {
#if GPTKERNELS_HOPPER
  extern __shared__ uint4 places[];
  softmax_row<T, Cluster, kItems, kSingles, kCausal, true>(p, places);
#endif
}

template <typename T, int kVec, bool kCausal>
__global__ void __launch_bounds__(kWideThreads<T, false>, 1)
    softmax_forward_simple_kernel(const SoftmaxRows<T> p, const WideShape shape) {
  using A = accumulate_t<T>;
  using Rows = WideRows<T, 1, kVec, false>;
  using Column = typename Rows::Column;
  Rows rows(shape, p.rows, p.width, {p.x});
  for (; rows.more(); rows.next()) {
    const auto columns = static_cast<Column>(columns_of<kCausal>(rows.row(), p.width));
    const auto scale = [&](Column column, A(&x)[1][kVec], auto exceptional) {
      if constexpr (kCausal)
#pragma unroll
        for (int k = 0; k < kVec; ++k)
          x[0][k] = exceptional.value && column + k >= columns ? -A(INFINITY) : x[0][k] * p.scale;
    };
    rows.wait();
    SoftmaxSum<T> sum;
    rows.each(-A(INFINITY), {columns, -1}, [&](Column column, A(&x)[1][kVec], auto exceptional) {
      scale(column, x, exceptional);
      sum.add(x[0]);
    });
    rows.reduce(sum);
    const A factor = 1 / sum.total;
    rows.write(p.out, {columns, -1}, [&](Column column, A(&x)[1][kVec], auto exceptional) {
      scale(column, x, exceptional);
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        x[0][k] = exceptional.value && column + k >= columns ? A(0) : exp_for<T>(x[0][k] - sum.max) * factor;
    });
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward: dx = scale * out * (dout - sum(dout * out)); reads dout and out, writes dx.

template <typename T>
struct SoftmaxBackwardRows {
  T* dx;
  const T* dout;
  const T* out;
  int64_t rows;
  int64_t width;
  accumulate_t<T> scale;
};

template <typename T, typename Team, int kItems, bool kSingles, bool kCausal, bool kMore>
__device__ void softmax_backward_row(const SoftmaxBackwardRows<T>& p, void* dout_places, void* out_places) {
  constexpr int kVec = kPack<T>;
  typename Team::template Meeting<sum_t<T>> meeting;
  const RowColumns<T, Team, kSingles, kCausal, kMore> at(p.dx, p.rows, p.width);
  RowPart<T, kItems, kMore> dout(p.dout, at, dout_places);
  RowPart<T, kItems, kMore> out(p.out, at, out_places);

  sum_t<T> products = 0;
  const auto add_products = [&](const float (&d)[kVec], const float (&o)[kVec]) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) products += sum_t<T>(d[k]) * sum_t<T>(o[k]);
  };
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!at.counts(i)) continue;
    dout.mask(at, i, 0);
    out.mask(at, i, 0);
    float d[kVec], o[kVec];
    dout.widened(d, i);
    out.widened(o, i);
    add_products(d, o);
  }
  out.wait_for_more();
  if constexpr (kMore)
    for (int i = kItems; at.counts(i); ++i) {
      dout.mask_more(at, i, 0);
      out.mask_more(at, i, 0);
      float d[kVec], o[kVec];
      widen(d, *dout.place(i));
      widen(o, *out.place(i));
      add_products(d, o);
    }
  if (at.single_counts()) products += sum_t<T>(dout.single()) * sum_t<T>(out.single());
  products = warp_reduce<Sum, Team::kOfWarp>(products);
  meeting(products, [](sum_t<T>& of_lane) { of_lane = warp_reduce<Sum>(of_lane); });
  const float dot = static_cast<float>(products);

  const auto gradient = [&](float d, float o) { return kCausal ? p.scale * (o * (d - dot)) : o * (d - dot); };
  const auto gradients = [&](float (&y)[kVec], int i) {
    float d[kVec];
    dout.widened(d, i);
    out.widened(y, i);
#pragma unroll
    for (int k = 0; k < kVec; ++k) y[k] = gradient(d[k], y[k]);
  };
  const auto more = [&](float (&y)[kVec], int i) {
    float d[kVec];
    widen(d, *dout.place(i));
    widen(y, *out.place(i));
#pragma unroll
    for (int k = 0; k < kVec; ++k) y[k] = gradient(d[k], y[k]);
  };
  store_part<kItems, kMore>(p.dx, at, gradients, more, [&] { return gradient(dout.single(), out.single()); });
}

template <typename T, int kLanes, int kItems, bool kSingles, bool kCausal>
__global__ void __launch_bounds__(kLanesThreads<kItems>) softmax_backward_lanes_kernel(const SoftmaxBackwardRows<T> p) {
  softmax_backward_row<T, Lanes<kLanes, kLanesThreads<kItems>>, kItems, kSingles, kCausal, false>(p, nullptr, nullptr);
}

template <typename T, int kItems, bool kSingles, bool kCausal, bool kMore>
__global__ void __launch_bounds__(1024) softmax_backward_block_kernel(const SoftmaxBackwardRows<T> p, int more) {
  extern __shared__ uint4 places[];
  softmax_backward_row<T, Block, kItems, kSingles, kCausal, kMore>(p, places, places + more * blockDim.x);
}

template <typename T, int kItems, bool kSingles, bool kCausal>
__global__ void __launch_bounds__(1024) softmax_backward_cluster_kernel(const SoftmaxBackwardRows<T> p, int more) {
#if GPTKERNELS_HOPPER
  extern __shared__ uint4 places[];
  softmax_backward_row<T, Cluster, kItems, kSingles, kCausal, true>(p, places, places + more * blockDim.x);
#endif
}

template <typename T, int kVec, bool kCausal>
__global__ void __launch_bounds__(kWideThreads<T, false>, 1)
    softmax_backward_simple_kernel(const SoftmaxBackwardRows<T> p, const WideShape shape) {
  using A = accumulate_t<T>;
  using Rows = WideRows<T, 2, kVec, false>;
  using Column = typename Rows::Column;
  Rows rows(shape, p.rows, p.width, {p.dout, p.out});
  for (; rows.more(); rows.next()) {
    const auto columns = static_cast<Column>(columns_of<kCausal>(rows.row(), p.width));
    rows.wait();
    WideSum<A> dot;
    rows.each(0, {columns, -1}, [&](Column column, A(&x)[2][kVec], auto exceptional) {
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        if (!exceptional.value || column + k < columns) dot.total += x[0][k] * x[1][k];
    });
    rows.reduce(dot);
    rows.write(p.dx, {columns, -1}, [&](Column column, A(&x)[2][kVec], auto exceptional) {
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        x[0][k] = exceptional.value && column + k >= columns ? A(0) : p.scale * (x[1][k] * (x[0][k] - dot.total));
    });
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launch.

constexpr int kSoftmaxItems = 4;  // packs a thread in registers: 32 to 40 registers in the forward, 64 in the backward

// How the threads of a block hold a row of so many packs, or their block's part of it, of each of `arrays` arrays: what
// registers leave over is in shared memory.
struct BlockShape {
  unsigned threads;
  int more;  // packs a thread in shared memory, of each array
  int64_t shared_bytes;

  BlockShape(int64_t packs, int arrays, int64_t threads)
      : threads(static_cast<unsigned>(threads)),
        more(static_cast<int>(std::max<int64_t>(ceil_div(packs, threads) - kSoftmaxItems, 0))),
        shared_bytes(arrays * more * threads * 16) {}
};

// The fewest threads, in whole warps, that hold so many packs with `items` each.
inline int64_t threads_for(int64_t packs, int64_t items) {
  return ceil_div(ceil_div(packs, items), kWarp) * kWarp;
}

inline BlockShape block_shape(int64_t packs, int arrays, int64_t most_threads) {
  const int64_t items = std::max<int64_t>(ceil_div(packs, most_threads), kSoftmaxItems);
  return {packs, arrays, threads_for(packs, items)};
}

// What packs beyond registers take into account (kLines): those of the line in which a row begins.
template <typename T>
int64_t packs_on_lines(int64_t width, const T* base) {
  const bool begin_there = width * sizeof(T) % 128 == 0 && reinterpret_cast<uintptr_t>(base) % 128 == 0;
  return width / kPack<T> + (begin_there ? 0 : 7);
}

struct ClusterShape {
  int64_t blocks;
  BlockShape block;
};

// The fewest blocks with at most 32 KB of a row each: then a multiprocessor has many, of many rows, and some of them
// load while others compute or meet. Threads have at most 12 packs, so that there are enough of them.
inline ClusterShape cluster_shape(int64_t packs, int arrays, int64_t most_blocks, int64_t most_threads) {
  constexpr int64_t kPartPacks = 2048 + 7;
  constexpr int64_t kMostItems = 12;
  constexpr int64_t kStep = 256;
  int64_t blocks = 2;
  while (blocks < most_blocks && ceil_div(packs, blocks) > kPartPacks) blocks *= 2;
  const int64_t part = ceil_div(packs, blocks);
  const int64_t threads = std::min(ceil_div(part, kStep * kMostItems) * kStep, most_threads);
  return {blocks, {part, arrays, threads}};
}

// The most blocks, 1 or a power of 2, that a cluster of this kernel has on the current device, whatever their shape.
template <auto kKernel, int kMostThreads>
int64_t most_cluster_blocks() {
  if (!built_for_hopper<kKernel>()) return 1;
  return once_a_device([](int) {
    cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kMostBlocks);
    config.blockDim = dim3(kMostThreads);
    config.dynamicSmemBytes = static_cast<size_t>(max_dynamic_shared_memory<kKernel>());
    int most = 1;
    cudaOccupancyMaxPotentialClusterSize(&most, kKernel, &config);
    int blocks = 1;
    while (2 * blocks <= std::min(most, kMostBlocks)) blocks *= 2;
    return blocks;
  });
}

// Calls launch(config, block) with a cluster for every row, if a cluster holds one. No memory has more of such rows
// than a grid has blocks.
template <auto kKernel, int kMostThreads, typename Launch>
bool launch_clusters(int64_t rows, int64_t packs, int arrays, Stream stream, const Launch& launch) {
  const int64_t most_blocks = most_cluster_blocks<kKernel, kMostThreads>();
  const ClusterShape shape = cluster_shape(packs, arrays, most_blocks, kMostThreads);
  if (most_blocks == 1 || shape.block.shared_bytes > max_dynamic_shared_memory<kKernel>()) return false;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(shape.blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(rows * shape.blocks));
  config.blockDim = dim3(shape.block.threads);
  config.dynamicSmemBytes = static_cast<size_t>(shape.block.shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  launch(config, shape.block);
  return true;
}

// Calls lanes(kLanes, kItems, kSingles) with these as types, or beyond what a warp holds wider(kSingles). Nobody looks
// for singles where packs alone make up the rows, and narrow ones then have no idle lanes.
template <typename T, typename ByLanes, typename Wider>
void by_lanes(int64_t width, bool aligned, const ByLanes& lanes, const Wider& wider) {
  const int64_t packs = width / kPack<T>;
  const auto by_warp = [&](auto singles) {
    const int64_t items = std::max<int64_t>(ceil_div(packs, kWarp), 1);
    if (items > kSoftmaxItems) return wider(singles);
    constexpr int kFewest = singles.value ? 1 : 2;
    with_row_items<kFewest, kSoftmaxItems>(static_cast<int>(items), [&](auto i) { lanes(Items<32>{}, i, singles); });
  };
  if (!aligned) return by_warp(std::true_type{});
  if (packs <= 8) return lanes(Items<8>{}, Items<1>{}, std::false_type{});
  if (packs <= 16) return lanes(Items<8>{}, Items<2>{}, std::false_type{});
  if (packs <= 32) return lanes(Items<16>{}, Items<2>{}, std::false_type{});
  by_warp(std::false_type{});
}

// Calls block(kItems) with the packs a thread as a type, if a block of so many threads holds a row in registers: 4, or
// 3 where with 4 more of them would be none of the row's.
template <bool kSingles, typename ByBlock>
bool by_block(int64_t packs, int64_t most_threads, const ByBlock& block) {
  if (packs > most_threads * kSoftmaxItems) return false;
  if constexpr (!kSingles) {
    const int64_t threads = threads_for(packs, 3);
    if (threads <= most_threads && threads * 3 < threads_for(packs, 4) * 4) {
      block(Items<3>{});
      return true;
    }
  }
  block(Items<kSoftmaxItems>{});
  return true;
}

// One launch can have a block for every row. More rows than that take the simple way.
template <typename P>
bool fits_grid(const P& p) {
  return p.rows <= std::numeric_limits<int>::max();
}

// What more than a warp holds. Under the mask the look for singles costs nothing: kSingles is true there.
template <bool kCausal, bool kSingles, typename T>
void launch_forward_wide(const SoftmaxRows<T>& p, Stream stream) {
  const int64_t packs = p.width / kPack<T>;
  constexpr int kThreads = kForwardThreads<T, kSingles, kCausal, false>;
  if (by_block<kSingles>(packs, kThreads, [&](auto items) {
        softmax_forward_block_kernel<T, items.value, kSingles, kCausal, false>
            <<<grid_size(p.rows), static_cast<unsigned>(threads_for(packs, items.value)), 0, stream>>>(p);
      }))
    return;

  const int64_t line_packs = packs_on_lines(p.width, p.out);
  constexpr int kMoreThreads = kForwardThreads<T, kSingles, kCausal, true>;
  if constexpr (!kCausal) {
    constexpr auto kernel = softmax_forward_block_kernel<T, kSoftmaxItems, kSingles, kCausal, true>;
    const BlockShape shape = block_shape(line_packs, 1, kMoreThreads);
    if (shape.shared_bytes <= max_dynamic_shared_memory<kernel>() / 2 - 1024)
      return kernel<<<grid_size(p.rows), shape.threads, shape.shared_bytes, stream>>>(p);
  }
  constexpr auto kernel = softmax_forward_cluster_kernel<T, kSoftmaxItems, kSingles, kCausal>;
  if (launch_clusters<kernel, kMoreThreads>(p.rows, line_packs, 1, stream, [&](const auto& config, const BlockShape&) {
        cudaLaunchKernelEx(&config, kernel, p);
      }))
    return;
  launch_unkept<T, 1, kPack<T>, softmax_forward_simple_kernel<T, kPack<T>, kCausal>>(p, stream);
}

template <bool kCausal, typename T>
void launch_forward_registers(const SoftmaxRows<T>& p, Stream stream) {
  by_lanes<T>(
      p.width, packs<T>(p.width, p.out, p.x),
      [&](auto lanes, auto items, auto singles) {
        constexpr int kThreads = kLanesThreads<items.value>;
        const unsigned grid = grid_size(ceil_div(p.rows, kThreads / lanes.value));
        softmax_forward_lanes_kernel<T, lanes.value, items.value, singles.value, kCausal>
            <<<grid, kThreads, 0, stream>>>(p);
      },
      [&](auto singles) { launch_forward_wide<kCausal, kCausal || singles.value>(p, stream); });
}

template <bool kCausal, bool kSingles, typename T>
void launch_backward_wide(const SoftmaxBackwardRows<T>& p, Stream stream) {
  const int64_t packs = p.width / kPack<T>;
  constexpr int kThreads = 1024;
  if (by_block<kSingles>(packs, kThreads, [&](auto items) {
        softmax_backward_block_kernel<T, items.value, kSingles, kCausal, false>
            <<<grid_size(p.rows), static_cast<unsigned>(threads_for(packs, items.value)), 0, stream>>>(p, 0);
      }))
    return;

  const int64_t line_packs = packs_on_lines(p.width, p.dx);
  if constexpr (!kCausal) {
    // There is little to compute: one block to a multiprocessor suffices.
    constexpr auto kernel = softmax_backward_block_kernel<T, kSoftmaxItems, kSingles, kCausal, true>;
    const BlockShape shape = block_shape(line_packs, 2, kThreads);
    if (shape.shared_bytes <= max_dynamic_shared_memory<kernel>())
      return kernel<<<grid_size(p.rows), shape.threads, shape.shared_bytes, stream>>>(p, shape.more);
  }
  constexpr auto kernel = softmax_backward_cluster_kernel<T, kSoftmaxItems, kSingles, kCausal>;
  if (launch_clusters<kernel, kThreads>(
          p.rows, line_packs, 2, stream,
          [&](const auto& config, const BlockShape& shape) { cudaLaunchKernelEx(&config, kernel, p, shape.more); }))
    return;
  launch_unkept<T, 2, kPack<T>, softmax_backward_simple_kernel<T, kPack<T>, kCausal>>(p, stream);
}

template <bool kCausal, typename T>
void launch_backward_registers(const SoftmaxBackwardRows<T>& p, Stream stream) {
  by_lanes<T>(
      p.width, packs<T>(p.width, p.dx, p.dout, p.out),
      [&](auto lanes, auto items, auto singles) {
        constexpr int kThreads = kLanesThreads<items.value>;
        const unsigned grid = grid_size(ceil_div(p.rows, kThreads / lanes.value));
        softmax_backward_lanes_kernel<T, lanes.value, items.value, singles.value, kCausal>
            <<<grid, kThreads, 0, stream>>>(p);
      },
      [&](auto singles) { launch_backward_wide<kCausal, kCausal || singles.value>(p, stream); });
}

// The simple way, an element at a time and a row read in each pass, is for float64 and what the others leave out:
// arrays whose rows begin at different places of a pack; scales that are not positive, or so small that x - max(x)
// overflows where scale * (x - max(x)) does not; rows beyond a grid.

template <bool kCausal, typename T>
Status softmax_forward_rows(const SoftmaxRows<T>& p, Stream stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  bool registers = false;
  if constexpr (!std::is_same_v<T, double>) {
    registers = in_step(p.out, p.x) && fits_grid(p) && p.scale >= 1e-30f;
    if (registers) launch_forward_registers<kCausal>(p, stream);
  }
  if (!registers) launch_unkept<T, 1, 1, softmax_forward_simple_kernel<T, 1, kCausal>>(p, stream);
  return cudaGetLastError();
}

template <bool kCausal, typename T>
Status softmax_backward_rows(const SoftmaxBackwardRows<T>& p, Stream stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  bool registers = false;
  if constexpr (!std::is_same_v<T, double>) {
    registers = in_step(p.dx, p.dout, p.out) && fits_grid(p);
    if (registers) launch_backward_registers<kCausal>(p, stream);
  }
  if (!registers) launch_unkept<T, 2, 1, softmax_backward_simple_kernel<T, 1, kCausal>>(p, stream);
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
