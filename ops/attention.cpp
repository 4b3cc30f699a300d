#include "../csrc/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "calls.h"
#include "matmul.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

constexpr int64_t kMaxHeadSize = 256;

// A view (B, heads, tokens, HS) of a tensor. Its last dimension is contiguous; the others may have any strides.
struct Heads {
  Tensor tensor;
  int64_t offset;
  int64_t batch;
  int64_t head;
  int64_t token;

  template <typename T>
  HeadsView<T> view() const {
    auto* data = pointer<std::remove_const_t<T>>(tensor);
    return {data ? data + offset : nullptr, batch, head, token};
  }
};

// The stride of a dimension of size 1 has no effect. It is replaced by 0, so that it does not exclude a kernel that
// needs aligned strides.
Heads heads(const Tensor& t) {
  const auto stride = [&](int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); };
  return {t, 0, stride(0), stride(1), stride(2)};
}

// Part 0, 1 or 2 (q, k or v) of a packed (B, T, 3C) tensor.
Heads part(const Tensor& qkv, int64_t which, int64_t head_size) {
  const int64_t width = qkv.size(2);
  return {qkv, which * (width / 3), qkv.size(1) * width, head_size, width};
}

Heads unpacked(const Tensor& t, int64_t head_size) {
  return {t, 0, t.size(1) * t.size(2), head_size, t.size(2)};
}

struct Options {
  std::optional<double> scale = {};
  bool causal = false;
  int64_t query_offset = 0;
  OptionalTensor mask = {};  // broadcastable to (B, NH, Tq, Tk)
  OptionalTensor key_begin = {};
  OptionalTensor key_end = {};
  double dropout_p = 0;
  OptionalTensor seed = {};
  OptionalTensor offset = {};
  int64_t first_head = 0;
  std::optional<int64_t> total_heads = {};
  int64_t first_query = 0;
};

struct Inputs {
  AttentionSizes sizes;
  Heads query;
  Heads key;
  Heads value;
};

// ---- checks ---------------------------------------------------------------------------------------------------------

void check_head_size(const char* op, int64_t head_size) {
  if (head_size < 1 || head_size > kMaxHeadSize)
    fail(op, "the head size must be from 1 to ", kMaxHeadSize, ", got ", head_size);
}

AttentionSizes packed_sizes(const char* op, const Tensor& qkv, int64_t num_heads) {
  check_floating(op, "qkv", qkv);
  if (num_heads < 1) fail(op, "num_heads must be at least 1, got ", num_heads);
  if (qkv.dim() != 3 || qkv.size(2) == 0 || qkv.size(2) % (3 * num_heads) != 0)
    fail(op, "qkv must have shape (B, T, 3 * C) with C a multiple of num_heads (", num_heads, "), got ",
         describe(shape_of(qkv)));
  const int64_t head_size = qkv.size(2) / 3 / num_heads;
  check_head_size(op, head_size);
  return {.batches = qkv.size(0),
          .heads = num_heads,
          .key_heads = num_heads,
          .queries = qkv.size(1),
          .keys = qkv.size(1),
          .head_size = head_size};
}

AttentionSizes separate_sizes(const char* op, const Tensor& query, const Tensor& key, const Tensor& value) {
  check_floating(op, "query", query);
  check_like(op, "key", key, "query", query);
  check_like(op, "value", value, "query", query);
  if (query.dim() != 4) fail(op, "query must have shape (B, NH, Tq, HS), got ", describe(shape_of(query)));
  if (key.dim() != 4 || key.size(0) != query.size(0) || key.size(3) != query.size(3))
    fail(op, "key must have shape (B, heads, Tk, HS) with B ", query.size(0), " and HS ", query.size(3), ", got ",
         describe(shape_of(key)));
  check_shape(op, "value", value, shape_of(key));
  const int64_t num_heads = query.size(1), key_heads = key.size(1);
  if (key_heads == 0 ? num_heads != 0 : num_heads % key_heads != 0)
    fail(op, "the heads of query (", num_heads, ") must be a multiple of those of key (", key_heads, ")");
  check_head_size(op, query.size(3));
  return {.batches = query.size(0),
          .heads = num_heads,
          .key_heads = key_heads,
          .queries = query.size(2),
          .keys = key.size(2),
          .head_size = query.size(3)};
}

Shape mask_shape(const AttentionSizes& s) {
  return {s.batches, s.heads, s.queries, s.keys};
}

