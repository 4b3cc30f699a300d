#include "../adamw.h"

#include <algorithm>
#include <type_traits>

#include "../stochastic_rounding.h"
#include "multi_tensor.h"
#include "simd.h"

namespace gptkernels::cpu {
namespace {

struct Exact {
  template <typename A>
  static A product(A a, A b) {
    return a * b;
  }
  template <typename A>
  static A quotient(A a, A b) {
    return a / b;
  }
  template <typename A>
  static A square_root(A x) {
    return std::sqrt(x);
  }
};

template <typename A, typename Gradient, typename State, typename Load, typename Store>
void update_range(const AdamwFactors<A>& factors, const Gradient* grad, State* exp_avg, State* exp_avg_sq,
                  int64_t begin, int64_t end, const Load& load, const Store& store_param) {
  const AdamwFactors<A> f = factors;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    A p = load(i);
    A m = A(exp_avg[i]);
    A v = A(exp_avg_sq[i]);
    adamw_update<Exact>(f, A(grad[i]), p, m, v);
    store_param(i, p);
    store(exp_avg[i], m);
    store(exp_avg_sq[i], v);
  }
}

template <typename V>
void store_stochastically(V& to, float value, uint32_t random) {
  if constexpr (std::is_same_v<V, bfloat16>)
    to.bits = round_stochastically(std::bit_cast<uint32_t>(value), random);
  else
    store(to, value);
}

// bits(array, group) returns the random bits of a group of 8 elements. `begin` is a multiple of 8.
template <typename Gradient, typename State, typename Bits>
void update_range_stochastically(const AdamwFactors<float>& factors, bfloat16* param, const Gradient* grad,
                                 State* exp_avg, State* exp_avg_sq, int64_t begin, int64_t end, const Bits& bits) {
  for (int64_t first = begin; first < end; first += kRoundingGroup) {
    const int64_t group = first / kRoundingGroup;
    const RoundingBits random[] = {bits(kParamArray, group), bits(kExpAvgArray, group), bits(kExpAvgSqArray, group)};
    const int count = static_cast<int>(std::min<int64_t>(kRoundingGroup, end - first));
    for (int k = 0; k < count; ++k) {
      const int64_t i = first + k;
      float p = param[i];
      float m = exp_avg[i];
      float v = exp_avg_sq[i];
      adamw_update<Exact>(factors, float(grad[i]), p, m, v);
      store_stochastically(param[i], p, random[kParamArray][k]);
      store_stochastically(exp_avg[i], m, random[kExpAvgArray][k]);
      store_stochastically(exp_avg_sq[i], v, random[kExpAvgSqArray][k]);
    }
  }
}

template <typename T, typename Gradient, typename State>
void update_chunk(const Adamw<T, Gradient, State>& p, int64_t t, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const auto factors = adamw_factors<A>(p.options, p.numbers, *p.steps[t]);
  T* param = p.params[t];
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (p.options.round_stochastically) {
      const auto bits = [&](AdamwArray array, int64_t group) {
        return rounding_bits(p.options.rounding_seed, static_cast<uint32_t>(*p.steps[t]), static_cast<uint32_t>(t),
                             array, group);
      };
      vectorised([&] {
        update_range_stochastically(factors, param, p.grads[t], p.exp_avgs[t], p.exp_avg_sqs[t], begin, end, bits);
      });
      return;
    }
  }
  const auto update = [&](const auto& load, const auto& store_param) {
    vectorised(
        [&] { update_range(factors, p.grads[t], p.exp_avgs[t], p.exp_avg_sqs[t], begin, end, load, store_param); });
  };
  if constexpr (sizeof(T) < sizeof(float)) {
    if (p.masters) {
      float* master = p.masters[t];
      update([=](int64_t i) { return current_value(master[i], param[i]); },
             [=](int64_t i, float value) {
               master[i] = value;
               store(param[i], value);
             });
      return;
    }
  }
  update([=](int64_t i) { return A(param[i]); }, [=](int64_t i, A value) { store(param[i], value); });
}

}  // namespace

template <typename T, typename Gradient, typename State>
Status adamw(const Adamw<T, Gradient, State>& p, Stream stream) {
  if (p.numbers.found_inf && *p.numbers.found_inf != 0) return {};
  parallel_for_chunks(stream, p.count, p.sizes,
                      [&](int64_t, int64_t t, int64_t begin, int64_t end) { update_chunk(p, t, begin, end); });
  return {};
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

}  // namespace gptkernels::cpu
