#include "../csrc/adamw.h"

#include <array>
#include <map>

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

constexpr const char* op = "adamw_";

using Tensors = std::vector<Tensor>;

// ---- checks ---------------------------------------------------------------------------------------------------------

void check_length(const char* name, const Tensors& list, const Tensors& params) {
  if (list.size() != params.size())
    fail(op, name, " must have as many tensors as params (", params.size(), "), got ", list.size());
}

bool same_device(const Tensor& t, const Tensor& other) {
  return t.is_cpu() == other.is_cpu() && t.get_device_index() == other.get_device_index();
}

// A tensor of one of the lists beside its parameter. Names are put together only for an error: lists are long.
void check_beside(const char* name, size_t i, const Tensor& t, const Tensor& param) {
  if (!same_device(t, param))
    fail(op, name, '[', i, "] is on ", describe_device(t), " but params[", i, "] is on ", describe_device(param));
  if (t.scalar_type() != param.scalar_type() && t.scalar_type() != ScalarType::Float)
    fail(op, name, '[', i, "] must be ", describe(param.scalar_type()), " as params[", i, "] or float32, got ",
         describe(t.scalar_type()));
  if (shape_of(t) != shape_of(param))
    fail(op, name, '[', i, "] must have shape ", describe(shape_of(param)), ", got ", describe(shape_of(t)));
}

void check_dense(const char* name, size_t i, const Tensor& t) {
  const auto strides = t.strides();
  if (!t.is_contiguous())
    fail(op, name, '[', i, "] is written in place and must be contiguous, got shape ", describe(shape_of(t)),
         " with strides ", describe(Shape(strides.begin(), strides.end())));
}

void check_number(const char* name, const Tensor& t, const Tensor& param) {
  check_same_device(op, name, t, "params[0]", param);
  check_dtype(op, name, t, ScalarType::Float);
  if (t.numel() != 1) fail(op, name, " must have one element, got shape ", describe(shape_of(t)));
}

void check_step(size_t i, const Tensor& step, const Tensor& param) {
  if (!same_device(step, param) || step.scalar_type() != ScalarType::Float || step.numel() != 1)
    fail(op, "steps[", i, "] must be one float32 on ", describe_device(param), ", got ", describe(step.scalar_type()),
         " of shape ", describe(shape_of(step)), " on ", describe_device(step));
}

void check_param(size_t i, const Tensor& param, const Tensor& first) {
  if (!is_floating(param.scalar_type()))
    fail(op, "params[", i, "] must be float64, float32, bfloat16 or float16, got ", describe(param.scalar_type()));
  if (!same_device(param, first))
    fail(op, "params[", i, "] is on ", describe_device(param), " but params[0] is on ", describe_device(first));
  check_dense("params", i, param);
}

void check_master(size_t i, const Tensor& master, const Tensor& param) {
  if (param.scalar_type() != ScalarType::BFloat16 && param.scalar_type() != ScalarType::Half)
    fail(op, "master_params belong to bfloat16 and float16 parameters, params[", i, "] is ",
         describe(param.scalar_type()));
  if (master.scalar_type() != ScalarType::Float)
    fail(op, "master_params[", i, "] must be float32, got ", describe(master.scalar_type()));
  check_beside("master_params", i, master, param);
  check_dense("master_params", i, master);
}

void check_option(const char* name, double value, bool good, const char* wanted) {
  if (!good) fail(op, name, " must be ", wanted, ", got ", value);
}

// ---- the launch -----------------------------------------------------------------------------------------------------

// The lists, with gradients made dense.
struct Lists {
  const Tensors& params;
  const Tensors& grads;
  const Tensors& exp_avgs;
  const Tensors& exp_avg_sqs;
  const Tensors& steps;
  const std::optional<Tensors>& masters;
};

using Indices = std::vector<size_t>;

template <typename T>
std::vector<T*> pointers(const Tensors& list, const Indices& indices) {
  std::vector<T*> found;
  found.reserve(indices.size());
  for (size_t i : indices) found.push_back(static_cast<T*>(list[i].data_ptr()));
  return found;
}

template <typename T, typename Gradient, typename State>
void launch(const Launcher& launcher, const Lists& lists, const Indices& indices, const AdamwOptions& options,
            const float* lr, const float* grad_scale, const float* found_inf) {
  const auto params = pointers<T>(lists.params, indices);
  const auto masters = lists.masters ? pointers<float>(*lists.masters, indices) : std::vector<float*>();
  const auto grads = pointers<Gradient>(lists.grads, indices);
  const auto exp_avgs = pointers<State>(lists.exp_avgs, indices);
  const auto exp_avg_sqs = pointers<State>(lists.exp_avg_sqs, indices);
  const auto steps = pointers<float>(lists.steps, indices);
  std::vector<int64_t> sizes;
  for (size_t i : indices) sizes.push_back(lists.params[i].numel());
  launcher.check(adamw<T, Gradient, State>({.params = params.data(),
                                            .masters = lists.masters ? masters.data() : nullptr,
                                            .grads = grads.data(),
                                            .exp_avgs = exp_avgs.data(),
                                            .exp_avg_sqs = exp_avg_sqs.data(),
                                            .steps = steps.data(),
                                            .sizes = sizes.data(),
                                            .count = static_cast<int64_t>(sizes.size()),
                                            .options = options,
                                            .lr = lr,
                                            .grad_scale = grad_scale,
                                            .found_inf = found_inf},
                                           launcher.stream()));
}

