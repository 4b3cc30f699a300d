#include "../csrc/decode.h"

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

constexpr const char* op = "decode";
constexpr size_t kMatrices = 6;  // weights of a layer

GeluForm form_of(const std::string& approximate) {
  if (approximate == "tanh") return GeluForm::kTanh;
  if (approximate == "none") return GeluForm::kErf;
  fail(op, "approximate must be 'tanh' or 'none', got '", approximate.c_str(), "'");
}

void check_dense(const char* name, const Tensor& t) {
  if (!t.is_contiguous()) fail(op, name, " must be contiguous");
}

// Weights must be contiguous, because a copy at each decoding step would be slow.
void check_weight(const std::string& name, const Tensor& t, const Tensor& wte, const Shape& shape) {
  check_like(op, name.c_str(), t, "wte", wte);
  check_shape(op, name.c_str(), t, shape);
  check_dense(name.c_str(), t);
}

void check_numbers(const char* name, const Tensor& t, const Tensor& wte, const Shape& shape) {
  check_same_device(op, name, t, "wte", wte);
  check_dtype(op, name, t, ScalarType::Long);
  check_shape(op, name, t, shape);
  check_dense(name, t);
}

// The weights of a layer have GPT-2's order: ln_1, c_attn, c_proj, ln_2, c_fc, c_proj.
Shape weight_shape(size_t i, int64_t C) {
  const Shape shapes[kMatrices] = {{C}, {3 * C, C}, {C, C}, {C}, {4 * C, C}, {C, 4 * C}};
  return shapes[i];
}

int64_t check_arguments(const Tensor& sequences, const Tensor& lengths, const Tensor& wte, const Tensor& wpe,
                        const std::vector<Tensor>& layers, const Tensor& norm_weight, const OptionalTensor& norm_bias,
                        const Tensor& head, const Tensor& keys_values, int64_t num_heads, int64_t vocab_size) {
  check_floating(op, "wte", wte);
  for (const auto& [name, t] : {std::pair{"wte", &wte}, {"wpe", &wpe}, {"head", &head}})
    if (t->dim() != 2) fail(op, name, " must have 2 dimensions, got shape ", describe(shape_of(*t)));
  const int64_t C = wte.size(1);
  if (num_heads < 1 || C < 1 || C % num_heads != 0)
    fail(op, "num_heads must divide the width of wte, ", C, ", got ", num_heads);
  if (C / num_heads > kDecodeMaxHeadSize)
    fail(op, "the head size must be from 1 to ", kDecodeMaxHeadSize, ", got ", C / num_heads);
  if (vocab_size != -1 && (vocab_size < 1 || vocab_size > wte.size(0)))
    fail(op, "vocab_size must be from 1 to ", wte.size(0), " (the rows of wte), or -1 for all of them, got ",
         vocab_size);
  if (sequences.dim() != 2 || sequences.size(0) > kDecodeMaxBatch)
    fail(op, "sequences must have shape (B, T) with B at most ", kDecodeMaxBatch, ", got ",
         describe(shape_of(sequences)));
  const int64_t B = sequences.size(0);
  check_numbers("sequences", sequences, wte, {B, sequences.size(1)});
  check_numbers("lengths", lengths, wte, {B});
  check_dense("wte", wte);
  check_weight("wpe", wpe, wte, {wpe.size(0), C});
  check_weight("head", head, wte, {head.size(0), C});
  check_weight("norm_weight", norm_weight, wte, {C});
  if (norm_bias) check_weight("norm_bias", *norm_bias, wte, {C});
  const size_t each = norm_bias ? 2 * kMatrices : kMatrices;
  if (layers.size() % each != 0)
    fail(op, "layers must have ", each, " tensors for each layer", norm_bias ? "" : " without biases", ", got ",
         layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    const Shape shape = weight_shape(i % each / (norm_bias ? 2 : 1), C);
    const bool is_bias = norm_bias && i % 2 == 1;
    check_weight("layers[" + std::to_string(i) + "]", layers[i], wte, is_bias ? Shape{shape[0]} : shape);
  }
  const int64_t L = static_cast<int64_t>(layers.size() / each);
  check_like(op, "keys_values", keys_values, "wte", wte);
  if (keys_values.dim() != 6) fail(op, "keys_values must have 6 dimensions, got ", describe(shape_of(keys_values)));
  check_shape(op, "keys_values", keys_values, {L, 2, B, num_heads, keys_values.size(4), C / num_heads});
  check_dense("keys_values", keys_values);
  if (keys_values.size(4) > wpe.size(0))
    fail(op, "keys_values has room for ", keys_values.size(4), " tokens, but wpe has only ", wpe.size(0), " positions");
  return L;
}

