// The kernels among which attention.cu chooses. Each of these launches one family.
#pragma once

#include "../../attention.h"

namespace gptkernels::cuda {

// Every dtype, head size and mask.
template <typename T>
int64_t attention_backward_simt_workspace(const AttentionSizes& sizes);
template <typename T>
Status attention_forward_simt(const AttentionForward<T>& p, Stream stream);
template <typename T>
Status attention_backward_simt(const AttentionBackward<T>& p, Stream stream);

// bfloat16 and float16 on sm_90a; which calls these serve they say themselves.
template <typename T>
bool attention_forward_sm90_serves(const AttentionForward<T>& p);
template <typename T>
bool attention_backward_sm90_serves(const AttentionBackward<T>& p);
template <typename T>
int64_t attention_forward_sm90_workspace(const AttentionForward<T>& p);
template <typename T>
int64_t attention_backward_sm90_workspace(const AttentionBackward<T>& p);
template <typename T>
Status attention_forward_sm90(const AttentionForward<T>& p, Stream stream);
template <typename T>
Status attention_backward_sm90(const AttentionBackward<T>& p, Stream stream);

// bfloat16, float16, and float32, by TF32 or exactly, on sm_80 and later, with every mask and dropout.
template <typename T>
bool attention_forward_mma_serves(const AttentionForward<T>& p);
template <typename T>
bool attention_backward_mma_serves(const AttentionBackward<T>& p);
template <typename T>
int64_t attention_backward_mma_workspace(const AttentionSizes& sizes);
template <typename T>
Status attention_forward_mma(const AttentionForward<T>& p, Stream stream);
template <typename T>
Status attention_backward_mma(const AttentionBackward<T>& p, Stream stream);

// The same for few queries, with the keys of a head split among blocks.
template <typename T>
bool attention_forward_split_serves(const AttentionForward<T>& p);
template <typename T>
int64_t attention_forward_split_workspace(const AttentionForward<T>& p);
template <typename T>
Status attention_forward_split(const AttentionForward<T>& p, Stream stream);

}  // namespace gptkernels::cuda
