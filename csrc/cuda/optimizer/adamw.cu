// A thread loads two packs of every array, all in flight at once. Meanwhile one thread of the thread block computes the
// factors, which takes about as long. Thread blocks are small, so the last ones of the grid end almost together.
#include <algorithm>

#include "../../adamw.h"
#include "../../stochastic_rounding.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/multi_tensor.cuh"
#include "cuda/common/packed.cuh"

namespace gptkernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kPacks = 2;

enum Slot { kParam, kMaster, kGrad, kExpAvg, kExpAvgSq, kStep, kSlots };
constexpr Slot kTensorIndex = kMaster;  // the tensor's index, in place of a master

using AdamwList = TensorList<kSlots, 160>;  // GPT-2 124M has 148 tensors

struct AdamwArguments {
  AdamwOptions options;
  AdamwNumbers numbers;
  AdamwList list;
};
static_assert(sizeof(AdamwArguments) <= kArgumentBytes);

struct Exact {
  static __device__ float product(float a, float b) { return __fmul_rn(a, b); }
  static __device__ double product(double a, double b) { return __dmul_rn(a, b); }
  template <typename A>
  static __device__ A quotient(A a, A b) {
    return a / b;
  }
  template <typename A>
  static __device__ A square_root(A x) {
    return std::sqrt(x);
  }
};

// These operations have errors of up to 2 ulp of float32. They are for parameters that are rounded to 16 bits
// afterwards. The exact operations have branches, which serialise a thread's elements, and would slow down a kernel
// that moves as few as 14 bytes per parameter. A square root here is 0, infinite, NaN or between 1e-23 and 1e20, where
// the approximate operations are valid.
struct Approximate : Exact {
  static __device__ float quotient(float a, float b) { return __fdividef(a, b); }
  static __device__ float square_root(float x) {
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
  }
};

struct ToNearest {};

// Rounds values of bfloat16 arrays stochastically. Values of float32 arrays are not rounded.
struct Stochastically {
  uint64_t seed;
  uint32_t step;
  uint32_t tensor;
  int64_t begin;  // index in the tensor

  template <typename V, int N>
  __device__ void round(Packed<V, N>& to, const float (&values)[N], AdamwArray array, int i) const {
    if constexpr (std::is_same_v<V, bfloat16>) {
      const int64_t element = begin + i;
      RoundingBits random = rounding_bits(seed, step, tensor, array, element / kRoundingGroup);
      if constexpr (N < kRoundingGroup) random.drop(static_cast<int>(element % kRoundingGroup));
#pragma unroll
      for (int k = 0; k < N; ++k)
        to.v[k] = __ushort_as_bfloat16(round_stochastically(__float_as_uint(values[k]), random[k]));
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) to.v[k] = values[k];
    }
  }
};

// The pointers point to the first element of the chunk. Weight is float if there is a master, else T.
template <typename T, typename Weight, typename Gradient, typename State>
struct AdamwTensor {
  T* param;
  Weight* weight;  // the master, or the parameter itself
  const Gradient* grad;
  State* exp_avg;
  State* exp_avg_sq;

  __device__ AdamwTensor(void* const* pointers, int64_t begin)
      : param(static_cast<T*>(pointers[kParam]) + begin),
        weight(static_cast<Weight*>(pointers[std::is_same_v<T, Weight> ? kParam : kMaster]) + begin),
        grad(static_cast<const Gradient*>(pointers[kGrad]) + begin),
        exp_avg(static_cast<State*>(pointers[kExpAvg]) + begin),
        exp_avg_sq(static_cast<State*>(pointers[kExpAvgSq]) + begin) {}

  // The number of elements of a pack. A pack of the widest dtype has 16 bytes.
  static constexpr int pack = 16 / std::max({sizeof(T), sizeof(Weight), sizeof(Gradient), sizeof(State)});
  static constexpr int chunk = kThreads * kPacks * pack;

  __device__ bool can_vectorize() const {
    return aligned(param) && aligned(weight) && aligned(grad) && aligned(exp_avg) && aligned(exp_avg_sq);
  }

 private:
  template <typename P>
  static __device__ bool aligned(const P* p) {
    return reinterpret_cast<uintptr_t>(p) % sizeof(Packed<P, pack>) == 0;
  }
};

template <int N, typename T, typename Weight, typename Gradient, typename State>
struct AdamwPack {
  using A = accumulate_t<T>;
  using Tensor = AdamwTensor<T, Weight, Gradient, State>;
  using Arithmetic = std::conditional_t<sizeof(Weight) < sizeof(float), Approximate, Exact>;
  static constexpr bool kHasMaster = !std::is_same_v<T, Weight>;

  Packed<T, N> param;
  Packed<Weight, N> weight;
  Packed<Gradient, N> grad;
  Packed<State, N> exp_avg;
  Packed<State, N> exp_avg_sq;

  __device__ void load_from(const Tensor& t, int i) {
    if constexpr (kHasMaster) param = load<N>(t.param + i);
    weight = load<N>(t.weight + i);
    grad = load<N>(t.grad + i);
    exp_avg = load<N>(t.exp_avg + i);
    exp_avg_sq = load<N>(t.exp_avg_sq + i);
  }

