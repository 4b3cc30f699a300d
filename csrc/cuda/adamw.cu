#include <algorithm>

#include "../adamw.h"
#include "launch.cuh"
#include "multi_tensor.cuh"
#include "packed.cuh"

namespace gptkernels::cuda {
namespace {

// Reads the parameter, its gradient and both moments, writes all but the gradient: 7 elements moved for each parameter,
// 28 bytes in float32. No number depends on another element, so the result does not depend on how the list is cut.

enum Slot { kParam, kMaster, kGrad, kExpAvg, kExpAvgSq, kStep, kSlots };

using AdamwList = TensorList<kSlots, 64>;

struct AdamwArguments {
  AdamwList list;
  AdamwOptions options;
  const float* lr;
  const float* grad_scale;
  const float* found_inf;
};
static_assert(sizeof(AdamwArguments) <= kArgumentBytes);

// One tensor's part in the list.
template <typename T, typename Gradient, typename State>
struct AdamwTensor {
  T* param;
  float* master;  // or null
  const Gradient* grad;
  State* exp_avg;
  State* exp_avg_sq;
};

template <int N, typename T>
__device__ bool packs_of(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Packed<T, N>) == 0;
}

template <int N, typename T, typename Gradient, typename State>
__device__ void update_pack(const AdamwFactors<accumulate_t<T>>& factors, const AdamwTensor<T, Gradient, State>& t,
                            int64_t i) {
  using A = accumulate_t<T>;
  const Packed<Gradient, N> grad = load<N>(t.grad + i);
  Packed<State, N> exp_avg = load<N>(t.exp_avg + i);
  Packed<State, N> exp_avg_sq = load<N>(t.exp_avg_sq + i);
  Packed<float, N> master;
  Packed<T, N> param;
  if (t.master)
    master = load<N>(t.master + i);
  else
    param = load<N>(t.param + i);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    A p = t.master ? A(master.v[k]) : A(param.v[k]);
    A m = A(exp_avg.v[k]);
    A v = A(exp_avg_sq.v[k]);
    adamw_update(factors, A(grad.v[k]), p, m, v);
    master.v[k] = static_cast<float>(p);
    param.v[k] = static_cast<T>(p);
    exp_avg.v[k] = static_cast<State>(m);
    exp_avg_sq.v[k] = static_cast<State>(v);
  }
  if (t.master) store(t.master + i, master);
  store(t.param + i, param);
  store(t.exp_avg + i, exp_avg);
  store(t.exp_avg_sq + i, exp_avg_sq);
}

// A pack is 16 bytes of the narrowest of the arrays; the others' packs are as many elements.
template <typename T, typename Gradient, typename State>
__global__ void __launch_bounds__(kListThreads) adamw_chunks_kernel(const __grid_constant__ AdamwArguments a) {
  using A = accumulate_t<T>;
  constexpr int kVec = 16 / std::min({sizeof(T), sizeof(Gradient), sizeof(State)});
  if (a.found_inf && *a.found_inf != 0) return;

  const Chunk chunk = this_chunk(a.list);
  const auto& pointers = a.list.pointers;
  __shared__ AdamwFactors<A> shared_factors;
  if (threadIdx.x == 0)
    shared_factors =
        adamw_factors<A>(a.options, a.lr ? *a.lr : a.options.lr,
                         *static_cast<const float*>(pointers[kStep][chunk.tensor]), a.grad_scale ? *a.grad_scale : 1);
  __syncthreads();
  const AdamwFactors<A> factors = shared_factors;
  const AdamwTensor<T, Gradient, State> t = {.param = static_cast<T*>(pointers[kParam][chunk.tensor]),
                                             .master = static_cast<float*>(pointers[kMaster][chunk.tensor]),
                                             .grad = static_cast<const Gradient*>(pointers[kGrad][chunk.tensor]),
                                             .exp_avg = static_cast<State*>(pointers[kExpAvg][chunk.tensor]),
                                             .exp_avg_sq = static_cast<State*>(pointers[kExpAvgSq][chunk.tensor])};
  const bool packed = packs_of<kVec>(t.param) && packs_of<kVec>(t.master) && packs_of<kVec>(t.grad) &&
                      packs_of<kVec>(t.exp_avg) && packs_of<kVec>(t.exp_avg_sq);
  const int64_t rest = packed ? chunk.end - (chunk.end - chunk.begin) % kVec : chunk.begin;
  for (int64_t i = chunk.begin + int64_t(threadIdx.x) * kVec; i < rest; i += kListThreads * kVec)
    update_pack<kVec>(factors, t, i);
  for (int64_t i = rest + threadIdx.x; i < chunk.end; i += kListThreads) update_pack<1>(factors, t, i);
}

}  // namespace

template <typename T, typename Gradient, typename State>
Status adamw(const Adamw<T, Gradient, State>& p, Stream stream) {
  AdamwArguments arguments{
      .list = {}, .options = p.options, .lr = p.lr, .grad_scale = p.grad_scale, .found_inf = p.found_inf};
  for_each_list<AdamwList>(
      p.count, p.sizes,
      [&](AdamwList& list, int slot, int64_t i) {
        list.pointers[kParam][slot] = p.params[i];
        list.pointers[kMaster][slot] = p.masters ? p.masters[i] : nullptr;
        list.pointers[kGrad][slot] = const_cast<Gradient*>(p.grads[i]);
        list.pointers[kExpAvg][slot] = p.exp_avgs[i];
        list.pointers[kExpAvgSq][slot] = p.exp_avg_sqs[i];
        list.pointers[kStep][slot] = const_cast<float*>(p.steps[i]);
      },
      [&](const AdamwList& list, unsigned chunks) {
        arguments.list = list;
        adamw_chunks_kernel<T, Gradient, State><<<chunks, kListThreads, 0, stream>>>(arguments);
      });
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
