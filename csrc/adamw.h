// One step of AdamW (Loshchilov and Hutter, 2019) on a list of tensors, in place.
#pragma once

#include <cmath>

#include "device.h"

#ifdef __CUDACC__
#define GPTKERNELS_HOST_DEVICE __host__ __device__
#else
#define GPTKERNELS_HOST_DEVICE
#endif

namespace gptkernels::GPTKERNELS_DEVICE {

struct AdamwOptions {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool maximize;
};

// T of the parameters, Gradient and State: T or float. The arrays are the host's, `count` pointers each; what they and
// the last three point to is the device's.
template <typename T, typename Gradient, typename State>
struct Adamw {
  T* const* params;
  float* const* masters;  // or null: the parameters are their own. Else the update is the master's, and rounded to T
  const Gradient* const* grads;
  State* const* exp_avgs;
  State* const* exp_avg_sqs;
  const float* const* steps;  // t, counted from 1
  const int64_t* sizes;
  int64_t count;
  AdamwOptions options;
  const float* lr;          // or null: options.lr
  const float* grad_scale;  // or null: the gradients are divided by it
  const float* found_inf;   // or null: when it is not 0, nothing changes
};

template <typename T, typename Gradient, typename State>
Status adamw(const Adamw<T, Gradient, State>& p, Stream stream);

// ---- the step, once for both devices
// ----------------------------------------------------------------------------------

// What a tensor's step multiplies with. Computed in float64: while t is small, 1 - beta^t has few digits in float32.
template <typename A>
struct AdamwFactors {
  A scale;    // the gradients are divided by it; negative to climb
  A decay;    // 1 - lr * weight_decay
  A weight1;  // 1 - beta1
  A beta2;
  A weight2;     // 1 - beta2
  A correction;  // sqrt(1 - beta2^t)
  A step_size;   // lr / (1 - beta1^t)
  A eps;
};

template <typename A>
GPTKERNELS_HOST_DEVICE AdamwFactors<A> adamw_factors(const AdamwOptions& o, double lr, double step, double scale) {
  return {.scale = A(o.maximize ? -scale : scale),
          .decay = A(1 - lr * o.weight_decay),
          .weight1 = A(1 - o.beta1),
          .beta2 = A(o.beta2),
          .weight2 = A(1 - o.beta2),
          .correction = A(std::sqrt(1 - std::pow(o.beta2, step))),
          .step_size = A(lr / (1 - std::pow(o.beta1, step))),
          .eps = A(o.eps)};
}

template <typename A>
GPTKERNELS_HOST_DEVICE void adamw_update(const AdamwFactors<A>& f, A gradient, A& param, A& exp_avg, A& exp_avg_sq) {
  const A g = gradient / f.scale;
  exp_avg += f.weight1 * (g - exp_avg);
  exp_avg_sq = exp_avg_sq * f.beta2 + f.weight2 * g * g;
  const A denominator = std::sqrt(exp_avg_sq) / f.correction + f.eps;
  param = param * f.decay - f.step_size * exp_avg / denominator;
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
