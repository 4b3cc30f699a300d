#include "../linear_cross_entropy.h"

#include "simd.h"

namespace gptkernels::cpu {
namespace {

template <typename Index>
int64_t count(const void* targets, int64_t rows, int64_t ignore_index) {
  const Index* t = static_cast<const Index*>(targets);
  return sum<int64_t>(rows, [&](int64_t i) { return static_cast<int64_t>(t[i] != ignore_index); });
}

}  // namespace

template <typename A>
Status mean_scale(const MeanScale<A>& p, Stream) {
  const int64_t rows = p.targets_are_int64 ? count<int64_t>(p.targets, p.rows, p.ignore_index)
                                           : count<int32_t>(p.targets, p.rows, p.ignore_index);
  *p.scale = (p.dloss ? *p.dloss : A(1)) / static_cast<A>(rows);
  if (p.finite) *p.finite = rows > 0 ? *p.scale : A(0);
  return {};
}

template <typename A>
Status loss_sum(const LossSum<A>& p, Stream) {
  const double total = sum<double>(p.rows, [&](int64_t i) { return static_cast<double>(p.losses[i]); });
  *p.loss = static_cast<A>(total * (p.scale ? static_cast<double>(*p.scale) : 1.0));
  return {};
}

#define GPTKERNELS_INSTANTIATE(A)                             \
  template Status mean_scale<A>(const MeanScale<A>&, Stream); \
  template Status loss_sum<A>(const LossSum<A>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)

}  // namespace gptkernels::cpu
