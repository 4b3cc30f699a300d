#include "../csrc/adamw.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

constexpr const char* op = "adamw_";

using Tensors = std::vector<Tensor>;

// ---- checks ---------------------------------------------------------------------------------------------------------

// The constructor reads a tensor's properties once, because each read is a call into LibTorch, and the lists of tensors
// are long.
struct Facts {
  int32_t dtype;
  int32_t device_type;
  int32_t device;
  bool contiguous;
  int64_t dim;
  const int64_t* sizes;

  explicit Facts(const Tensor& t) : handle_(t.get()) {
    int64_t* shape;
    check_shim(aoti_torch_get_dtype(t.get(), &dtype));
    check_shim(aoti_torch_get_device_type(t.get(), &device_type));
    check_shim(aoti_torch_get_device_index(t.get(), &device));
    check_shim(aoti_torch_is_contiguous(t.get(), &contiguous));
    check_shim(aoti_torch_get_dim(t.get(), &dim));
    check_shim(aoti_torch_get_sizes(t.get(), &shape));
    sizes = shape;
  }
  bool is_on_device_of(const Facts& other) const { return device_type == other.device_type && device == other.device; }
  bool has_shape_of(const Facts& other) const {
    return dim == other.dim && std::equal(sizes, sizes + dim, other.sizes);
  }
  bool has_one_element() const {
    return std::all_of(sizes, sizes + dim, [](int64_t size) { return size == 1; });
  }
  const int64_t* strides() const {
    int64_t* found;
    check_shim(aoti_torch_get_strides(handle_, &found));
    return found;
  }
  bool has_layout_of(const Facts& other) const {
    if (contiguous && other.contiguous) return true;
    const int64_t *mine = strides(), *others = other.strides();
    for (int64_t i = 0; i < dim; ++i)
      if (sizes[i] != 1 && mine[i] != others[i]) return false;
    return true;
  }
  // True if the elements fill their memory without gaps, in any order of the dimensions (channels_last, a transpose).
  bool is_dense() const {
    if (contiguous) return true;
    const int64_t* stride = strides();
    std::vector<int64_t> order;
    for (int64_t i = 0; i < dim; ++i)
      if (sizes[i] != 1) order.push_back(i);
    std::sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return stride[i] < stride[j]; });
    int64_t expected = 1;
    for (int64_t i : order) {
      if (stride[i] != expected) return false;
      expected *= sizes[i];
    }
    return true;
  }

 private:
  AtenTensorHandle handle_;
};

void check_length(const char* name, const Tensors& list, const Tensors& params) {
  if (list.size() != params.size())
    fail(op, name, " must have as many tensors as params (", params.size(), "), got ", list.size());
}

void check_against_param(const char* name, size_t i, const Tensor& t, const Facts& facts, const Tensor& param,
                         const Facts& wanted) {
  if (!facts.is_on_device_of(wanted))
    fail(op, name, '[', i, "] is on ", describe_device(t), " but params[", i, "] is on ", describe_device(param));
  if (facts.dtype != wanted.dtype && facts.dtype != aoti_torch_dtype_float32())
    fail(op, name, '[', i, "] must be ", describe(param.scalar_type()), " as params[", i, "] or float32, got ",
         describe(t.scalar_type()));
  if (!facts.has_shape_of(wanted))
    fail(op, name, '[', i, "] must have shape ", describe(shape_of(param)), ", got ", describe(shape_of(t)));
}

std::string describe_layout(const Tensor& t) {
  const auto strides = t.strides();
  return "shape " + describe(shape_of(t)) + " with strides " + describe(Shape(strides.begin(), strides.end()));
}

// The kernel processes a parameter, its gradient, its moments and its master in the order of their memory, so all must
// have the same layout.
void check_layout(const char* name, size_t i, const Tensor& t, const Facts& facts, const Tensor& param,
                  const Facts& wanted) {
  if (!facts.has_layout_of(wanted))
    fail(op, name, '[', i, "] must have the strides of params[", i, "], which has ", describe_layout(param), ", got ",
         describe_layout(t));
}

