// One launch over many tensors. Their pointers and sizes travel as the kernel's argument, so nothing is copied to the
// device and a captured graph holds them. Every tensor is cut in chunks of one size, a block takes a chunk, and finds
// its tensor by a binary search that costs a few reads of constant memory.
#pragma once

#include <cstdint>

#include "launch.cuh"

namespace gptkernels::cuda {

constexpr int64_t kListChunk = 32768;    // elements
constexpr int kListThreads = 512;        // of the block that works on a chunk
constexpr size_t kArgumentBytes = 4096;  // what every device and driver takes as a kernel's arguments

template <int kPointers, int kCapacity>
struct TensorList {
  static constexpr int capacity = kCapacity;
  void* pointers[kPointers][kCapacity];
  int64_t sizes[kCapacity];        // none is 0
  int32_t first_chunk[kCapacity];  // the chunks of the tensors before
  int32_t count;
};

struct Chunk {
  int tensor;
  int64_t begin;
  int64_t end;
};

// The chunk that this block works on.
template <typename List>
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
  const int64_t begin = (block - list.first_chunk[tensor]) * kListChunk;
  const int64_t end = begin + kListChunk < list.sizes[tensor] ? begin + kListChunk : list.sizes[tensor];
  return {tensor, begin, end};
}

// Calls launch(list, blocks) for as many of the tensors at a time as a list holds. Tensors of no elements are left out;
// set(list, slot, i) stores the pointers of tensor i.
template <typename List, typename Set, typename Launch>
void for_each_list(int64_t count, const int64_t* sizes, const Set& set, const Launch& launch) {
  List list{};
  int64_t chunks = 0;
  const auto flush = [&] {
    if (list.count > 0) launch(list, static_cast<unsigned>(chunks));
    list.count = 0;
    chunks = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (sizes[i] == 0) continue;
    set(list, list.count, i);
    list.sizes[list.count] = sizes[i];
    list.first_chunk[list.count] = static_cast<int32_t>(chunks);
    chunks += ceil_div(sizes[i], kListChunk);
    if (++list.count == List::capacity) flush();
  }
  flush();
}

}  // namespace gptkernels::cuda
