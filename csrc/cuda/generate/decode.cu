// One decoding step: GPT-2's logits for the newest token of each of B sequences, with keys and values of earlier tokens
// in a cache. A layer takes five kernels, and two more if its layer norms are not fused:
//
//   residual = wte[token] + wpe[position]
//   for each layer:
//     query, cache += qkv(layernorm(residual))       generate/product.cuh
//     attended = attention(query, cache)             generate/attention.cuh
//     residual += projection(attended)
//     hidden = GELU(fc(layernorm(residual)))
//     residual += fc_projection(hidden)
//   logits = lm_head(layernorm(residual))
//
// All kernels but the embedding use programmatic dependent launch. The embedding starts after all earlier work, so
// every kernel of the step may read older data (weights, lengths, earlier keys and values) before the previous kernel
// ends.
#include "../../decode.h"
#include "attention.cuh"
#include "cuda/embedding/token.cuh"
#include "product.cuh"

namespace gptkernels::cuda {
namespace {

struct NewestToken {
  int64_t position, token;
};

// Asserts on the device, because the host does not read lengths and tokens.
template <typename T>
__device__ NewestToken newest_token(const Decode<T>& p, int64_t b) {
  const int64_t length = p.lengths[b], most = min(p.capacity, p.sequence_length);
  if (length < 1 || length > most) {
    device_fail("decode", "a length is outside the cache", "length %lld of sequence %lld is not from 1 to %lld\n",
                static_cast<long long>(length), static_cast<long long>(b), static_cast<long long>(most));
    return {0, 0};
  }
  const int64_t token = p.sequences[b * p.sequence_length + length - 1];
  if (token != -1) in_vocabulary(token, p.vocabulary, "decode", b);
  return {length - 1, max(token, int64_t{0})};
}

template <typename T>
__global__ void __launch_bounds__(kDecodeThreads)
    decode_embedding_kernel(accumulate_t<T>* out, const __grid_constant__ Decode<T> p) {
  let_next_kernel_start();
  const int64_t b = blockIdx.x;
  const auto [position, token] = newest_token(p, b);
  for (int64_t i = threadIdx.x; i < p.width; i += kDecodeThreads)
    out[b * p.width + i] = widen(p.wte[token * p.width + i]) + widen(p.wpe[position * p.width + i]);
}

}  // namespace

template <typename T>
Status decode(const Decode<T>& p, Stream stream) {
  if (p.batch == 0) return cudaSuccess;
  using A = accumulate_t<T>;
  using Epilogue = DecodeEpilogue<T>;
  const int64_t C = p.width, size = p.batch * C;
  A* const residual = static_cast<A*>(p.workspace);
  A* const query = residual + size;
  A* const attended = query + size;
  A* const normalised = attended + size;
  A* const hidden = normalised + size;
  Status status = cudaSuccess;
  const auto product = [&](const A* x, const T* norm_weight, const T* norm_bias, const T* weight, const T* bias,
                           int64_t rows, int64_t inner, const Epilogue& epilogue) {
    if (status == cudaSuccess)
      status = decode_product<T>({.epilogue = epilogue,
                                  .x = x,
                                  .norm_weight = norm_weight,
                                  .norm_bias = norm_bias,
                                  .weight = weight,
                                  .bias = bias,
                                  .sizes = {.batch = p.batch, .rows = rows, .inner = inner},
                                  .eps = p.eps},
                                 normalised, stream);
  };
  decode_embedding_kernel<T><<<grid_size(p.batch), kDecodeThreads, 0, stream>>>(residual, p);
  const Epilogue add = {.kind = Epilogue::kAdd, .out = residual};
  const Epilogue gelu = {.kind = p.gelu == GeluForm::kTanh ? Epilogue::kGeluTanh : Epilogue::kGeluErf, .out = hidden};
  for (int64_t l = 0; l < p.layer_count; ++l) {
    const DecodeLayer<T>& w = p.layers[l];
    T* const keys = p.keys_values + 2 * l * size * p.capacity;
    T* const values = keys + size * p.capacity;
    product(residual, w.norm_1_weight, w.norm_1_bias, w.qkv_weight, w.qkv_bias, 3 * C, C,
            {.kind = Epilogue::kQueryKeyValue,
             .out = query,
             .narrow_out = keys,
             .lengths = p.lengths,
             .width = C,
             .head_size = C / p.heads,
             .capacity = p.capacity});
    if (status == cudaSuccess)
      status = decode_attention<T>({.out = attended,
                                    .query = query,
                                    .keys = keys,
                                    .values = values,
                                    .lengths = p.lengths,
                                    .batch = p.batch,
                                    .heads = p.heads,
                                    .capacity = p.capacity,
                                    .head_size = C / p.heads},
                                   stream);
    product(attended, nullptr, nullptr, w.attn_proj_weight, w.attn_proj_bias, C, C, add);
    product(residual, w.norm_2_weight, w.norm_2_bias, w.fc_weight, w.fc_bias, 4 * C, C, gelu);
    product(hidden, nullptr, nullptr, w.mlp_proj_weight, w.mlp_proj_bias, C, 4 * C, add);
  }
  product(residual, p.norm_weight, p.norm_bias, p.lm_head, nullptr, p.lm_head_rows, C,
          {.kind = Epilogue::kLogits, .narrow_out = p.logits});
  return status;
}

#define GPTKERNELS_INSTANTIATE(T) template Status decode<T>(const Decode<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