Shape query_shape(const AttentionSizes& s) {
  return {s.batches, s.heads, s.queries, s.head_size};
}

Shape logsumexp_shape(const AttentionSizes& s) {
  return {s.batches, s.heads, s.queries};
}

void check_attention_dropout(const char* op, const Options& options, int64_t heads, const char* like_name,
                             const Tensor& like) {
  check_dropout(op, "dropout_p", options.dropout_p, options.seed, options.offset, like_name, like);
  const int64_t total = options.total_heads.value_or(heads);
  if (options.first_head < 0 || options.first_head > total - heads)
    fail(op, "first_head and total_heads must satisfy 0 <= first_head <= total_heads - ", heads, ", got ",
         options.first_head, " and ", total);
  if (options.first_query < 0 || options.first_query % kGroupQueries != 0)
    fail(op, "first_query must be a multiple of ", int64_t{kGroupQueries}, ", got ", options.first_query);
}

void check_options(const char* op, const Options& options, const AttentionSizes& s, const Tensor& query) {
  if (const auto& mask = options.mask) {
    check_same_device(op, "attn_mask", *mask, "query", query);
    if (mask->scalar_type() != ScalarType::Bool && mask->scalar_type() != query.scalar_type())
      fail(op, "attn_mask must be bool or have the dtype of query (", describe(query.scalar_type()), "), got ",
           describe(mask->scalar_type()));
    const Shape wanted = mask_shape(s);
    const int64_t missing = 4 - mask->dim();
    bool broadcastable = missing >= 0;
    for (int64_t i = 0; broadcastable && i < mask->dim(); ++i)
      broadcastable = mask->size(i) == 1 || mask->size(i) == wanted[static_cast<size_t>(i + missing)];
    if (!broadcastable)
      fail(op, "attn_mask must be broadcastable to ", describe(wanted), ", got shape ", describe(shape_of(*mask)));
  }
  const auto check_bound = [&](const char* name, const OptionalTensor& t) {
    if (!t) return;
    check_same_device(op, name, *t, "query", query);
    check_dtype(op, name, *t, ScalarType::Int);
    check_shape(op, name, *t, {s.batches});
  };
  check_bound("key_begin", options.key_begin);
  check_bound("key_end", options.key_end);
  check_attention_dropout(op, options, s.heads, "query", query);
}

// ---- tensors --------------------------------------------------------------------------------------------------------

Tensor with_dense_rows(const Tensor& t) {
  return t.size(3) == 1 || t.stride(3) == 1 ? t : torch::stable::contiguous(t);
}

#ifdef GPTKERNELS_CUDA

// The fast kernels need rows of dout that are aligned to 16 bytes; those for sm_90a also need positive strides. (The
// gradient of a sum, for example, is expanded, with strides of 0.) Other gradients are copied, because `simple/` takes
// several times as long as a copy and a fast kernel, and because it rounds scores differently from a fast forward, so
// that delta cancels less exactly.
Tensor aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 ? t : torch::stable::clone(t);
}

Tensor with_aligned_rows(const Tensor& t) {
  const int64_t pack = 16 / t.element_size();
  if (t.element_size() > 4 || t.size(3) % 8 != 0) return with_dense_rows(t);
  for (int64_t i = 0; i < 3; ++i)
    if (t.size(i) != 1 && (t.stride(i) <= 0 || t.stride(i) % pack != 0)) return torch::stable::contiguous(t);
  return aligned(with_dense_rows(t));
}

#else

Tensor aligned(const Tensor& t) {
  return t;
}

Tensor with_aligned_rows(const Tensor& t) {
  return with_dense_rows(t);
}

#endif

Tensor allocate_heads(const Shape& shape, const std::array<int, 3>& order, const Tensor& like) {
  Shape strides(4, 1);
  int64_t stride = std::max<int64_t>(shape[3], 1);
  for (int i = 2; i >= 0; --i) {
    strides[order[i]] = stride;
    stride *= std::max<int64_t>(shape[order[i]], 1);
  }
  return allocate_strided(shape, strides, like.scalar_type(), like);
}

// The order of dimensions in memory is (B, T, heads, HS), so that a model's reshape to (B, T, C) copies nothing.
Tensor allocate_out(const AttentionSizes& s, const Tensor& like) {
  return allocate_heads(query_shape(s), {0, 2, 1}, like);
}