void check_number(const char* name, const OptionalTensor& t, const Tensor& param) {
  if (!t) return;
  check_same_device(op, name, *t, "params[0]", param);
  check_dtype(op, name, *t, ScalarType::Float);
  if (t->numel() != 1) fail(op, name, " must have one element, got shape ", describe(shape_of(*t)));
}

void check_step(size_t i, const Tensor& step, const Tensor& param, const Facts& wanted) {
  const Facts facts(step);
  if (!facts.is_on_device_of(wanted) || facts.dtype != aoti_torch_dtype_float32() || !facts.has_one_element())
    fail(op, "steps[", i, "] must be one float32 on ", describe_device(param), ", got ", describe(step.scalar_type()),
         " of shape ", describe(shape_of(step)), " on ", describe_device(step));
}

void check_param(size_t i, const Tensor& param, const Facts& facts, const Tensor& first, const Facts& wanted) {
  if ((i == 0 || facts.dtype != wanted.dtype) && !is_floating(param.scalar_type()))
    fail(op, "params[", i, "] must be float64, float32, bfloat16 or float16, got ", describe(param.scalar_type()));
  if (!facts.is_on_device_of(wanted))
    fail(op, "params[", i, "] is on ", describe_device(param), " but params[0] is on ", describe_device(first));
  if (!facts.is_dense())
    fail(op, "params[", i, "] is written in place and must fill its memory without gaps, got ", describe_layout(param));
}

void check_master(size_t i, const Tensor& master, const Tensor& param, const Facts& wanted) {
  const Facts facts(master);
  if (param.scalar_type() != ScalarType::BFloat16 && param.scalar_type() != ScalarType::Half)
    fail(op, "master_params belong to bfloat16 and float16 parameters, params[", i, "] is ",
         describe(param.scalar_type()));
  if (facts.dtype != aoti_torch_dtype_float32())
    fail(op, "master_params[", i, "] must be float32, got ", describe(master.scalar_type()));
  check_against_param("master_params", i, master, facts, param, wanted);
  check_layout("master_params", i, master, facts, param, wanted);
}

void check_roundable(const Tensors& params, const std::optional<Tensors>& masters) {
  if (masters) fail(op, "rounding_seed and master_params exclude each other");
  for (size_t i = 0; i < params.size(); ++i)
    if (params[i].scalar_type() != ScalarType::BFloat16)
      fail(op, "rounding_seed is for bfloat16 parameters, params[", i, "] is ", describe(params[i].scalar_type()));
}

void check_option(const char* name, double value, bool good, const char* wanted) {
  if (!good) fail(op, name, " must be ", wanted, ", got ", value);
}

void check_lr(const Tensor& lr) {
  if (lr.numel() != 1) fail(op, "lr must have one element, got shape ", describe(shape_of(lr)));
  if (lr.scalar_type() != ScalarType::Float && lr.scalar_type() != ScalarType::Double)
    fail(op, "lr must be float32 or float64, got ", describe(lr.scalar_type()));
}

// ---- the launch -----------------------------------------------------------------------------------------------------

struct Lists {
  const Tensors& params;
  const Tensors& grads;
  const Tensors& exp_avgs;
  const Tensors& exp_avg_sqs;
  const Tensors& steps;
  const std::optional<Tensors>& masters;
};

struct Group {
  std::array<int32_t, 3> dtypes;
  std::vector<size_t> members;
};

Tensor copy_in_layout(const Tensor& grad, const Facts& param) {
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(grad.scalar_type()));
  AtenTensorHandle handle;
  check_shim(aoti_torch_empty_strided(param.dim, param.sizes, param.strides(), dtype, param.device_type, param.device,
                                      &handle));
  Tensor copy(handle);
  torch::stable::copy_(copy, grad);
  return copy;
}