  template <typename Rounding>
  __device__ void update(const AdamwFactors<A>& factors, const Tensor& t, int i, const Rounding& rounding) {
    [[maybe_unused]] A ps[N], ms[N], vs[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      A p = A(weight.v[k]);
      if constexpr (kHasMaster) p = current_value(weight.v[k], param.v[k]);
      A m = A(exp_avg.v[k]);
      A v = A(exp_avg_sq.v[k]);
      adamw_update<Arithmetic>(factors, A(grad.v[k]), p, m, v);
      if constexpr (std::is_same_v<Rounding, ToNearest>) {
        weight.v[k] = static_cast<Weight>(p);
        param.v[k] = static_cast<T>(p);
        exp_avg.v[k] = static_cast<State>(m);
        exp_avg_sq.v[k] = static_cast<State>(v);
      } else {
        ps[k] = p;
        ms[k] = m;
        vs[k] = v;
      }
    }
    if constexpr (!std::is_same_v<Rounding, ToNearest>) {
      rounding.round(param, ps, kParamArray, i);
      rounding.round(exp_avg, ms, kExpAvgArray, i);
      rounding.round(exp_avg_sq, vs, kExpAvgSqArray, i);
    }
    if constexpr (kHasMaster) store(t.weight + i, weight);
    store(t.param + i, param);
    store(t.exp_avg + i, exp_avg);
    store(t.exp_avg_sq + i, exp_avg_sq);
  }
};

template <typename Rounding>
__device__ Rounding make_rounding(const AdamwOptions& options, void* const* pointers, const Chunk& chunk) {
  if constexpr (std::is_same_v<Rounding, Stochastically>) {
    const auto step = static_cast<uint32_t>(*static_cast<const float*>(pointers[kStep]));
    const auto tensor = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointers[kTensorIndex]));
    return {options.rounding_seed, step, tensor, chunk.begin};
  } else {
    return {};
  }
}

template <typename T, typename Weight, typename Gradient, typename State, typename Rounding>
__global__ void __launch_bounds__(kThreads) adamw_chunks_kernel(const __grid_constant__ AdamwArguments a) {
  using Tensor = AdamwTensor<T, Weight, Gradient, State>;
  const int thread = static_cast<int>(threadIdx.x);
  const Chunk chunk = this_chunk<Tensor::chunk>(a.list);
  void* const* pointers = a.list.pointers[chunk.tensor];
  const Tensor t(pointers, chunk.begin);
  const int packed = t.can_vectorize() ? chunk.size / Tensor::pack * Tensor::pack : 0;

  AdamwPack<Tensor::pack, T, Weight, Gradient, State> packs[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int i = (k * kThreads + thread) * Tensor::pack;
    if (i < packed) packs[k].load_from(t, i);
  }

  __shared__ AdamwFactors<accumulate_t<T>> shared_factors;
  __shared__ bool skip;
  if (thread == 0) {
    shared_factors = adamw_factors<accumulate_t<T>>(a.options, a.numbers, *static_cast<const float*>(pointers[kStep]));
    skip = a.numbers.found_inf && *a.numbers.found_inf != 0;
  }
  __syncthreads();
  if (skip) return;
  const auto factors = shared_factors;
  const auto rounding = make_rounding<Rounding>(a.options, pointers, chunk);

#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int i = (k * kThreads + thread) * Tensor::pack;
    if (i < packed) packs[k].update(factors, t, i, rounding);
  }
  for (int i = packed + thread; i < chunk.size; i += kThreads) {
    AdamwPack<1, T, Weight, Gradient, State> single;
    single.load_from(t, i);
    single.update(factors, t, i, rounding);
  }
}

template <typename Weight, typename Rounding, typename T, typename Gradient, typename State>
void launch_lists(const Adamw<T, Gradient, State>& p, Stream stream) {
  for_each_list<AdamwList, AdamwTensor<T, Weight, Gradient, State>::chunk>(
      p.count, p.sizes,
      [&](void** pointers, int64_t i) {
        pointers[kParam] = p.params[i];
        pointers[kMaster] = p.masters ? p.masters[i] : reinterpret_cast<void*>(static_cast<uintptr_t>(i));
        pointers[kGrad] = const_cast<Gradient*>(p.grads[i]);
        pointers[kExpAvg] = p.exp_avgs[i];
        pointers[kExpAvgSq] = p.exp_avg_sqs[i];
        pointers[kStep] = const_cast<float*>(p.steps[i]);
      },
      [&](const AdamwList& list, unsigned chunks) {
        adamw_chunks_kernel<T, Weight, Gradient, State, Rounding>
            <<<chunks, kThreads, 0, stream>>>(AdamwArguments{p.options, p.numbers, list});
      });
}

}  // namespace

template <typename T, typename Gradient, typename State>
Status adamw(const Adamw<T, Gradient, State>& p, Stream stream) {
  constexpr bool kMayHaveMasters = sizeof(T) < sizeof(float);
  constexpr bool kMayRound = std::is_same_v<T, bfloat16>;
  if (kMayHaveMasters && p.masters)
    launch_lists<std::conditional_t<kMayHaveMasters, float, T>, ToNearest>(p, stream);
  else if (kMayRound && p.options.round_stochastically)
    launch_lists<T, std::conditional_t<kMayRound, Stochastically, ToNearest>>(p, stream);
  else
    launch_lists<T, ToNearest>(p, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T, Gradient, State) \
  template Status adamw<T, Gradient, State>(const Adamw<T, Gradient, State>&, Stream);
#define GPTKERNELS_INSTANTIATE_WITH_FLOAT(T) \
  GPTKERNELS_INSTANTIATE(T, T, T)            \
  GPTKERNELS_INSTANTIATE(T, T, float)        \
  GPTKERNELS_INSTANTIATE(T, float, T)        \
  GPTKERNELS_INSTANTIATE(T, float, float)
GPTKERNELS_INSTANTIATE(float, float, float)
GPTKERNELS_INSTANTIATE_WITH_FLOAT(double)
GPTKERNELS_INSTANTIATE_WITH_FLOAT(bfloat16)
GPTKERNELS_INSTANTIATE_WITH_FLOAT(float16)

}  // namespace gptkernels::cuda