// The gradient has t's order of dimensions in memory.
Tensor allocate_gradient(const Tensor& t) {
  std::array<int, 3> order = {0, 1, 2};
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return t.stride(a) > t.stride(b); });
  return allocate_heads(shape_of(t), order, t);
}

// ---- launches -------------------------------------------------------------------------------------------------------

template <typename T>
AttentionMask<T> mask_of(const Options& options) {
  AttentionMask<T> mask;
  mask.causal = options.causal;
  mask.query_offset = options.query_offset;
  mask.key_begin = pointer<int32_t>(options.key_begin);
  mask.key_end = pointer<int32_t>(options.key_end);
  if (!options.mask) return mask;
  const Tensor& t = *options.mask;
  if (t.scalar_type() == ScalarType::Bool)
    mask.allowed = pointer<bool>(t);
  else
    mask.bias = pointer<T>(t);
  int64_t* const strides[] = {&mask.batch, &mask.head, &mask.query, &mask.key};
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) != 1) *strides[4 - t.dim() + i] = t.stride(i);
  return mask;
}

DropoutArguments dropout_of(const Options& options, const AttentionSizes& s) {
  if (options.dropout_p == 0) return {};
  return {.probability = options.dropout_p,
          .seed = pointer<int64_t>(options.seed),
          .offset = pointer<int64_t>(options.offset),
          .first_query = options.first_query,
          .first_head = options.first_head,
          .other_heads = options.total_heads.value_or(s.heads) - s.heads};
}

// The kernels require contiguous bounds.
Options with_dense_bounds(Options options) {
  options.key_begin = dense(options.key_begin);
  options.key_end = dense(options.key_end);
  return options;
}

double scale_or_default(const Options& options, const AttentionSizes& s) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(s.head_size)));
}

void forward(const Launcher& launcher, const Inputs& in, const Options& given, const Heads& out, Tensor& logsumexp) {
  const AttentionSizes& s = in.sizes;
  if (logsumexp.numel() == 0) return;
  if (s.keys == 0) {
    Tensor zeros = out.tensor;
    torch::stable::zero_(zeros);
    torch::stable::fill_(logsumexp, -std::numeric_limits<double>::infinity());
    return;
  }
  const Options options = with_dense_bounds(given);
  dispatch_floating(out.tensor, [&]<typename T>() {
    AttentionForward<T> p{.out = out.view<T>(),
                          .logsumexp = pointer<accumulate_t<T>>(logsumexp),
                          .query = in.query.view<const T>(),
                          .key = in.key.view<const T>(),
                          .value = in.value.view<const T>(),
                          .sizes = s,
                          .scale = scale_or_default(options, s),
                          .mask = mask_of<T>(options),
                          .dropout = dropout_of(options, s),
                          .tf32 = std::is_same_v<T, float> && tf32_allowed()};
    const Tensor scratch = workspace(attention_forward_workspace<T>(p), out.tensor);
    p.workspace = pointer<void>(scratch);
    launcher.check(attention_forward<T>(p, launcher.stream()));
  });
}

struct Gradients {
  Heads dquery;
  Heads dkey;
  Heads dvalue;
};

void backward(const Launcher& launcher, const Inputs& in, const Options& given, const Heads& dout,
              const OptionalTensor& dlogsumexp, const Heads& out, const Tensor& logsumexp, const Gradients& gradients) {
  const AttentionSizes& s = in.sizes;
  if (s.queries == 0 || s.keys == 0 || s.batches == 0 || s.heads == 0) {
    for (const Heads* gradient : {&gradients.dquery, &gradients.dkey, &gradients.dvalue}) {
      Tensor zeros = gradient->tensor;
      torch::stable::zero_(zeros);
    }
    return;
  }
  const Options options = with_dense_bounds(given);
  dispatch_floating(out.tensor, [&]<typename T>() {
    AttentionBackward<T> p{.dquery = gradients.dquery.view<T>(),
                           .dkey = gradients.dkey.view<T>(),
                           .dvalue = gradients.dvalue.view<T>(),
                           .dout = dout.view<const T>(),
                           .dlogsumexp = pointer<accumulate_t<T>>(dlogsumexp),
                           .out = out.view<const T>(),
                           .logsumexp = pointer<accumulate_t<T>>(logsumexp),
                           .query = in.query.view<const T>(),
                           .key = in.key.view<const T>(),
                           .value = in.value.view<const T>(),
                           .sizes = s,
                           .scale = scale_or_default(options, s),
                           .mask = mask_of<T>(options),
                           .dropout = dropout_of(options, s),
                           .tf32 = std::is_same_v<T, float> && tf32_allowed()};
    const Tensor scratch = workspace(attention_backward_workspace<T>(p), out.tensor);
    p.workspace = pointer<void>(scratch);
    launcher.check(attention_backward<T>(p, launcher.stream()));
  });
}

