// The backward for sm_90a with a block for each head.
#pragma once

#include "../attention.h"

namespace gptkernels::cuda {

// Of calls that attention_backward_sm90_serves.
template <typename T>
bool attention_backward_head_serves(const AttentionBackward<T>& p);
template <typename T>
int64_t attention_backward_head_workspace(const AttentionBackward<T>& p);
template <typename T>
Status attention_backward_head(const AttentionBackward<T>& p, Stream stream);

}  // namespace gptkernels::cuda
