// The families of kernels among which attention.cu chooses.
#pragma once

#include "../../attention.h"

namespace gptkernels::cuda {

// simple/: every dtype, head size and mask.
template <typename T>
int64_t attention_backward_simple_workspace(const AttentionSizes& sizes);
template <typename T>
Status attention_forward_simple(const AttentionForward<T>& p, Stream stream);
template <typename T>
Status attention_backward_simple(const AttentionBackward<T>& p, Stream stream);

// sm90/: bfloat16 and float16 on sm_90a.
template <typename T>
bool attention_forward_sm90_supports(const AttentionForward<T>& p);
template <typename T>
bool attention_backward_sm90_supports(const AttentionBackward<T>& p);
template <typename T>
int64_t attention_forward_sm90_workspace(const AttentionForward<T>& p);
template <typename T>
int64_t attention_backward_sm90_workspace(const AttentionBackward<T>& p);
template <typename T>
Status attention_forward_sm90(const AttentionForward<T>& p, Stream stream);
template <typename T>
Status attention_backward_sm90(const AttentionBackward<T>& p, Stream stream);

// mma/: 16-bit types and float32 (with TF32 or exactly) on sm_80 and later, with every mask and dropout.
template <typename T>
bool attention_forward_mma_supports(const AttentionForward<T>& p);
template <typename T>
bool attention_backward_mma_supports(const AttentionBackward<T>& p);
template <typename T>
int64_t attention_backward_mma_workspace(const AttentionSizes& sizes);
template <typename T>
Status attention_forward_mma(const AttentionForward<T>& p, Stream stream);
template <typename T>
Status attention_backward_mma(const AttentionBackward<T>& p, Stream stream);

// split_keys.cu: of the calls that mma/ supports, those with at most 16 queries and without dropout.
template <typename T>
bool attention_forward_split_supports(const AttentionForward<T>& p);
template <typename T>
int64_t attention_forward_split_workspace(const AttentionForward<T>& p);
template <typename T>
Status attention_forward_split(const AttentionForward<T>& p, Stream stream);

}  // namespace gptkernels::cuda