// ---- packed ---------------------------------------------------------------------------------------------------------

Options packed_options(std::optional<double> scale, double dropout_p, const OptionalTensor& seed,
                       const OptionalTensor& offset, int64_t first_head, std::optional<int64_t> total_heads) {
  return {.scale = scale,
          .causal = true,
          .dropout_p = dropout_p,
          .seed = seed,
          .offset = offset,
          .first_head = first_head,
          .total_heads = total_heads};
}

Inputs packed_inputs(const AttentionSizes& s, const Tensor& qkv) {
  return {s, part(qkv, 0, s.head_size), part(qkv, 1, s.head_size), part(qkv, 2, s.head_size)};
}

}  // namespace

std::tuple<Tensor, Tensor> attention_op(const Tensor& qkv, int64_t num_heads, std::optional<double> scale,
                                        double dropout_p, const OptionalTensor& seed, const OptionalTensor& offset,
                                        int64_t first_head, std::optional<int64_t> total_heads) {
  constexpr const char* op = "attention";
  const AttentionSizes s = packed_sizes(op, qkv, num_heads);
  const Options options = packed_options(scale, dropout_p, seed, offset, first_head, total_heads);
  check_attention_dropout(op, options, s.heads, "qkv", qkv);

  const Launcher launcher(op, qkv);
  const Tensor qkv_dense = dense(qkv);
  Tensor out = allocate({s.batches, s.queries, s.heads * s.head_size}, qkv);
  Tensor logsumexp = allocate(logsumexp_shape(s), accumulate_dtype(qkv), qkv);
  forward(launcher, packed_inputs(s, qkv_dense), options, unpacked(out, s.head_size), logsumexp);
  return {out, logsumexp};
}

Tensor attention_backward_op(const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& logsumexp,
                             int64_t num_heads, std::optional<double> scale, double dropout_p,
                             const OptionalTensor& seed, const OptionalTensor& offset, int64_t first_head,
                             std::optional<int64_t> total_heads) {
  constexpr const char* op = "attention_backward";
  const AttentionSizes s = packed_sizes(op, qkv, num_heads);
  const Shape out_shape = {s.batches, s.queries, s.heads * s.head_size};
  check_like(op, "dout", dout, "qkv", qkv);
  check_like(op, "out", out, "qkv", qkv);
  check_same_device(op, "logsumexp", logsumexp, "qkv", qkv);
  check_dtype(op, "logsumexp", logsumexp, accumulate_dtype(qkv));
  check_shape(op, "dout", dout, out_shape);
  check_shape(op, "out", out, out_shape);
  check_shape(op, "logsumexp", logsumexp, logsumexp_shape(s));
  const Options options = packed_options(scale, dropout_p, seed, offset, first_head, total_heads);
  check_attention_dropout(op, options, s.heads, "qkv", qkv);

  const Launcher launcher(op, qkv);
  const Tensor dout_dense = aligned(dense(dout));
  const Tensor qkv_dense = dense(qkv);
  const Tensor out_dense = dense(out);
  Tensor dqkv = allocate(shape_of(qkv), qkv);
  backward(launcher, packed_inputs(s, qkv_dense), options, unpacked(dout_dense, s.head_size), std::nullopt,
           unpacked(out_dense, s.head_size), dense(logsumexp),
           {part(dqkv, 0, s.head_size), part(dqkv, 1, s.head_size), part(dqkv, 2, s.head_size)});
  return dqkv;
}

