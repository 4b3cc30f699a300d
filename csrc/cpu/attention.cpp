#include "../attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "dropout.h"
#include "simd.h"

namespace gptkernels::cpu {
namespace {

constexpr int64_t kTile = 64;

}  // namespace
}  // namespace gptkernels::cpu

#define GPTKERNELS_NAME attention
#define GPTKERNELS_KERNELS "attention_tiles.h"
#include "each_instruction_set.h"

namespace gptkernels::cpu {
namespace {

template <typename Fn>
void dispatch_head_size(int64_t head_size, const Fn& fn) {
  if (head_size <= 64) return fn.template operator()<64>();
  if (head_size <= 128) return fn.template operator()<128>();
  fn.template operator()<256>();
}

Status check(const AttentionSizes& s) {
  if (s.head_size < 1 || s.head_size > 256)
    return {"the head size must be from 1 to 256, got " + std::to_string(s.head_size)};
  return {};
}

int64_t tiles(int64_t n) {
  return (n + kTile - 1) / kTile;
}

// Returns the number of tasks per key head. Each task has separate sums of dkey and dvalue. A key head is therefore
// divided only if each task has at least four query tiles, and all key heads together have at most 24 tasks. The number
// depends on the sizes alone, so the bits do not depend on the number of threads.
int64_t backward_splits(const AttentionSizes& s) {
  const int64_t heads = s.batches * s.key_heads, units = s.heads / s.key_heads * tiles(s.queries);
  return std::clamp<int64_t>(std::min(24 / heads, units / 4), 1, 24);
}

}  // namespace

template <typename T>
int64_t attention_forward_workspace(const AttentionForward<T>&) {
  return 0;
}

template <typename T>
int64_t attention_backward_workspace(const AttentionBackward<T>& p) {
  const AttentionSizes& s = p.sizes;
  const int64_t width = (s.head_size + 15) / 16 * 16;
  return s.batches * s.key_heads * backward_splits(s) * 2 * s.keys * width * int64_t(sizeof(accumulate_t<T>));
}

template <typename T>
Status attention_forward(const AttentionForward<T>& p, Stream stream) {
  if (Status status = check(p.sizes); !status.ok()) return status;
  const Dropout dropout = read(p.dropout);
  const int64_t pairs = (tiles(p.sizes.queries) + 1) / 2;
  parallel_for(stream, p.sizes.batches * p.sizes.heads * pairs, p.sizes.keys * p.sizes.head_size,
               [&](int64_t begin, int64_t end) {
                 dispatch_head_size(p.sizes.head_size, [&]<int kSize>() {
                   GPTKERNELS_WIDEST(template forward_range<kSize>(p, dropout, begin, end));
                 });
               });
  return {};
}

template <typename T>
Status attention_backward(const AttentionBackward<T>& p, Stream stream) {
  if (Status status = check(p.sizes); !status.ok()) return status;
  const Dropout dropout = read(p.dropout);
  const int64_t splits = backward_splits(p.sizes);
  const int64_t heads = p.sizes.batches * p.sizes.key_heads;
  parallel_for(stream, heads * splits, p.sizes.keys * p.sizes.head_size * 16, [&](int64_t begin, int64_t end) {
    dispatch_head_size(p.sizes.head_size, [&]<int kSize>() {
      GPTKERNELS_WIDEST(template backward_range<kSize>(p, dropout, splits, begin, end));
    });
  });
  if (splits > 1)
    parallel_for(stream, heads * tiles(p.sizes.keys), 2 * kTile * p.sizes.head_size * splits,
                 [&](int64_t begin, int64_t end) { GPTKERNELS_WIDEST(add_splits_range(p, splits, begin, end)); });
  return {};
}

Status attention_dropout_mask(bool* mask, const AttentionSizes& s, const DropoutArguments& given, Stream stream) {
  const Dropout dropout = read(given);
  parallel_for(stream, s.batches * s.heads * s.queries, s.keys, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const QueryHead head(s, i / s.queries);
      for (int64_t j = 0; j < s.keys; ++j) {
        const DropoutGroup group = dropout_group(dropout.first_query + i % s.queries, j);
        const PhiloxWords words = dropout_words(
            dropout.seed, dropout.offset, dropout.head_number(head.batch, head.head, s.heads), group.row, group.column);
        mask[i * s.keys + j] = sixteen_bits(words, group.slot) >= dropout.threshold;
      }
    }
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T)                                                \
  template int64_t attention_forward_workspace<T>(const AttentionForward<T>&);   \
  template int64_t attention_backward_workspace<T>(const AttentionBackward<T>&); \
  template Status attention_forward<T>(const AttentionForward<T>&, Stream);      \
  template Status attention_backward<T>(const AttentionBackward<T>&, Stream);
GPTKERNELS_INSTANTIATE(double)
GPTKERNELS_INSTANTIATE(float)
GPTKERNELS_INSTANTIATE(bfloat16)
GPTKERNELS_INSTANTIATE(float16)

}  // namespace gptkernels::cpu
