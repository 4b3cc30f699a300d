#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/elementwise/dropout.cuh"
#include "variants.h"

namespace gptkernels::cuda {

template <typename T>
int64_t attention_forward_workspace(const AttentionForward<T>& p) {
  if constexpr (!std::is_same_v<T, double>)
    if (attention_forward_split_supports(p)) return attention_forward_split_workspace(p);
  if constexpr (sizeof(T) == 2)
    if (attention_forward_sm90_supports(p)) return attention_forward_sm90_workspace(p);
  return 0;
}

template <typename T>
int64_t attention_backward_workspace(const AttentionBackward<T>& p) {
  if constexpr (sizeof(T) == 2)
    if (attention_backward_sm90_supports(p)) return attention_backward_sm90_workspace(p);
  if constexpr (!std::is_same_v<T, double>)
    if (attention_backward_mma_supports(p)) return attention_backward_mma_workspace<T>(p.sizes);
  return attention_backward_simple_workspace<T>(p.sizes);
}

template <typename T>
Status attention_forward(const AttentionForward<T>& p, Stream stream) {
  if constexpr (!std::is_same_v<T, double>)
    if (attention_forward_split_supports(p)) return attention_forward_split(p, stream);
  if constexpr (sizeof(T) == 2)
    if (attention_forward_sm90_supports(p)) return attention_forward_sm90(p, stream);
  if constexpr (!std::is_same_v<T, double>)
    if (attention_forward_mma_supports(p)) return attention_forward_mma(p, stream);
  return attention_forward_simple(p, stream);
}

template <typename T>
Status attention_backward(const AttentionBackward<T>& p, Stream stream) {
  if constexpr (sizeof(T) == 2)
    if (attention_backward_sm90_supports(p)) return attention_backward_sm90(p, stream);
  if constexpr (!std::is_same_v<T, double>)
    if (attention_backward_mma_supports(p)) return attention_backward_mma(p, stream);
  return attention_backward_simple(p, stream);
}

namespace {

__global__ void attention_dropout_mask_kernel(bool* mask, AttentionSizes s, DropoutArguments dropout) {
  const DropoutDraw draw(dropout);
  const int64_t count = s.batches * s.heads * s.queries * s.keys;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; at < count; at += step) {
    const int64_t j = at % s.keys, row = at / s.keys, head = row / s.queries;
    mask[at] = !draw.drops() || draw.keeps(head, head / s.heads, row % s.queries, j);
  }
}

}  // namespace

Status attention_dropout_mask(bool* mask, const AttentionSizes& sizes, const DropoutArguments& dropout, Stream stream) {
  constexpr int kThreads = 256;
  const int64_t count = sizes.batches * sizes.heads * sizes.queries * sizes.keys;
  const auto blocks = static_cast<unsigned>(clamp(ceil_div(count, kThreads), 1, 8 * multiprocessors()));
  attention_dropout_mask_kernel<<<blocks, kThreads, 0, stream>>>(mask, sizes, dropout);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                                \
  template int64_t attention_forward_workspace<T>(const AttentionForward<T>&);   \
  template int64_t attention_backward_workspace<T>(const AttentionBackward<T>&); \
  template Status attention_forward<T>(const AttentionForward<T>&, Stream);      \
  template Status attention_backward<T>(const AttentionBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)
#undef GPTKERNELS_INSTANTIATE

}  // namespace gptkernels::cuda
