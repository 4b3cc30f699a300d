// One parallel loop processes all tensors, because most tensors of a model are too small for a loop of their own.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device.h"

namespace gptkernels::cpu {

constexpr int64_t kListChunk = 32768;

inline int64_t list_chunks(int64_t size) {
  return (size + kListChunk - 1) / kListChunk;
}

// Divides every tensor into chunks, and calls fn(chunk, tensor, begin, end) for each chunk. `chunk` is its index among
// the chunks of all tensors, and [begin, end) are its elements within the tensor.
template <typename Fn>
void parallel_for_chunks(Stream stream, int64_t count, const int64_t* sizes, const Fn& fn) {
  int64_t chunks = 0;
  int64_t elements = 0;
  for (int64_t t = 0; t < count; ++t) {
    chunks += list_chunks(sizes[t]);
    elements += sizes[t];
  }
  if (chunks == 0) return;
  parallel_for(stream, chunks, elements / chunks, [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (int64_t t = 0; t < count && first < end; ++t) {
      const int64_t next = first + list_chunks(sizes[t]);
      for (int64_t chunk = std::max(begin, first); chunk < std::min(end, next); ++chunk) {
        const int64_t start = (chunk - first) * kListChunk;
        fn(chunk, t, start, std::min(start + kListChunk, sizes[t]));
      }
      first = next;
    }
  });
}

}  // namespace gptkernels::cpu