template <typename T>
std::vector<DecodeLayer<T>> layers_of(const std::vector<Tensor>& tensors, bool biases, int64_t count) {
  const size_t step = biases ? 2 : 1;
  std::vector<DecodeLayer<T>> found(static_cast<size_t>(count));
  for (size_t l = 0; l < found.size(); ++l) {
    const auto weight = [&](size_t i) { return pointer<T>(tensors[(l * kMatrices + i) * step]); };
    const auto bias = [&](size_t i) { return biases ? pointer<T>(tensors[(l * kMatrices + i) * step + 1]) : nullptr; };
    found[l] = {.norm_1_weight = weight(0),
                .norm_1_bias = bias(0),
                .qkv_weight = weight(1),
                .qkv_bias = bias(1),
                .attn_proj_weight = weight(2),
                .attn_proj_bias = bias(2),
                .norm_2_weight = weight(3),
                .norm_2_bias = bias(3),
                .fc_weight = weight(4),
                .fc_bias = bias(4),
                .mlp_proj_weight = weight(5),
                .mlp_proj_bias = bias(5)};
  }
  return found;
}

Tensor decode_op(const Tensor& sequences, const Tensor& lengths, const Tensor& wte, const Tensor& wpe,
                 const std::vector<Tensor>& layers, const Tensor& norm_weight, const OptionalTensor& norm_bias,
                 const Tensor& head, const Tensor& keys_values, int64_t num_heads, int64_t vocab_size, double eps,
                 StringHandle approximate) {
  const GeluForm form = form_of(take_string(approximate));
  const int64_t layer_count = check_arguments(sequences, lengths, wte, wpe, layers, norm_weight, norm_bias, head,
                                              keys_values, num_heads, vocab_size);

  const Launcher launcher(op, wte);
  Tensor logits = allocate({sequences.size(0), head.size(0)}, wte);
  dispatch_floating(wte, [&]<typename T>() {
    const auto weights = layers_of<T>(layers, norm_bias.has_value(), layer_count);
    Decode<T> p = {.logits = pointer<T>(logits),
                   .keys_values = pointer<T>(keys_values),
                   .sequences = pointer<int64_t>(sequences),
                   .lengths = pointer<int64_t>(lengths),
                   .wte = pointer<T>(wte),
                   .wpe = pointer<T>(wpe),
                   .layers = weights.data(),
                   .norm_weight = pointer<T>(norm_weight),
                   .norm_bias = pointer<T>(norm_bias),
                   .lm_head = pointer<T>(head),
                   .batch = sequences.size(0),
                   .sequence_length = sequences.size(1),
                   .layer_count = layer_count,
                   .width = wte.size(1),
                   .heads = num_heads,
                   .capacity = keys_values.size(4),
                   .vocabulary = vocab_size == -1 ? wte.size(0) : vocab_size,
                   .lm_head_rows = head.size(0),
                   .eps = eps,
                   .gelu = form,
                   .workspace = nullptr};
    const Tensor scratch = workspace(decode_workspace(p), wte);
    p.workspace = pointer<void>(scratch);
    launcher.check(decode<T>(p, launcher.stream()));
  });
  return logits;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("decode", TORCH_BOX(&decode_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
