// A decoding step of one sequence with all layers in one kernel. Three launches:
//
//   decode_start_kernel   checks the newest token and fills the exchange buffer with kAbsent
//   (generate/whole_model/exchange.cuh) decode_layers_kernel  all layers: C / 64 clusters of 8 blocks, each half of a
//   layer as in generate/whole_model/layer_common.cuh decode_head_kernel    logits (generate/whole_model/head.cuh)
//
// Used for B = 1, 16 bits, C = 768 with 64-wide attention heads, at most 40 layers and 1024 cached tokens, on sm_90
// with room for all clusters at once.
#pragma once

#include "attention.cuh"
#include "cuda/generate/token.cuh"
#include "head.cuh"
#include "mlp.cuh"

namespace gptkernels::cuda {

// __cluster_dims__ does not compile below sm_90. There the kernel is empty and is never launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define DECODE_LAYERS_KERNEL __global__ void
#else
#define DECODE_LAYERS_KERNEL \
  __global__ void __cluster_dims__(kHalfBlocks, 1, 1) __launch_bounds__(kHalfThreads + kWarp, 1)
#endif

template <typename T, int C>
int64_t layers_shared_bytes(int64_t capacity) {
  static_assert(sizeof(MlpHalfShared<T, C>) % alignof(AttentionHalfShared<T, C>) == 0);
  return static_cast<int64_t>(sizeof(MlpHalfShared<T, C>)) + AttentionHalfShared<T, C>::bytes(capacity);
}

// Checks the newest token, and sets all words of the exchange buffer to kAbsent.
template <typename T>
__global__ void __launch_bounds__(kDecodeThreads)
    decode_start_kernel(const __grid_constant__ Decode<T> p, uint4* words, int64_t count) {
  // This kernel waits before it lets the next one start. So every kernel of the step may read what was written before
  // the step without waiting first.
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (blockIdx.x == 0 && threadIdx.x == 0) newest_token(p, 0);
  for (int64_t i = blockIdx.x * int64_t{kDecodeThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kDecodeThreads)
    words[i] = {kAbsent, kAbsent, kAbsent, kAbsent};
}

template <typename T, int C>
DECODE_LAYERS_KERNEL decode_layers_kernel(const __grid_constant__ DecodeLayers<T> p) {
#if GPTKERNELS_HOPPER
  extern __shared__ __align__(128) uint8_t layers_shared[];
  auto& mlp_shared = *reinterpret_cast<MlpHalfShared<T, C>*>(layers_shared);
  auto& attention_shared = *reinterpret_cast<AttentionHalfShared<T, C>*>(&mlp_shared + 1);
  AttentionHalf<T, C> attention(p, attention_shared);
  MlpHalf<T, C> mlp(p, mlp_shared);
  const int layers = static_cast<int>(p.step.layer_count);
  if (threadIdx.x == 0) {
    attention.begin();
    mlp.begin();
  }
  __syncthreads();
  cluster_arrive();
  const bool works = threadIdx.x < kHalfThreads;
  if (works) {
    attention.order(0);
    mlp.order(0);
  }
  cluster_wait();  // all blocks of the cluster have initialised their mbarriers
  wait_for_previous_kernel();
  for (int layer = 0; layer < layers; ++layer) {
    if (layer == layers - 1) let_next_kernel_start();
    if (works) {
      attention.run(layer);
      mlp.run(layer);
    } else {
      attention.receive(layer);
      mlp.receive(layer);
    }
  }
  if (!works) HalfResidual<T, C>(p, 0, 2 * layers).sum_and_store(p.residual);
  cluster_barrier();  // no block exits while another one still writes to its shared memory
#endif
}

template <typename T, int C>
cudaLaunchConfig_t layers_config(int64_t shared_bytes, Stream stream, cudaLaunchAttribute* attribute) {
  return launch_config(HalfShape<C>::kParts * kHalfBlocks, kHalfThreads + kWarp, shared_bytes, stream, attribute);
}

template <typename T, int C>
bool supports_decode_by_halves(const Decode<T>& p) {
  constexpr auto kKernel = decode_layers_kernel<T, C>;
  if (p.batch != 1 || p.width != C || p.heads != HalfShape<C>::kParts || p.layer_count < 1 ||
      p.layer_count > kMaxLayers || p.capacity > kHalfBlocks * kHalfKeys)
    return false;
  if (!all_aligned(p.wte, p.wpe, p.keys_values, p.norm_weight, p.norm_bias, p.head, p.workspace)) return false;
  for (int64_t l = 0; l < p.layer_count; ++l) {
    const DecodeLayer<T>& w = p.layers[l];
    if (!all_aligned(w.norm1_weight, w.norm1_bias, w.qkv_weight, w.proj_weight, w.proj_bias, w.norm2_weight,
                     w.norm2_bias, w.fc_weight, w.fcproj_weight, w.fcproj_bias))
      return false;
  }
  if (!built_for_hopper<kKernel>() || max_dynamic_shared_memory<kKernel>() < layers_shared_bytes<T, C>(p.capacity))
    return false;
  // Blocks wait for each other, so all clusters must be resident at once. once_a_device caches 1 + the number of
  // resident clusters, because a cached answer must not be 0.
  return once_a_device([](int) {
           cudaLaunchAttribute attribute = {};
           cudaLaunchConfig_t config = layers_config<T, C>(max_dynamic_shared_memory<kKernel>(), nullptr, &attribute);
           attribute = cluster_of(kHalfBlocks);
           int clusters = 0;
           const Status status = cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config);
           if (status != cudaSuccess) cudaGetLastError();
           return status == cudaSuccess ? 1 + clusters : 1;
         }) > HalfShape<C>::kParts;
}

template <typename T, int C>
Status decode_by_halves(const Decode<T>& p, Stream stream) {
  using Shape = HalfShape<C>;
  const int64_t words = 2 * p.layer_count * Shape::kWords;
  DecodeLayers<T> layers = {.step = p, .layers = {}, .words = static_cast<float*>(p.workspace), .residual = nullptr};
  std::copy_n(p.layers, p.layer_count, layers.layers);
  layers.residual = layers.words + words;
  launch_early<decode_start_kernel<T>>(grid_size(multiprocessors()), kDecodeThreads, 0, stream, p,
                                       static_cast<uint4*>(p.workspace), words / 4);
  // A cooperative launch starts all blocks at once or none, even if kernels of other streams occupy SMs.
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  const cudaLaunchConfig_t config = layers_config<T, C>(layers_shared_bytes<T, C>(p.capacity), stream, &together);
  const Status status = cudaLaunchKernelEx(&config, decode_layers_kernel<T, C>, layers);
  if (status != cudaSuccess) return status;
  return decode_head<T, C>({.epilogue = {.kind = DecodeEpilogue<T>::kLogits, .narrow_out = p.logits},
                            .x = layers.residual,
                            .norm_weight = p.norm_weight,
                            .norm_bias = p.norm_bias,
                            .weight = p.head,
                            .bias = nullptr,
                            .sizes = {.batch = 1, .rows = p.head_rows, .inner = C},
                            .eps = p.eps},
                           stream);
}

}  // namespace gptkernels::cuda
