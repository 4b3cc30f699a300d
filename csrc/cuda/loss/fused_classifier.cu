#include "fused_classifier.cuh"

namespace gptkernels::cuda {
namespace {

// A gradient of 0 stays 0 even if dloss is infinite or NaN.
template <typename A>
__device__ A scale_gradient(A d, A dloss) {
  return d == A(0) ? A(0) : d * dloss;
}

template <typename T>
__device__ bool is_no_op(const FusedClassifierBackward<T>& p) {
  return p.scaled == p.dlogits && !p.dlosses_per_row && *p.dlosses == accumulate_t<T>(1);
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kSimpleThreads)
    fused_classifier_backward_simple_kernel(const FusedClassifierBackward<T> p) {
  if (is_no_op(p)) return;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const accumulate_t<T> dloss = p.dlosses[p.dlosses_per_row ? row : 0];
    for_each_pack<kVec>(p.width, [&](int64_t column) {
      accumulate_t<T> d[kVec];
      load_wide<kVec>(d, p.dlogits + row * p.width + column);
      for (int k = 0; k < kVec; ++k) d[k] = scale_gradient(d[k], dloss);
      store_narrow<kVec>(p.scaled + row * p.width + column, d);
    });
  }
}

template <typename T_>
struct ClassifierBackwardRow {
  using T = T_;
  using Arguments = FusedClassifierBackward<T>;
  static constexpr RowShapes kShapes = {};
  template <bool kHasHeadTail, bool kOverflow>
  static constexpr int kThreads = 1024;

  template <typename Team, int kItems, bool kHasHeadTail, bool kOverflow>
  static __device__ void run(const Arguments& p, uint4* slots, int) {
    if (is_no_op(p)) return;
    const RowColumns<T, Team, kItems, kHasHeadTail, false, kOverflow> at(p.scaled, p.rows, p.width);
    RowPart x(p.dlogits, at, slots);
    const float dloss = p.dlosses[p.dlosses_per_row && Team::row() < p.rows ? Team::row() : 0];
    at.store(p.scaled, [&](auto place) {
      auto d = x[place];
#pragma unroll
      for (float& value : d.v) value = scale_gradient(value, dloss);
      return d;
    });
  }
};

template <typename T>
void launch_backward(const FusedClassifierBackward<T>& p, Stream stream) {
  const bool aligned = can_vectorize<T>(p.width, p.scaled, p.dlogits);
  if constexpr (!std::is_same_v<T, double>)
    if (same_misalignment(p.scaled, p.dlogits) && launch_rows<ClassifierBackwardRow<T>>(p, p.scaled, aligned, stream))
      return;
  with_packs<T>(aligned, [&](auto vec) {
    fused_classifier_backward_simple_kernel<T, vec.value>
        <<<grid_size(p.rows), simple_threads<vec.value>(p.width), 0, stream>>>(p);
  });
}

}  // namespace

template <typename T>
Status fused_classifier_backward(const FusedClassifierBackward<T>& p, Stream stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  launch_backward(p, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T)                                                        \
  template Status fused_classifier_forward<T>(const FusedClassifierForward<T>&, Stream); \
  template Status fused_classifier_backward<T>(const FusedClassifierBackward<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cuda