// Checks the tensors, and groups the parameters by the dtypes of parameter, gradient and moments. A gradient whose
// layout differs from its parameter's is replaced in `grads` by a copy.
std::vector<Group> checked_groups(const Lists& lists, Tensors& grads) {
  std::vector<Group> groups;
  const Tensor& first = lists.params[0];
  const Facts first_facts(first);
  for (size_t i = 0; i < lists.params.size(); ++i) {
    const Tensor& param = lists.params[i];
    const Facts facts(param), grad(grads[i]), exp_avg(lists.exp_avgs[i]), exp_avg_sq(lists.exp_avg_sqs[i]);
    check_param(i, param, facts, first, first_facts);
    check_against_param("grads", i, grads[i], grad, param, facts);
    check_against_param("exp_avgs", i, lists.exp_avgs[i], exp_avg, param, facts);
    check_against_param("exp_avg_sqs", i, lists.exp_avg_sqs[i], exp_avg_sq, param, facts);
    check_layout("exp_avgs", i, lists.exp_avgs[i], exp_avg, param, facts);
    check_layout("exp_avg_sqs", i, lists.exp_avg_sqs[i], exp_avg_sq, param, facts);
    if (exp_avg_sq.dtype != exp_avg.dtype)
      fail(op, "exp_avg_sqs[", i, "] must have the dtype of exp_avgs[", i, "] (",
           describe(lists.exp_avgs[i].scalar_type()), "), got ", describe(lists.exp_avg_sqs[i].scalar_type()));
    check_step(i, lists.steps[i], first, first_facts);
    if (lists.masters) check_master(i, (*lists.masters)[i], param, facts);
    if (!grad.has_layout_of(facts)) grads[i] = copy_in_layout(grads[i], facts);

    const std::array<int32_t, 3> dtypes = {facts.dtype, grad.dtype, exp_avg.dtype};
    auto group = std::find_if(groups.rbegin(), groups.rend(), [&](const Group& g) { return g.dtypes == dtypes; });
    if (group == groups.rend()) {
      groups.push_back({dtypes, {}});
      groups.back().members.reserve(lists.params.size());
      group = groups.rbegin();
    }
    group->members.push_back(i);
  }
  return groups;
}

template <typename T>
std::vector<T*> pointers(const Tensors& list, const Group& group) {
  std::vector<T*> found;
  found.reserve(group.members.size());
  for (size_t i : group.members) found.push_back(static_cast<T*>(list[i].data_ptr()));
  return found;
}

template <typename T, typename Gradient, typename State>
void launch(const Launcher& launcher, const Lists& lists, const Group& group, const AdamwOptions& options,
            const AdamwNumbers& numbers) {
  const auto params = pointers<T>(lists.params, group);
  const auto masters = lists.masters ? pointers<float>(*lists.masters, group) : std::vector<float*>();
  const auto grads = pointers<Gradient>(lists.grads, group);
  const auto exp_avgs = pointers<State>(lists.exp_avgs, group);
  const auto exp_avg_sqs = pointers<State>(lists.exp_avg_sqs, group);
  const auto steps = pointers<float>(lists.steps, group);
  std::vector<int64_t> sizes;
  sizes.reserve(group.members.size());
  for (size_t i : group.members) sizes.push_back(lists.params[i].numel());
  launcher.check(adamw<T, Gradient, State>({.params = params.data(),
                                            .masters = lists.masters ? masters.data() : nullptr,
                                            .grads = grads.data(),
                                            .exp_avgs = exp_avgs.data(),
                                            .exp_avg_sqs = exp_avg_sqs.data(),
                                            .steps = steps.data(),
                                            .sizes = sizes.data(),
                                            .count = static_cast<int64_t>(sizes.size()),
                                            .options = options,
                                            .numbers = numbers},
                                           launcher.stream()));
}

