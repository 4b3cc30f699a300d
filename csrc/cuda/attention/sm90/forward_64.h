// What attention/sm90/forward.cu leaves to attention/sm90/forward_64.cu: head sizes up to 64 without dropout, key_begin
// and key_end.
#pragma once

#include "../../../attention.h"

namespace gptkernels::cuda {

template <typename T>
Status attention_forward_sm90_64(const AttentionForward<T>& p, Stream stream);

}  // namespace gptkernels::cuda
