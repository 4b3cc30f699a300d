// The schemas of all operators. ops/<op>.cpp registers an operator's kernels, once for each device;
// python/gptkernels/rules/<op>.py registers its rules for torch in Python: its fake kernel, gradient formula, autocast
// rule and flop count.
//
// Shapes: B batch, T tokens, C channels, V vocabulary, N = B*T rows. Gradients are d<name>. If a backward's mask
// excludes an output, the output has no elements.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(gptkernels, m) {
  // wte is (Vp, C). A token must be below vocab_size (V), where -1 means Vp. If first_token is given, wte is the shard
  // of a larger table that begins with this token's row, and vocab_size is that of the larger table, where -1 means no
  // limit. The result's rows of other shards' tokens are 0. The backward leaves these tokens out of dwte, but not of
  // dwpe, which is the gradient if the results of all shards are added.
  m.def("encoder(Tensor tokens, Tensor wte, Tensor wpe, SymInt vocab_size=-1, SymInt first_token=-1) -> Tensor");
  m.def(
      "encoder_backward(Tensor dout, Tensor tokens, SymInt vocab_size, SymInt max_positions, SymInt first_token=-1) "
      "-> (Tensor dwte, Tensor dwpe)");
  m.def(
      "encoder_backward_(Tensor dout, Tensor tokens, Tensor(a!) dwte, SymInt max_positions, SymInt first_token=-1) "
      "-> Tensor dwpe");

  m.def("embedding(Tensor tokens, Tensor weight, SymInt vocab_size=-1, SymInt first_token=-1) -> Tensor");
  m.def("embedding_backward(Tensor dout, Tensor tokens, SymInt vocab_size, SymInt first_token=-1) -> Tensor");

  m.def(
      "layernorm(Tensor x, Tensor? weight, Tensor? bias, float eps=1e-5) "
      "-> (Tensor out, Tensor mean, Tensor rstd)");
  m.def(
      "layernorm_backward(Tensor dout, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool[3] output_mask) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias)");

  // sum = dropout(x + x_bias) + residual. seed and offset are 0-dim int64 on x's device. If x is a part of a larger
  // tensor, first_index is the flat index of its first element, a multiple of 8. With a float32 residual, x may
  // have 16 bits: out then has x's dtype, and all other tensors are float32. residual_layernorm_backward returns dx,
  // which is also the gradient of the residual. residual_layernorm_bias_backward also returns the gradient of x_bias.
  // residual_layernorm_dropout_backward also returns the gradients of x_bias and of the residual, and its dx has dout's
  // dtype.
  m.def(
      "residual_layernorm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps=1e-5, "
      "Tensor? x_bias=None, float dropout_p=0.0, Tensor? seed=None, Tensor? offset=None, SymInt first_index=0) "
      "-> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "residual_layernorm_backward(Tensor dout, Tensor? dsum, Tensor sum, Tensor? weight, Tensor mean, Tensor rstd, "
      "bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)");
  m.def(
      "residual_layernorm_bias_backward(Tensor dout, Tensor? dsum, Tensor sum, Tensor? weight, Tensor mean, "
      "Tensor rstd, bool[4] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dx_bias)");
  m.def(
      "residual_layernorm_dropout_backward(Tensor dout, Tensor? dsum, Tensor sum, Tensor? weight, Tensor mean, "
      "Tensor rstd, float dropout_p, Tensor? seed, Tensor? offset, bool[5] output_mask, SymInt first_index=0) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dx_bias, Tensor dresidual)");

  m.def("softmax(Tensor x) -> Tensor");
  m.def("softmax_backward(Tensor dout, Tensor out) -> Tensor");

  m.def("causal_softmax(Tensor scores, float scale=1.0) -> Tensor");
  m.def("causal_softmax_backward(Tensor dout, Tensor out, float scale=1.0) -> Tensor");

  // Causal attention of packed qkv (B, T, 3 * C). If dropout_p is not 0, seed and offset are 0-dim int64 on the
  // tensors' device. If the heads or queries are a part of a larger tensor's, that tensor has total_heads heads, and
  // the part begins with head first_head and query first_query, a multiple of 16. They only affect dropout.
  m.def(
      "attention(Tensor qkv, int num_heads, float? scale=None, float dropout_p=0.0, Tensor? seed=None, "
      "Tensor? offset=None, int first_head=0, int? total_heads=None) -> (Tensor out, Tensor logsumexp)");
  m.def(
      "attention_backward(Tensor dout, Tensor qkv, Tensor out, Tensor logsumexp, int num_heads, float? scale=None, "
      "float dropout_p=0.0, Tensor? seed=None, Tensor? offset=None, int first_head=0, int? total_heads=None) "
      "-> Tensor");

  // query is (B, NH, Tq, HS), key and value are (B, KH, Tk, HS), where NH is a multiple of KH. key_begin and key_end
  // are (B), int32.
  m.def(
      "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
      "float dropout_p=0.0, bool is_causal=False, float? scale=None, SymInt query_offset=0, Tensor? key_begin=None, "
      "Tensor? key_end=None, Tensor? seed=None, Tensor? offset=None, int first_head=0, int? total_heads=None, "
      "SymInt first_query=0) -> (Tensor out, Tensor logsumexp)");
  m.def(
      "scaled_dot_product_attention_backward(Tensor dout, Tensor? dlogsumexp, Tensor query, Tensor key, Tensor value, "
      "Tensor out, Tensor logsumexp, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
      "float? scale=None, SymInt query_offset=0, Tensor? key_begin=None, Tensor? key_end=None, Tensor? seed=None, "
      "Tensor? offset=None, int first_head=0, int? total_heads=None, SymInt first_query=0) "
      "-> (Tensor dquery, Tensor dkey, Tensor dvalue)");
  m.def(
      "attention_dropout_mask(SymInt batches, SymInt heads, SymInt queries, SymInt keys, float dropout_p, "
      "Tensor seed, Tensor offset, int first_head=0, int? total_heads=None, SymInt first_query=0) -> Tensor");

  // Causal attention of packed qkv (B, T, 3 * C) that stores the (T, T) matrices.
  m.def("attention_probabilities(Tensor qkv, int num_heads, float? scale=None) -> (Tensor out, Tensor probabilities)");
  m.def(
      "attention_probabilities_backward(Tensor dout, Tensor qkv, Tensor probabilities, int num_heads, "
      "float? scale=None) -> Tensor");

  m.def("gelu(Tensor x, *, str approximate='tanh') -> Tensor");
  m.def("gelu_backward(Tensor dout, Tensor x, *, str approximate='tanh') -> Tensor");

  // seed and offset are 0-dim int64 on x's device. `size` is the number of elements of the mask. If x is a part of a
  // larger tensor, first_index is the flat index of its first element, a multiple of 8.
  m.def("dropout(Tensor x, float p, Tensor seed, Tensor offset, SymInt first_index=0) -> Tensor");
  m.def("dropout_mask(SymInt size, float p, Tensor seed, Tensor offset, SymInt first_index=0) -> Tensor");

  // x is filled with numbers of N(mean, std^2). Element (i, j) of x, seen as a matrix, is number first_index + i *
  // row_stride + j of the stream. row_stride -1 means the number of columns.
  m.def(
      "normal_(Tensor(a!) x, float mean, float std, int seed, int stream, SymInt first_index=0, "
      "SymInt row_stride=-1) -> ()");

  m.def("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  m.def(
      "linear_backward(Tensor dout, Tensor x, Tensor weight, bool[3] output_mask) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias)");
  // dweight (M, K) = dout^T x, or += if accumulate is true. If dout and x have 16 bits, dweight may be float32.
  m.def("linear_dweight_(Tensor dout, Tensor x, Tensor(a!) dweight, bool accumulate) -> ()");

  // If keep_post_gelu is false, post_gelu has no elements, and the backward computes it again.
  m.def(
      "mlp(Tensor x, Tensor fc_weight, Tensor? fc_bias, Tensor proj_weight, Tensor? proj_bias, "
      "bool keep_post_gelu=True) -> (Tensor out, Tensor pre_gelu, Tensor post_gelu)");
  m.def(
      "mlp_backward(Tensor dout, Tensor x, Tensor fc_weight, Tensor proj_weight, Tensor pre_gelu, Tensor post_gelu, "
      "bool[5] output_mask) -> (Tensor dx, Tensor dfc_weight, Tensor dfc_bias, Tensor dproj_weight, "
      "Tensor dproj_bias)");

  // Float8 operators (docs/fp8.md). The scale is computed from the amax history, (18) int32, which the op then updates,
  // or from x if there is no history. q_t is (C, N rounded up to a multiple of 16) if transposed is true, and has no
  // elements otherwise. fp8_matmul computes scale_a * scale_b * a @ b^T + bias.
  m.def(
      "fp8_quantize(Tensor x, Tensor(a!)? history, ScalarType dtype, bool transposed=False) "
      "-> (Tensor q, Tensor q_t, Tensor scale)");
  m.def(
      "fp8_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType dtype, "
      "bool fast_accumulation=False) -> Tensor");

  // layernorm, or residual_layernorm if there is a residual, followed by fp8_quantize of the output to e4m3. Without a
  // residual, sum has no elements.
  m.def(
      "fp8_layernorm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor(a!)? history, "
      "bool transposed=False, float eps=1e-5, Tensor? x_bias=None, float dropout_p=0.0, Tensor? seed=None, "
      "Tensor? offset=None, SymInt first_index=0) "
      "-> (Tensor q, Tensor q_t, Tensor scale, Tensor sum, Tensor mean, Tensor rstd)");

  // A matmul has two amax histories: one of its input, and one of the gradient of its output, for the backward. `save`
  // says which gradients will be needed. The entries of `save` are dx and dweight for fp8_linear. For fp8_mlp the
  // entries are dx, dfc_weight, dproj_weight, and any of dx, dfc_weight and dfc_bias. The ops return the transposed
  // operands of the matmuls that compute these gradients.
  m.def(
      "fp8_linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? history, Tensor? dout_history, bool[2] save) "
      "-> (Tensor out, Tensor x_t, Tensor weight_t, Tensor x_scale, Tensor weight_scale)");
  m.def(
      "fp8_linear_backward(Tensor dout, Tensor x_t, Tensor weight_t, Tensor x_scale, Tensor weight_scale, "
      "Tensor(a!)? history, bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)");
  // linear_dweight_ of dout in e5m2 and of x_t, which fp8_quantize has transposed.
  m.def(
      "fp8_linear_dweight_(Tensor dout, Tensor x_t, Tensor dout_scale, Tensor x_scale, Tensor(a!) dweight, "
      "bool accumulate) -> ()");
  m.def(
      "fp8_mlp(Tensor x, Tensor fc_weight, Tensor? fc_bias, Tensor proj_weight, Tensor? proj_bias, "
      "Tensor(a!)? history, Tensor(b!)? hidden_history, Tensor? dhidden_history, Tensor? dout_history, bool[4] save) "
      "-> (Tensor out, Tensor pre_gelu, Tensor x_t, Tensor fc_weight_t, Tensor hidden_t, Tensor proj_weight_t, "
      "Tensor x_scale, Tensor fc_scale, Tensor hidden_scale, Tensor proj_scale)");
  m.def(
      "fp8_mlp_backward(Tensor dout, Tensor pre_gelu, Tensor x_t, Tensor fc_weight_t, Tensor hidden_t, "
      "Tensor proj_weight_t, Tensor x_scale, Tensor fc_scale, Tensor hidden_scale, Tensor proj_scale, "
      "Tensor(a!)? dhidden_history, Tensor(b!)? dout_history, bool[5] output_mask) "
      "-> (Tensor dx, Tensor dfc_weight, Tensor dfc_bias, Tensor dproj_weight, Tensor dproj_bias)");

  // dlosses is (N) or 0-dim, in the dtype of losses. If dlosses is given, dlogits is multiplied by it, so that the
  // backward need not read and write dlogits again.
  m.def(
      "fused_classifier(Tensor logits, Tensor targets, SymInt vocab_size=-1, int ignore_index=-100, "
      "Tensor? dlosses=None) -> (Tensor losses, Tensor dlogits)");
  m.def(
      "fused_classifier_(Tensor(a!) logits, Tensor targets, SymInt vocab_size=-1, int ignore_index=-100, "
      "Tensor? dlosses=None) -> Tensor");
  m.def("fused_classifier_backward(Tensor dlosses, Tensor dlogits) -> Tensor");
  m.def("fused_classifier_backward_(Tensor dlosses, Tensor(a!) dlogits) -> ()");

  // The classifier of logits (..., n) whose columns are those from first_column on of the whole rows (..., Vp). The
  // statistics of a shard are (3, N), in the dtype of losses. The second op takes the statistics of all shards,
  // (S, 3, N), returns the losses, and replaces the logits by dlogits. The third op writes 2^15 * dlogits in e5m2.
  m.def(
      "fused_classifier_statistics(Tensor logits, Tensor targets, SymInt first_column, SymInt vocab_size, "
      "int ignore_index=-100) -> Tensor");
  m.def(
      "fused_classifier_from_statistics_(Tensor(a!) logits, Tensor targets, Tensor statistics, SymInt first_column, "
      "SymInt vocab_size, int ignore_index=-100, Tensor? dlosses=None) -> Tensor");
  m.def(
      "fp8_classifier_from_statistics(Tensor logits, Tensor targets, Tensor statistics, SymInt first_column, "
      "SymInt vocab_size, int ignore_index=-100) -> (Tensor losses, Tensor dlogits)");

  // The loss is float32, or float64 if x is float64. The loss is 0-dim, or has targets' shape for reduction 'none'. If
  // chunk_size is -1, the op chooses the number of rows of a chunk. linear_cross_entropy_with_gradients supports 'mean'
  // and 'sum'. In linear_cross_entropy_with_logits the loss is the sum of the losses times scale, which is 0-dim in the
  // loss's dtype and by default 1 / (the number of rows that are not ignored); dweight has the loss's dtype.
  m.def(
      "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, SymInt vocab_size=-1, int ignore_index=-100, "
      "str reduction='mean', SymInt chunk_size=-1) -> Tensor");
  m.def(
      "linear_cross_entropy_with_gradients(Tensor x, Tensor weight, Tensor targets, SymInt vocab_size, "
      "int ignore_index, str reduction, SymInt chunk_size, bool[2] output_mask) "
      "-> (Tensor loss, Tensor dx, Tensor dweight)");
  m.def(
      "linear_cross_entropy_with_logits(Tensor x, Tensor weight, Tensor targets, Tensor? scale, SymInt vocab_size, "
      "int ignore_index, SymInt chunk_size, bool[2] output_mask) "
      "-> (Tensor logits, Tensor loss, Tensor dx, Tensor dweight)");
  m.def(
      "linear_cross_entropy_backward(Tensor dloss, Tensor x, Tensor weight, Tensor targets, SymInt vocab_size, "
      "int ignore_index, str reduction, SymInt chunk_size, bool[2] output_mask) -> (Tensor dx, Tensor dweight)");

  // The loss of linear_cross_entropy for 'mean' and 'sum', with float8 matmuls in the gradients (docs/fp8.md). If x is
  // float16, fp8_linear_cross_entropy_with_gradients returns float32 gradients.
  m.def(
      "fp8_linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, SymInt vocab_size=-1, int ignore_index=-100, "
      "str reduction='mean', SymInt chunk_size=-1, bool fp8_logits=False) -> Tensor");
  m.def(
      "fp8_linear_cross_entropy_with_gradients(Tensor x, Tensor weight, Tensor targets, SymInt vocab_size, "
      "int ignore_index, str reduction, SymInt chunk_size, bool fp8_logits, bool[2] output_mask) "
      "-> (Tensor loss, Tensor dx, Tensor dweight)");

  m.def(
      "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor[] steps, "
      "*, Tensor lr, float beta1, float beta2, float eps, float weight_decay, Tensor? grad_scale=None, "
      "Tensor? found_inf=None, bool maximize=False, Tensor(d!)[]? master_params=None, Tensor? grad_norm=None, "
      "float? max_grad_norm=None, int? rounding_seed=None) -> ()");

  m.def("global_norm(Tensor[] tensors) -> Tensor");

  // A layer of GPT-2 (attention, MLP and their norms) without its last addition. `stream` is the residual stream, and
  // `values` the output of the previous sublayer, which has not been added to the stream yet. The layer computes
  //
  //   residual_1 = dropout(values + values_bias) + stream
  //   residual_2 = residual_1 + dropout(the output of attention's projection)
  //   out        = the output of the MLP without the bias of mlp_proj; the caller adds out and the bias to residual_2
  //
  // values and the matmuls may have 16 bits if the stream and the norms are float32. approximate selects GELU's form.
  // out_dropout is the dropout of attention's projection. Without values, residual_1 equals the stream, and the
  // returned residual_1 is empty.
  //
  // The backward's mask has an entry for each gradient. If post_gelu is empty, the backward computes it again. dvalues
  // is empty if it would equal dstream. adds_past=False, which requires that there are no values, returns the two parts
  // of the stream's gradient without adding them: the part that bypasses the first norm as dstream, and the part
  // through the norm as dvalues.
  m.def(
      "layer(Tensor stream, Tensor? values, Tensor? values_bias, Tensor? norm_1_weight, Tensor? norm_1_bias, "
      "Tensor qkv_weight, Tensor? qkv_bias, Tensor attn_proj_weight, Tensor? attn_proj_bias, Tensor? norm_2_weight, "
      "Tensor? norm_2_bias, Tensor fc_weight, Tensor? fc_bias, Tensor mlp_proj_weight, int num_heads, float? scale, "
      "float eps_1, float eps_2, str approximate, float values_dropout_p=0.0, Tensor? values_seed=None, "
      "Tensor? values_offset=None, float attention_dropout_p=0.0, Tensor? attention_seed=None, "
      "Tensor? attention_offset=None, float out_dropout_p=0.0, Tensor? out_seed=None, Tensor? out_offset=None, "
      "bool keep_post_gelu=True) "
      "-> (Tensor out, Tensor residual_1, Tensor mean_1, Tensor rstd_1, Tensor norm_1, Tensor qkv, Tensor attended, "
      "Tensor logsumexp, Tensor residual_2, Tensor mean_2, Tensor rstd_2, Tensor norm_2, Tensor pre_gelu, "
      "Tensor post_gelu)");
  m.def(
      "layer_backward(Tensor dout, Tensor? dresidual_2, Tensor residual_1, Tensor mean_1, Tensor rstd_1, "
      "Tensor norm_1, Tensor qkv, Tensor attended, Tensor logsumexp, Tensor residual_2, Tensor mean_2, Tensor rstd_2, "
      "Tensor norm_2, Tensor pre_gelu, Tensor post_gelu, Tensor? norm_1_weight, Tensor qkv_weight, "
      "Tensor attn_proj_weight, Tensor? norm_2_weight, Tensor fc_weight, Tensor mlp_proj_weight, int num_heads, "
      "float? scale, str approximate, bool[14] output_mask, float values_dropout_p=0.0, Tensor? values_seed=None, "
      "Tensor? values_offset=None, float attention_dropout_p=0.0, Tensor? attention_seed=None, "
      "Tensor? attention_offset=None, float out_dropout_p=0.0, Tensor? out_seed=None, Tensor? out_offset=None, "
      "bool has_values=True, bool adds_past=True) "
      "-> (Tensor dstream, Tensor dvalues, Tensor dvalues_bias, Tensor dnorm_1_weight, Tensor dnorm_1_bias, "
      "Tensor dqkv_weight, Tensor dqkv_bias, Tensor dattn_proj_weight, Tensor dattn_proj_bias, Tensor dnorm_2_weight, "
      "Tensor dnorm_2_bias, Tensor dfc_weight, Tensor dfc_bias, Tensor dmlp_proj_weight)");

  // The op `layer` with float8 matmuls and GELU's tanh form. For each of the matmuls with qkv_weight, attn_proj_weight,
  // fc_weight and mlp_proj_weight, the arguments of fp8_layer contain two amax histories: `histories` that of the
  // matmul's input, and `dout_histories` that of the gradient of its output. fp8_layer_backward receives
  // `dout_histories` as its argument `histories`. `saved` contains the outputs of fp8_layer from mean_1 on. adds_past
  // may be false only if the layer has no values.
  m.def(
      "fp8_layer(Tensor stream, Tensor? values, Tensor? values_bias, Tensor? norm_1_weight, Tensor? norm_1_bias, "
      "Tensor qkv_weight, Tensor? qkv_bias, Tensor attn_proj_weight, Tensor? attn_proj_bias, Tensor? norm_2_weight, "
      "Tensor? norm_2_bias, Tensor fc_weight, Tensor? fc_bias, Tensor mlp_proj_weight, Tensor(a!)[] histories, "
      "Tensor[] dout_histories, int num_heads, float? scale, float eps_1, float eps_2, float values_dropout_p=0.0, "
      "Tensor? values_seed=None, Tensor? values_offset=None, float attention_dropout_p=0.0, "
      "Tensor? attention_seed=None, Tensor? attention_offset=None, float out_dropout_p=0.0, Tensor? out_seed=None, "
      "Tensor? out_offset=None) "
      "-> (Tensor out, Tensor residual_1, Tensor residual_2, Tensor mean_1, Tensor rstd_1, Tensor norm_1_t, "
      "Tensor norm_1_scale, Tensor qkv_weight_t, Tensor qkv_weight_scale, Tensor qkv, Tensor attended, "
      "Tensor logsumexp, Tensor attended_t, Tensor attended_scale, Tensor attn_proj_weight_t, "
      "Tensor attn_proj_weight_scale, Tensor mean_2, Tensor rstd_2, Tensor norm_2_t, Tensor norm_2_scale, "
      "Tensor fc_weight_t, Tensor fc_weight_scale, Tensor pre_gelu, Tensor hidden_t, Tensor hidden_scale, "
      "Tensor mlp_proj_weight_t, Tensor mlp_proj_weight_scale)");
  m.def(
      "fp8_layer_backward(Tensor dout, Tensor? dresidual_2, Tensor residual_1, Tensor residual_2, Tensor[] saved, "
      "Tensor? norm_1_weight, Tensor? norm_2_weight, Tensor(a!)[] histories, int num_heads, float? scale, "
      "bool adds_past, bool[14] output_mask, float values_dropout_p=0.0, Tensor? values_seed=None, "
      "Tensor? values_offset=None, float attention_dropout_p=0.0, Tensor? attention_seed=None, "
      "Tensor? attention_offset=None, float out_dropout_p=0.0, Tensor? out_seed=None, Tensor? out_offset=None) "
      "-> (Tensor dstream, Tensor dvalues, Tensor dvalues_bias, Tensor dnorm_1_weight, Tensor dnorm_1_bias, "
      "Tensor dqkv_weight, Tensor dqkv_bias, Tensor dattn_proj_weight, Tensor dattn_proj_bias, Tensor dnorm_2_weight, "
      "Tensor dnorm_2_bias, Tensor dfc_weight, Tensor dfc_bias, Tensor dmlp_proj_weight)");

  // Returns the logits after each sequence's newest token, sequences[b, lengths[b] - 1]. keys_values (L, 2, B, NH,
  // capacity, HS) holds the keys and values of the earlier tokens, and the op adds the keys and values of the newest
  // token. B is at most 8. For each layer, `layers` contains the tensors of ln_1, c_attn, c_proj, ln_2, c_fc and
  // c_proj: the weight and, if norm_bias is given, the bias.
  m.def(
      "decode(Tensor sequences, Tensor lengths, Tensor wte, Tensor wpe, Tensor[] layers, Tensor norm_weight, "
      "Tensor? norm_bias, Tensor head, Tensor(a!) keys_values, int num_heads, SymInt vocab_size=-1, float eps=1e-5, "
      "str approximate='tanh') -> Tensor");

  // Appends a token to each sequence: sequences[b, lengths[b]] is drawn from logits[b] (V), and lengths[b] is
  // incremented. noise (B, V) is float32 with an exponential distribution. Without noise, the token with the largest
  // logit is taken.
  m.def(
      "sample_(Tensor logits, Tensor? noise, Tensor(a!) sequences, Tensor(b!) lengths, float temperature=1.0, "
      "int? top_k=None, float? top_p=None) -> ()");
}