// Calls fn<float> if t is float32, else fn<T>, where T is the parameter's dtype.
template <typename T, typename Fn>
void dispatch_or_float(const Tensor& t, const Fn& fn) {
  if constexpr (!std::is_same_v<T, float>)
    if (t.scalar_type() == ScalarType::Float) return fn.template operator()<float>();
  fn.template operator()<T>();
}

// Returns 0 if lr is on a GPU, where the kernel reads it.
double host_value(const Tensor& lr) {
  if (!lr.is_cpu()) return 0;
  return lr.scalar_type() == ScalarType::Double ? *pointer<double>(lr) : *pointer<float>(lr);
}

void adamw_op(const Tensors& params, Tensors grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
              const Tensors& steps, const Tensor& lr, double beta1, double beta2, double eps, double weight_decay,
              const OptionalTensor& grad_scale, const OptionalTensor& found_inf, bool maximize,
              const std::optional<Tensors>& master_params, const OptionalTensor& grad_norm,
              std::optional<double> max_grad_norm, std::optional<int64_t> rounding_seed) {
  check_length("grads", grads, params);
  check_length("exp_avgs", exp_avgs, params);
  check_length("exp_avg_sqs", exp_avg_sqs, params);
  check_length("steps", steps, params);
  if (master_params) check_length("master_params", *master_params, params);
  check_option("beta1", beta1, beta1 >= 0 && beta1 < 1, "in [0, 1)");
  check_option("beta2", beta2, beta2 >= 0 && beta2 < 1, "in [0, 1)");
  check_option("eps", eps, eps >= 0, "at least 0");
  if (max_grad_norm) check_option("max_grad_norm", *max_grad_norm, *max_grad_norm >= 0, "at least 0");
  if (grad_norm.has_value() != max_grad_norm.has_value())
    fail(op, "grad_norm and max_grad_norm clip together, got only ", grad_norm ? "grad_norm" : "max_grad_norm");
  check_lr(lr);
  if (params.empty()) return;
  const Lists lists = {params, grads, exp_avgs, exp_avg_sqs, steps, master_params};
  const std::vector<Group> groups = checked_groups(lists, grads);
  if (!lr.is_cpu()) check_same_device(op, "lr", lr, "params[0]", params[0]);
  check_number("grad_scale", grad_scale, params[0]);
  check_number("found_inf", found_inf, params[0]);
  if (rounding_seed) check_roundable(params, master_params);
  check_number("grad_norm", grad_norm, params[0]);

  const AdamwOptions options = {.lr = host_value(lr),
                                .beta1 = beta1,
                                .beta2 = beta2,
                                .log_beta1 = std::log(beta1),
                                .log_beta2 = std::log(beta2),
                                .eps = eps,
                                .weight_decay = weight_decay,
                                .max_grad_norm = static_cast<float>(max_grad_norm.value_or(0)),
                                .maximize = maximize,
                                .round_stochastically = rounding_seed.has_value(),
                                .rounding_seed = static_cast<uint64_t>(rounding_seed.value_or(0))};
  const bool wide = lr.scalar_type() == ScalarType::Double;
  const AdamwNumbers numbers = {.lr = lr.is_cpu() || wide ? nullptr : pointer<float>(lr),
                                .wide_lr = lr.is_cpu() || !wide ? nullptr : pointer<double>(lr),
                                .grad_scale = pointer<float>(grad_scale),
                                .grad_norm = pointer<float>(grad_norm),
                                .found_inf = pointer<float>(found_inf)};
  const Launcher launcher(op, params[0]);
  for (const Group& group : groups) {
    const size_t first = group.members[0];
    dispatch_floating(params[first], [&]<typename T>() {
      dispatch_or_float<T>(grads[first], [&]<typename Gradient>() {
        dispatch_or_float<T>(exp_avgs[first], [&]<typename State>() {
          launch<T, Gradient, State>(launcher, lists, group, options, numbers);
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
