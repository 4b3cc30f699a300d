// One step of AdamW (Loshchilov and Hutter, 2019), which updates a list of tensors in place. The CPU and CUDA kernels
// share the arithmetic below.
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
  double log_beta1;
  double log_beta2;
  double eps;
  double weight_decay;
  float max_grad_norm;
  bool maximize;
  // If true, the parameters are bfloat16 and have no masters. The step rounds the parameters stochastically, and also
  // their moments if these are bfloat16.
  bool round_stochastically;
  uint64_t rounding_seed;
};

enum AdamwArray : uint32_t { kParamArray, kExpAvgArray, kExpAvgSqArray };

// Optional scalars in the memory of the tensors' device. A kernel reads them when it runs, so a CUDA graph can be
// replayed with new values.
struct AdamwNumbers {
  const float* lr;  // if null, wide_lr; if both are null, AdamwOptions::lr
  const double* wide_lr;
  const float* grad_scale;  // divisor of the gradients
  const float* grad_norm;   // norm of gradients / grad_scale, or null (no clipping)
  const float* found_inf;   // if not 0, the step is a no-op
};

// Gradient and State are T or float. The pointer arrays are in host memory.
template <typename T, typename Gradient, typename State>
struct Adamw {
  T* const* params;
  // Float32 master weights, or null. The step updates the masters, and stores them rounded to T in params. If a master
  // rounded to T differs from its parameter, other code has changed the parameter, and the step starts from the
  // parameter.
  float* const* masters;
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

// ---- the step's arithmetic, shared by both devices ------------------------------------------------------------------

// adamw_factors() computes the factors in float64 (the clip coefficient in float32) and rounds them to A, because for
// small t, 1 - beta^t would have few accurate digits in float32.
template <typename A>
struct AdamwFactors {
  A gradient;  // clip coefficient / grad_scale, negated to maximize
  A decay;     // 1 - lr * weight_decay
  A beta1;
  A weight1;  // 1 - beta1
  A beta2;
  A weight2;     // 1 - beta2
  A correction;  // 1 / sqrt(1 - beta2^t)
  A step_size;   // lr / (1 - beta1^t)
  A eps;
};

// The coefficient has the same bits as in torch's clip_grad_norm_. It is NaN if the norm is NaN.
GPTKERNELS_STEP float clip_coefficient(float norm, float max_norm) {
  const float coefficient = 1 / (norm + 1e-6f) * max_norm;
  return coefficient > 1 ? 1 : coefficient;
}

// expm1() is faster than pow(). The result is not -expm1(), because torch rounds beta^t before the subtraction.
GPTKERNELS_STEP double one_minus_power(double log_beta, double t) {
  const double power = 1 + std::expm1(t * log_beta);
  return 1 - power;
}

template <typename A>
GPTKERNELS_STEP AdamwFactors<A> adamw_factors(const AdamwOptions& o, const AdamwNumbers& numbers, double step) {
  const double lr = numbers.lr ? *numbers.lr : numbers.wide_lr ? *numbers.wide_lr : o.lr;
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

template <typename T>
GPTKERNELS_STEP float current_value(float master, T param) {
  const float value = static_cast<float>(param);
  return static_cast<float>(static_cast<T>(master)) == value ? master : value;
}

// Arithmetic::product() must round (no FMA), so that a gradient clipped here has the same bits as one clipped by a
// separate multiplication.
template <typename Arithmetic, typename A>
GPTKERNELS_STEP void adamw_update(const AdamwFactors<A>& f, A gradient, A& param, A& exp_avg, A& exp_avg_sq) {
  const A g = Arithmetic::product(gradient, f.gradient);
  // This is torch.lerp's formula. With beta1 = 0 the result is exactly g.
  exp_avg = f.weight1 < A(0.5) ? exp_avg + f.weight1 * (g - exp_avg) : g - f.beta1 * (g - exp_avg);
  exp_avg_sq = exp_avg_sq * f.beta2 + f.weight2 * g * g;
  const A denominator = Arithmetic::square_root(exp_avg_sq) * f.correction + f.eps;
  param = param * f.decay - Arithmetic::quotient(f.step_size * exp_avg, denominator);
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
