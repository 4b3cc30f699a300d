// A step of one sequence in two kernels a layer (decode_half.cuh), one before and one after.
#pragma once

#include "decode_attention_half.cuh"
#include "decode_mlp_half.cuh"
#include "decode_product.cuh"
#include "decode_token.cuh"

namespace gptkernels::cuda {

// Checks the newest token, and makes all words absent. Not launched early: it runs after everything before the step.
template <typename T>
__global__ void __launch_bounds__(kHalfThreads)
    decode_start_kernel(const __grid_constant__ Decode<T> p, uint4* words, int64_t count) {
  let_next_kernel_start();
  if (blockIdx.x == 0 && threadIdx.x == 0) newest_token(p, 0);
  for (int64_t i = blockIdx.x * int64_t{kHalfThreads} + threadIdx.x; i < count; i += int64_t{gridDim.x} * kHalfThreads)
    words[i] = {kAbsent, kAbsent, kAbsent, kAbsent};
}

// The residual after the last layer.
template <typename T, int C>
__global__ void __launch_bounds__(C / 4) decode_end_kernel(const __grid_constant__ DecodeHalf<T> p) {
#if GPTKERNELS_HOPPER
  let_next_kernel_start();
  const int column = static_cast<int>(threadIdx.x) * 4;
  float bias[4] = {};
  if (p.input_bias) load_wide<4>(bias, p.input_bias + column);
  const float4 sum = receive_sum<HalfShape<C>::kParts + 1>(p.input + column, C);
  *reinterpret_cast<float4*>(p.output + column) = float4{bias[0], bias[1], bias[2], bias[3]} + sum;
  wait_for_previous_kernel();  // so that no kernel ends before the previous one
#endif
}

template <typename T, int C>
bool can_decode_by_halves(const Decode<T>& p) {
  constexpr auto kAttention = decode_attention_half_kernel<T, C>;
  constexpr auto kMlp = decode_mlp_half_kernel<T, C>;
  if (p.batch != 1 || p.width != C || p.heads != HalfShape<C>::kParts || p.layer_count < 1 ||
      p.capacity > kHalfBlocks * kHalfKeys)
    return false;
  if (!all_aligned(p.wte, p.wpe, p.keys_values, p.norm_weight, p.norm_bias, p.head, p.workspace)) return false;
  for (int64_t l = 0; l < p.layer_count; ++l) {
    const DecodeLayer<T>& w = p.layers[l];
    if (!all_aligned(w.norm1_weight, w.norm1_bias, w.qkv_weight, w.proj_weight, w.proj_bias, w.norm2_weight,
                     w.norm2_bias, w.fc_weight, w.fcproj_weight, w.fcproj_bias))
      return false;
  }
  return built_for_hopper<kAttention>() &&
         max_dynamic_shared_memory<kAttention>() >= AttentionHalfShared<T, C>::bytes(p.capacity) &&
         max_dynamic_shared_memory<kMlp>() >= static_cast<int64_t>(sizeof(MlpHalfShared<T, C>));
}

template <typename T, int C>
Status decode_by_halves(const Decode<T>& p, Stream stream) {
  using Shape = HalfShape<C>;
  const dim3 grid = Shape::kParts * kHalfBlocks;
  const int64_t size = C * p.capacity, words = 2 * p.layer_count * Shape::kWords;
  float* output = static_cast<float*>(p.workspace);
  float* const residual = output + words;
  decode_start_kernel<T>
      <<<grid_size(multiprocessors()), kHalfThreads, 0, stream>>>(p, static_cast<uint4*>(p.workspace), words / 4);
  const float* input = nullptr;
  const T* input_bias = nullptr;
  for (int64_t l = 0; l < p.layer_count; ++l) {
    const DecodeLayer<T>& w = p.layers[l];
    T* const keys = p.keys_values + 2 * l * size;
    launch_early<decode_attention_half_kernel<T, C>>(
        grid, kHalfThreads, AttentionHalfShared<T, C>::bytes(p.capacity), stream,
        DecodeHalf<T>{input, output, input_bias, w.norm1_weight, w.norm1_bias, w.qkv_weight, w.qkv_bias, w.proj_weight,
                      keys, keys + size},
        p);
    input = output;
    output += Shape::kWords;
    launch_early<decode_mlp_half_kernel<T, C>>(grid, kHalfThreads, sizeof(MlpHalfShared<T, C>), stream,
                                               DecodeHalf<T>{input, output, w.proj_bias, w.norm2_weight, w.norm2_bias,
                                                             w.fc_weight, w.fc_bias, w.fcproj_weight, nullptr, nullptr},
                                               p);
    input = output;
    output += Shape::kWords;
    input_bias = w.fcproj_bias;
  }
  launch_early<decode_end_kernel<T, C>>(1, C / 4, 0, stream,
                                        DecodeHalf<T>{.input = input, .output = residual, .input_bias = input_bias});
  const Status status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  return decode_product<T>({.epilogue = {.kind = DecodeEpilogue<T>::kLogits, .narrow_out = p.logits},
                            .x = residual,
                            .norm_weight = p.norm_weight,
                            .norm_bias = p.norm_bias,
                            .weight = p.head,
                            .bias = nullptr,
                            .sizes = {.batch = 1, .rows = p.head_rows, .inner = C},
                            .eps = p.eps},
                           nullptr, stream);
}

}  // namespace gptkernels::cuda