// fn with T, or with float where the tensor is wider than its parameter.
template <typename T, typename Fn>
void dispatch_or_float(const Tensor& t, const Fn& fn) {
  if constexpr (!std::is_same_v<T, float>)
    if (t.scalar_type() == ScalarType::Float) return fn.template operator()<float>();
  fn.template operator()<T>();
}

void adamw_op(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
              const Tensors& steps, const Tensor& lr, double beta1, double beta2, double eps, double weight_decay,
              const OptionalTensor& grad_scale, const OptionalTensor& found_inf, bool maximize,
              const std::optional<Tensors>& master_params) {
  check_length("grads", grads, params);
  check_length("exp_avgs", exp_avgs, params);
  check_length("exp_avg_sqs", exp_avg_sqs, params);
  check_length("steps", steps, params);
  if (master_params) check_length("master_params", *master_params, params);
  check_option("beta1", beta1, beta1 >= 0 && beta1 < 1, "in [0, 1)");
  check_option("beta2", beta2, beta2 >= 0 && beta2 < 1, "in [0, 1)");
  check_option("eps", eps, eps >= 0, "at least 0");
  if (lr.numel() != 1) fail(op, "lr must have one element, got shape ", describe(shape_of(lr)));
  if (lr.scalar_type() != ScalarType::Float && (lr.scalar_type() != ScalarType::Double || !lr.is_cpu()))
    fail(op, "lr must be float32, or float64 on the cpu, got ", describe(lr.scalar_type()), " on ",
         describe_device(lr));
  if (params.empty()) return;

  std::map<std::array<ScalarType, 3>, Indices> groups;  // tensors of the same dtypes share a launch
  Tensors grads_dense;
  grads_dense.reserve(grads.size());
  for (size_t i = 0; i < params.size(); ++i) {
    check_param(i, params[i], params[0]);
    check_beside("grads", i, grads[i], params[i]);
    check_beside("exp_avgs", i, exp_avgs[i], params[i]);
    check_beside("exp_avg_sqs", i, exp_avg_sqs[i], params[i]);
    check_dense("exp_avgs", i, exp_avgs[i]);
    check_dense("exp_avg_sqs", i, exp_avg_sqs[i]);
    if (exp_avg_sqs[i].scalar_type() != exp_avgs[i].scalar_type())
      fail(op, "exp_avg_sqs[", i, "] must have the dtype of exp_avgs[", i, "] (", describe(exp_avgs[i].scalar_type()),
           "), got ", describe(exp_avg_sqs[i].scalar_type()));
    check_step(i, steps[i], params[0]);
    if (master_params) check_master(i, (*master_params)[i], params[i]);
  }
  if (!lr.is_cpu()) check_same_device(op, "lr", lr, "params[0]", params[0]);
  if (grad_scale) check_number("grad_scale", *grad_scale, params[0]);
  if (found_inf) check_number("found_inf", *found_inf, params[0]);

  const Launcher launcher(op, params[0]);
  for (size_t i = 0; i < params.size(); ++i) {
    grads_dense.push_back(dense(grads[i]));
    groups[{params[i].scalar_type(), grads[i].scalar_type(), exp_avgs[i].scalar_type()}].push_back(i);
  }
  // An lr on the CPU is read here, one on the device by the kernel.
  const bool is_double = lr.scalar_type() == ScalarType::Double;
  const double value = !lr.is_cpu() ? 0 : is_double ? *pointer<double>(lr) : double(*pointer<float>(lr));
  const AdamwOptions options = {
      .lr = value, .beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = weight_decay, .maximize = maximize};
  const float* lr_pointer = lr.is_cpu() ? nullptr : pointer<float>(lr);
  const Lists lists = {params, grads_dense, exp_avgs, exp_avg_sqs, steps, master_params};
  for (const auto& [dtypes, indices] : groups) {
    const size_t first = indices[0];
    dispatch_floating(params[first], [&]<typename T>() {
      dispatch_or_float<T>(grads[first], [&]<typename Gradient>() {
        dispatch_or_float<T>(exp_avgs[first], [&]<typename State>() {
          launch<T, Gradient, State>(launcher, lists, indices, options, lr_pointer, pointer<float>(grad_scale),
                                     pointer<float>(found_inf));
        });
      });
    });
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("adamw_", TORCH_BOX(&adamw_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
