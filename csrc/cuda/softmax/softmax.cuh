// Chooses the kernels of softmax and its backward. The fast kernels keep a row in registers and shared memory between
// its load and its store (common/row_part_launch.cuh). A simple kernel with one thread block per row, which reads the
// row from memory in both passes, is used for
//
//   float64
//   arrays with different offsets from a multiple of 16 bytes
//   more rows or wider rows than the fast kernels support
//   in the forward, scales below 1e-30: the fast kernels need a positive scale, and compute x - max(x), which may
//     overflow where scale * (x - max(x)) does not
//
// A thread writes only columns that no other thread reads, so the output may overwrite an input.
#pragma once

#include "backward.cuh"
#include "cuda/common/row_part_launch.cuh"
#include "cuda/common/simple_row.cuh"
#include "forward.cuh"

namespace gptkernels::cuda {

template <bool kCausal, typename T>
Status softmax_forward_rows(const SoftmaxRows<T>& p, Stream stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  const bool aligned = can_vectorize<T>(p.width, p.out, p.x);
  if constexpr (!std::is_same_v<T, double>)
    if (same_misalignment(p.out, p.x) && p.scale >= 1e-30f &&
        launch_rows<SoftmaxForwardRow<T, kCausal>>(p, p.out, aligned, stream))
      return cudaGetLastError();
  with_packs<T>(aligned, [&](auto vec) {
    softmax_forward_simple_kernel<T, vec.value, kCausal>
        <<<grid_size(p.rows), simple_threads<vec.value>(p.width), 0, stream>>>(p);
  });
  return cudaGetLastError();
}

template <bool kCausal, typename T>
Status softmax_backward_rows(const SoftmaxBackwardRows<T>& p, Stream stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  const bool aligned = can_vectorize<T>(p.width, p.dx, p.dout, p.out);
  if constexpr (!std::is_same_v<T, double>)
    if (same_misalignment(p.dx, p.dout, p.out) && launch_rows<SoftmaxBackwardRow<T, kCausal>>(p, p.dx, aligned, stream))
      return cudaGetLastError();
  with_packs<T>(aligned, [&](auto vec) {
    softmax_backward_simple_kernel<T, vec.value, kCausal>
        <<<grid_size(p.rows), simple_threads<vec.value>(p.width), 0, stream>>>(p);
  });
  return cudaGetLastError();
}

}  // namespace gptkernels::cuda
