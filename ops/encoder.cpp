#include "../csrc/encoder.h"

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {
namespace {

// Without positions, all tokens are one sequence.
struct Tokens {
  int64_t batch;
  int64_t length;
};

struct Vocabulary {
  int64_t size;  // V
  int64_t first_token;
};

Tensor forward(const char* op, Tokens shape, const Tensor& tokens, const Tensor& wte, const OptionalTensor& wpe,
               Vocabulary vocabulary, const Shape& out_shape) {
  const Launcher launcher(op, wte);
  const Tensor tokens_dense = dense(tokens);
  const Tensor wte_dense = dense(wte);
  const OptionalTensor wpe_dense = dense(wpe);
  Tensor out = allocate(out_shape, wte);
  dispatch_floating(wte, [&]<typename T>() {
    dispatch_index(tokens, [&]<typename Token>() {
      launcher.check(encoder_forward<T, Token>({.out = pointer<T>(out),
                                                .tokens = pointer<Token>(tokens_dense),
                                                .wte = pointer<T>(wte_dense),
                                                .wpe = pointer<T>(wpe_dense),
                                                .batch = shape.batch,
                                                .length = shape.length,
                                                .vocabulary = vocabulary.size,
                                                .width = wte.size(1),
                                                .first_token = vocabulary.first_token,
                                                .table_rows = wte.size(0)},
                                               launcher.stream()));
    });
  });
  return out;
}

void backward(const char* op, Tokens shape, const Tensor& dout, const Tensor& tokens, const Tensor& dwte,
              const OptionalTensor& dwpe, int64_t first_token, bool accumulate = false) {
  const Launcher launcher(op, dout);
  const Tensor dout_dense = dense(dout);
  const Tensor tokens_dense = dense(tokens);
  const int64_t vocabulary = dwte.size(0);
  const int64_t width = dwte.size(1);
  dispatch_floating(dout, [&]<typename T>() {
    dispatch_index(tokens, [&]<typename Token>() {
      const Tensor scratch =
          workspace(encoder_backward_workspace<T, Token>(shape.batch, shape.length, vocabulary, width), dout);
      launcher.check(encoder_backward<T, Token>({.dwte = pointer<T>(dwte),
                                                 .dwpe = dwpe ? pointer<T>(*dwpe) : nullptr,
                                                 .dout = pointer<T>(dout_dense),
                                                 .tokens = pointer<Token>(tokens_dense),
                                                 .workspace = pointer<void>(scratch),
                                                 .batch = shape.batch,
                                                 .length = shape.length,
                                                 .vocabulary = vocabulary,
                                                 .positions = dwpe ? dwpe->size(0) : 0,
                                                 .width = width,
                                                 .accumulate = accumulate,
                                                 .first_token = std::max<int64_t>(first_token, 0),
                                                 .is_shard = first_token >= 0},
                                                launcher.stream()));
    });
  });
}

void check_matrix(const char* op, const char* name, const Tensor& t) {
  if (t.dim() != 2) fail(op, name, " must have 2 dimensions, got shape ", describe(shape_of(t)));
}

void check_tokens(const char* op, const Tensor& tokens, const char* other_name, const Tensor& other) {
  check_index(op, "tokens", tokens);
  check_same_device(op, "tokens", tokens, other_name, other);
}

void check_length(const char* op, const Tensor& tokens, int64_t positions) {
  check_matrix(op, "tokens", tokens);
  if (tokens.size(1) > positions)
    fail(op, "tokens of length ", tokens.size(1), " need as many positions, there are ", positions);
}

void check_count(const char* op, const char* name, int64_t count, int64_t most) {
  if (count < 0) fail(op, name, " must not be negative, got ", count);
  if (count > most) fail(op, name, " must be at most ", most, " on this device, got ", count);
}

void check_backward(const char* op, const Tensor& dout, const Tensor& tokens, int64_t vocab_size) {
  check_dim_at_least(op, "dout", dout, 1);
  check_floating(op, "dout", dout);
  check_count(op, "vocab_size", vocab_size, kEncoderMaxVocabulary);
  check_count(op, "the number of tokens", tokens.numel(), kEncoderMaxRows);
  check_count(op, "the width of dout", width_of(dout), kEncoderMaxColumns);
  check_tokens(op, tokens, "dout", dout);
}

void check_first_token(const char* op, int64_t first_token) {
  if (first_token < -1)
    fail(op, "first_token must not be negative, or -1 for a table that is no shard, got ", first_token);
}

Vocabulary check_vocabulary(const char* op, int64_t vocab_size, int64_t first_token, const char* name,
                            const Tensor& table) {
  check_first_token(op, first_token);
  const int64_t rows = table.size(0);
  if (first_token >= 0) {
    if (vocab_size < -1 || vocab_size == 0)
      fail(op, "vocab_size must be at least 1, or -1 for no limit, got ", vocab_size);
    return {vocab_size == -1 ? INT64_MAX : vocab_size, first_token};
  }
  if (vocab_size != -1 && (vocab_size < 1 || vocab_size > rows))
    fail(op, "vocab_size must be from 1 to ", rows, " (the rows of ", name, "), or -1 for all of them, got ",
         vocab_size);
  return {vocab_size == -1 ? rows : vocab_size, 0};
}

Shape with_width(const Tensor& tokens, int64_t width) {
  Shape shape = shape_of(tokens);
  shape.push_back(width);
  return shape;
}

// ---- tokens and positions -------------------------------------------------------------------------------------------

Tensor encoder_op(const Tensor& tokens, const Tensor& wte, const Tensor& wpe, int64_t vocab_size, int64_t first_token) {
  constexpr const char* op = "encoder";
  check_matrix(op, "wte", wte);
  check_matrix(op, "wpe", wpe);
  check_floating(op, "wte", wte);
  check_like(op, "wpe", wpe, "wte", wte);
  check_shape(op, "wpe", wpe, {wpe.size(0), wte.size(1)});
  check_tokens(op, tokens, "wte", wte);
  check_length(op, tokens, wpe.size(0));
  const Vocabulary vocabulary = check_vocabulary(op, vocab_size, first_token, "wte", wte);
  return forward(op, {tokens.size(0), tokens.size(1)}, tokens, wte, wpe, vocabulary, with_width(tokens, wte.size(1)));
}

std::tuple<Tensor, Tensor> encoder_backward_op(const Tensor& dout, const Tensor& tokens, int64_t vocab_size,
                                               int64_t max_positions, int64_t first_token) {
  constexpr const char* op = "encoder_backward";
  check_first_token(op, first_token);
  check_backward(op, dout, tokens, vocab_size);
  check_count(op, "max_positions", max_positions, kEncoderMaxRows);
  check_length(op, tokens, max_positions);
  check_shape(op, "dout", dout, with_width(tokens, width_of(dout)));
  Tensor dwte = allocate({vocab_size, width_of(dout)}, dout);
  Tensor dwpe = allocate({max_positions, width_of(dout)}, dout);
  backward(op, {tokens.size(0), tokens.size(1)}, dout, tokens, dwte, dwpe, first_token);
  return {dwte, dwpe};
}

// On entry, dwte contains the gradient from an LM head that is tied to wte.
Tensor encoder_backward_inplace_op(const Tensor& dout, const Tensor& tokens, Tensor dwte, int64_t max_positions,
                                   int64_t first_token) {
  constexpr const char* op = "encoder_backward_";
  check_first_token(op, first_token);
  check_matrix(op, "dwte", dwte);
  check_like(op, "dwte", dwte, "dout", dout);
  check_no_overlap(op, "dwte", dwte);
  check_backward(op, dout, tokens, dwte.size(0));
  check_count(op, "max_positions", max_positions, kEncoderMaxRows);
  check_length(op, tokens, max_positions);
  check_shape(op, "dout", dout, with_width(tokens, width_of(dout)));
  check_shape(op, "dwte", dwte, {dwte.size(0), width_of(dout)});
  Tensor dwpe = allocate({max_positions, width_of(dout)}, dout);
  const Tensor dwte_dense = dense(dwte);
  backward(op, {tokens.size(0), tokens.size(1)}, dout, tokens, dwte_dense, dwpe, first_token, true);
  if (!dwte.is_contiguous()) torch::stable::copy_(dwte, dwte_dense);
  return dwpe;
}

// ---- tokens without positions, in any shape -------------------------------------------------------------------------

Tensor embedding_op(const Tensor& tokens, const Tensor& weight, int64_t vocab_size, int64_t first_token) {
  constexpr const char* op = "embedding";
  check_matrix(op, "weight", weight);
  check_floating(op, "weight", weight);
  check_tokens(op, tokens, "weight", weight);
  const Vocabulary vocabulary = check_vocabulary(op, vocab_size, first_token, "weight", weight);
  return forward(op, {1, tokens.numel()}, tokens, weight, std::nullopt, vocabulary, with_width(tokens, weight.size(1)));
}

Tensor embedding_backward_op(const Tensor& dout, const Tensor& tokens, int64_t vocab_size, int64_t first_token) {
  constexpr const char* op = "embedding_backward";
  check_first_token(op, first_token);
  check_backward(op, dout, tokens, vocab_size);
  check_shape(op, "dout", dout, with_width(tokens, width_of(dout)));
  Tensor dweight = allocate({vocab_size, width_of(dout)}, dout);
  backward(op, {1, tokens.numel()}, dout, tokens, dweight, std::nullopt, first_token);
  return dweight;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptkernels, GPTKERNELS_KEY, m) {
  m.impl("encoder", TORCH_BOX(&encoder_op));
  m.impl("encoder_backward", TORCH_BOX(&encoder_backward_op));
  m.impl("encoder_backward_", TORCH_BOX(&encoder_backward_inplace_op));
  m.impl("embedding", TORCH_BOX(&embedding_op));
  m.impl("embedding_backward", TORCH_BOX(&embedding_backward_op));
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
