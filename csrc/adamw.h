// One step of AdamW (Loshchilov and Hutter, 2019) on a list of tensors, in place.
#pragma once

#include <cmath>

#include "device.h"

#ifdef __CUDACC__
#define GPTKERNELS_STEP __device__ inline
#else
#define GPTKERNELS_STEP inline
#endif

namespace gptkernels::GPTKERNELS_DEVICE {

struct AdamwOptions {
  double lr;
  double beta1;
  double beta2;
  double log_beta1;  // what beta^t is computed from
  double log_beta2;
  double eps;
  double weight_decay;
  float max_grad_norm;
  bool maximize;
};

// What need not be known to the host: one number each where the tensors are, or null.
struct AdamwNumbers {
  const float* lr;          // or null: options.lr
  const float* grad_scale;  // the gradients are divided by it
  const float* grad_norm;   // of the gradients so divided; they are clipped to options.max_grad_norm
  const float* found_inf;   // when it is not 0, nothing changes
};

// T of the parameters, Gradient and State: T or float. The arrays are the host's, `count` pointers each; what they and
// the numbers point to is the device's.
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
  AdamwNumbers numbers;
};

template <typename T, typename Gradient, typename State>
Status adamw(const Adamw<T, Gradient, State>& p, Stream stream);

// ---- the step, once for both devices --------------------------------------------------------------------------------

// What a tensor's step multiplies with. Computed in float64: while t is small, 1 - beta^t has few digits in float32.
template <typename A>
struct AdamwFactors {
  A gradient;  // clips and unscales; negative to climb
  A decay;     // 1 - lr * weight_decay
  A beta1;
  A weight1;  // 1 - beta1
  A beta2;
  A weight2;     // 1 - beta2
  A correction;  // 1 / sqrt(1 - beta2^t)
  A step_size;   // lr / (1 - beta1^t)
  A eps;
};

// torch's clip_grad_norm_, rounding by rounding; a NaN stays one.
GPTKERNELS_STEP float clip_coefficient(float norm, float max_norm) {
  const float coefficient = 1 / (norm + 1e-6f) * max_norm;
  return coefficient > 1 ? 1 : coefficient;
}

// 1 - beta^t from log(beta), less work than a power. beta^t is rounded once before it is subtracted, as torch's is, or
// the two would differ in the digits that a small t leaves.
GPTKERNELS_STEP double one_minus_power(double log_beta, double t) {
  const double power = 1 + std::expm1(t * log_beta);
  return 1 - power;
}

template <typename A>
GPTKERNELS_STEP AdamwFactors<A> adamw_factors(const AdamwOptions& o, const AdamwNumbers& numbers, double step) {
  const double lr = numbers.lr ? *numbers.lr : o.lr;
  const double scale = numbers.grad_scale ? *numbers.grad_scale : 1;
  const double clip = numbers.grad_norm ? clip_coefficient(*numbers.grad_norm, o.max_grad_norm) : 1;
  return {.gradient = A((o.maximize ? -clip : clip) / scale),
          .decay = A(1 - lr * o.weight_decay),
          .beta1 = A(o.beta1),
          .weight1 = A(1 - o.beta1),
          .beta2 = A(o.beta2),
          .weight2 = A(1 - o.beta2),
          .correction = A(1 / std::sqrt(one_minus_power(o.log_beta2, step))),
          .step_size = A(lr / one_minus_power(o.log_beta1, step)),
          .eps = A(o.eps)};
}

// Arithmetic is how a device multiplies, divides and takes a root: product() must round, or a gradient that is clipped
// here would not be the one that a multiplication of its own leaves.
template <typename Arithmetic, typename A>
GPTKERNELS_STEP void adamw_update(const AdamwFactors<A>& f, A gradient, A& param, A& exp_avg, A& exp_avg_sq) {
  const A g = Arithmetic::product(gradient, f.gradient);
  // From the nearer end, as torch.lerp: with beta1 = 0 the average is g, whatever it was.
  exp_avg = f.weight1 < A(0.5) ? exp_avg + f.weight1 * (g - exp_avg) : g - f.beta1 * (g - exp_avg);
  exp_avg_sq = exp_avg_sq * f.beta2 + f.weight2 * g * g;
  const A denominator = Arithmetic::square_root(exp_avg_sq) * f.correction + f.eps;
  param = param * f.decay - Arithmetic::quotient(f.step_size * exp_avg, denominator);
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