namespace {

// ---- query, key and value -------------------------------------------------------------------------------------------

Inputs separate_inputs(const AttentionSizes& s, const Tensor& query, const Tensor& key, const Tensor& value) {
  return {s, heads(with_dense_rows(query)), heads(with_dense_rows(key)), heads(with_dense_rows(value))};
}

std::tuple<Tensor, Tensor> scaled_dot_product_attention_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                                           const OptionalTensor& attn_mask, double dropout_p,
                                                           bool is_causal, std::optional<double> scale,
                                                           int64_t query_offset, const OptionalTensor& key_begin,
                                                           const OptionalTensor& key_end, const OptionalTensor& seed,
                                                           const OptionalTensor& offset, int64_t first_head,
                                                           std::optional<int64_t> total_heads, int64_t first_query) {
  constexpr const char* op = "scaled_dot_product_attention";
  const AttentionSizes s = separate_sizes(op, query, key, value);
  const Options options{scale,     is_causal, query_offset, attn_mask,  key_begin,   key_end,
                        dropout_p, seed,      offset,       first_head, total_heads, first_query};
  check_options(op, options, s, query);

  const Launcher launcher(op, query);
  Tensor out = allocate_out(s, query);
  Tensor logsumexp = allocate(logsumexp_shape(s), accumulate_dtype(query), query);
  forward(launcher, separate_inputs(s, query, key, value), options, heads(out), logsumexp);
  return {out, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor> scaled_dot_product_attention_backward_op(
    const Tensor& dout, const OptionalTensor& dlogsumexp, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
    std::optional<double> scale, int64_t query_offset, const OptionalTensor& key_begin, const OptionalTensor& key_end,
    const OptionalTensor& seed, const OptionalTensor& offset, int64_t first_head, std::optional<int64_t> total_heads,
    int64_t first_query) {
  constexpr const char* op = "scaled_dot_product_attention_backward";
  const AttentionSizes s = separate_sizes(op, query, key, value);
  const Options options{scale,     is_causal, query_offset, attn_mask,  key_begin,   key_end,
                        dropout_p, seed,      offset,       first_head, total_heads, first_query};
  check_options(op, options, s, query);
  check_like(op, "dout", dout, "query", query);
  check_like(op, "out", out, "query", query);
  check_shape(op, "dout", dout, query_shape(s));
  check_shape(op, "out", out, query_shape(s));
  const auto check_statistic = [&](const char* name, const Tensor& t) {
    check_same_device(op, name, t, "query", query);
    check_dtype(op, name, t, accumulate_dtype(query));
    check_shape(op, name, t, logsumexp_shape(s));
  };
  check_statistic("logsumexp", logsumexp);
  if (dlogsumexp) check_statistic("dlogsumexp", *dlogsumexp);

  const Launcher launcher(op, query);
  Tensor dquery = allocate_gradient(query);
  Tensor dkey = allocate_gradient(key);
  Tensor dvalue = allocate_gradient(value);
  backward(launcher, separate_inputs(s, query, key, value), options, heads(with_aligned_rows(dout)), dense(dlogsumexp),
           heads(with_dense_rows(out)), dense(logsumexp), {heads(dquery), heads(dkey), heads(dvalue)});
  return {dquery, dkey, dvalue};
}

Tensor attention_dropout_mask_op(int64_t batches, int64_t num_heads, int64_t queries, int64_t keys, double dropout_p,
                                 const Tensor& seed, const Tensor& offset, int64_t first_head,
                                 std::optional<int64_t> total_heads, int64_t first_query) {
  constexpr const char* op = "attention_dropout_mask";
  const std::pair<const char*, int64_t> sizes[] = {
      {"batches", batches}, {"heads", num_heads}, {"queries", queries}, {"keys", keys}};
  for (const auto& [name, size] : sizes)
    if (size < 0) fail(op, name, " must be at least 0, got ", size);
  const Options options{.dropout_p = dropout_p,
                        .seed = seed,
                        .offset = offset,
                        .first_head = first_head,
                        .total_heads = total_heads,
                        .first_query = first_query};
  check_attention_dropout(op, options, num_heads, "seed", seed);

  const Launcher launcher(op, seed);
  Tensor mask = allocate({batches, num_heads, queries, keys}, ScalarType::Bool, seed);
  if (mask.numel() == 0) return mask;
  const AttentionSizes s{
      .batches = batches, .heads = num_heads, .key_heads = num_heads, .queries = queries, .keys = keys, .head_size = 0};
  launcher.check(attention_dropout_mask(pointer<bool>(mask), s, dropout_of(options, s), launcher.stream()));
  return mask;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("attention", TORCH_BOX(&attention_op));
  m.impl("attention_backward", TORCH_BOX(&attention_backward_op));
  m.impl("scaled_dot_product_attention", TORCH_BOX(&scaled_dot_product_attention_op));
  m.impl("scaled_dot_product_attention_backward", TORCH_BOX(&scaled_dot_product_attention_backward_op));
  m.impl("attention_dropout_mask", TORCH_BOX(&attention_dropout_mask_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
