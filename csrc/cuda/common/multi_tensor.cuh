// One launch over many tensors. Their pointers and sizes travel as the kernel's argument, so nothing is copied to the
// device and a captured graph holds them. Every tensor is cut in chunks of one size, a block takes a chunk, and finds
// its tensor by a binary search that costs a few reads of constant memory.
#pragma once

#include <cstdint>

#include "launch.cuh"

namespace gptkernels::cuda {

// The most that a list and what goes with it may take. 32764 bytes are possible (since CUDA 12.1 and driver 530; 4096
// before), but the host writes all of them at every launch: 9 KB cost no more than 4 on an H200, 16 KB 2 us more, 32
// KB 4.
constexpr size_t kArgumentBytes = 9216;

template <int kPointers, int kCapacity>
struct TensorList {
  static constexpr int capacity = kCapacity;
  int32_t count;
  int32_t first_chunk[kCapacity + 1];  // the chunks of the tensors before; behind the last tensor, of all
  int32_t last_chunk_size[kCapacity];  // elements; the chunks before it are full
  void* pointers[kCapacity][kPointers];
};

struct Chunk {
  int tensor;
  int64_t begin;
  int size;
};

// The chunk that this block works on: kSize elements, or what is left of its tensor.
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

// Calls launch(list, blocks) for as many of the tensors at a time as a list holds, cut in chunks of kSize elements.
// Tensors of no elements are left out; set(pointers, i) stores the pointers of tensor i.
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
