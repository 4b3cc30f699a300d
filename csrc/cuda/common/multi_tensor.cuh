// One launch processes many tensors. They are divided into chunks of equal size; only the last chunk of a tensor may be
// smaller. A thread block processes one chunk, whose tensor it finds by a binary search. The tensors' pointers and
// sizes are kernel arguments, so no copy to the device precedes the launch, and a captured graph contains them.
#pragma once

#include <cstdint>

#include "launch.cuh"

namespace gptkernels::cuda {

// CUDA allows 32764 bytes (from CUDA 12.1 and driver 530 on), but the host copies the arguments at every launch. 9 KB
// do not make a launch slower, but 16 KB do (docs/notes/adamw.md).
constexpr size_t kArgumentBytes = 9216;

template <int kPointers, int kCapacity>
struct TensorList {
  static constexpr int capacity = kCapacity;
  int32_t count;
  int32_t first_chunk[kCapacity + 1];  // the number of chunks before each tensor; entry `count` is the total
  int32_t last_chunk_size[kCapacity];
  void* pointers[kCapacity][kPointers];
};

struct Chunk {
  int tensor;
  int64_t begin;
  int size;
};

template <int kSize, typename List>
__device__ Chunk this_chunk(const List& list) {
  const int block = static_cast<int>(blockIdx.x);
  int tensor = 0;
  for (int beyond = list.count; beyond - tensor > 1;) {
    const int middle = (tensor + beyond) / 2;
    if (list.first_chunk[middle] <= block)
      tensor = middle;
    else
      beyond = middle;
  }
  const bool last = list.first_chunk[tensor + 1] == block + 1;
  return {tensor, int64_t(block - list.first_chunk[tensor]) * kSize, last ? list.last_chunk_size[tensor] : kSize};
}

// set(pointers, i) stores the pointers of tensor i. launch(list, blocks) is called whenever a list is full, and for the
// remaining tensors.
template <typename List, int kSize, typename Set, typename Launch>
void for_each_list(int64_t count, const int64_t* sizes, const Set& set, const Launch& launch) {
  List list;
  list.count = 0;
  list.first_chunk[0] = 0;
  const auto flush = [&] {
    if (list.count > 0) launch(list, static_cast<unsigned>(list.first_chunk[list.count]));
    list.count = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (sizes[i] == 0) continue;
    const int slot = list.count++;
    const int64_t chunks = ceil_div(sizes[i], kSize);
    set(list.pointers[slot], i);
    list.last_chunk_size[slot] = static_cast<int32_t>(sizes[i] - (chunks - 1) * kSize);
    list.first_chunk[slot + 1] = list.first_chunk[slot] + static_cast<int32_t>(chunks);
    if (list.count == List::capacity) flush();
  }
  flush();
}

}  // namespace gptkernels::cuda
