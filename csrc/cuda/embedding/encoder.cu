// Token plus position embeddings. forward.cuh has the forward; in the backward, order.cuh sorts the positions by token,
// and sums.cuh adds the rows of dout. The forward and the sums process the columns in slabs (slab.cuh).
#include <bit>
#include <utility>

#include "../../encoder.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/packed.cuh"
#include "forward.cuh"
#include "order.cuh"
#include "slab.cuh"
#include "sums.cuh"

namespace gptkernels::cuda {
namespace {

template <typename T, typename Token, int kVec>
void launch_forward(EncoderForward<T, Token> p, Stream stream) {
  if (!p.wpe) p.length *= std::exchange(p.batch, 1);
  const int64_t per_sequence = ceil_div(p.length, kForwardBlockRows);
  const ForwardBlocks blocks{grid_size(per_sequence), grid_size(p.batch * per_sequence)};
  encoder_forward_slab_kernel<T, Token, kVec>
      <<<grid_size(p.batch * per_sequence * slabs<kVec, kWarp>(p.width)), kForwardThreads, 0, stream>>>(p, blocks);
}

template <typename T, typename Token, int kVec>
void launch_backward(const EncoderBackward<T, Token>& p, const EncoderWorkspace<T>& w, Stream stream) {
  const int bins = 1 << w.shift;
  const int tile_threads = CountingSort::threads(kTileThreads, bins);
  const int bin_threads = CountingSort::threads(kBinThreads, w.digits);
  encoder_backward_tiles_kernel<T, Token>
      <<<w.tiles, tile_threads, CountingSort::shared_bytes(tile_threads, bins), stream>>>(p, w);
  launch_early<encoder_backward_bins_kernel<T>>(bins, bin_threads, CountingSort::shared_bytes(bin_threads, w.digits),
                                                stream, w, p.vocabulary);
  constexpr int kMaxGridY = 65535;
  const int64_t batch_blocks = p.dwpe ? ceil_div(p.positions * w.pieces, kSumsWarps) : 0;
  const int64_t slot_blocks = ceil_div(w.windows * int64_t(kWindow / kUnit), kSumsThreads / kLanes<kVec>);
  const dim3 grid(grid_size(batch_blocks + slot_blocks), min(w.slabs, kMaxGridY));
  const auto sums = std::bit_cast<EncoderSums<T>>(p);
  if (p.accumulate)
    launch_early<encoder_backward_sums_kernel<T, kVec, true>>(grid, kSumsThreads, 0, stream, sums, w, batch_blocks);
  else
    launch_early<encoder_backward_sums_kernel<T, kVec, false>>(grid, kSumsThreads, 0, stream, sums, w, batch_blocks);
}

}  // namespace

template <typename T, typename Token>
Status encoder_forward(const EncoderForward<T, Token>& p, Stream stream) {
  if (p.batch * p.length == 0 || p.width == 0) return cudaSuccess;
  if (can_vectorize<T>(p.width, p.out, p.wte, p.wpe))
    launch_forward<T, Token, kPack<T>>(p, stream);
  else
    launch_forward<T, Token, 1>(p, stream);
  return cudaGetLastError();
}

template <typename T, typename Token>
int64_t encoder_backward_workspace(int64_t batch, int64_t length, int64_t vocabulary, int64_t width) {
  if (batch * length == 0) return 0;
  // The pointers' alignment is not known yet. A launch without packs has at least as many slabs as one with packs, so
  // its workspace is large enough in both cases.
  return carve<T>(nullptr, batch, length, vocabulary, width, slabs<1, kLanes<1>>(width)).bytes;
}

template <typename T, typename Token>
Status encoder_backward(const EncoderBackward<T, Token>& p, Stream stream) {
  const int64_t n = p.batch * p.length;
  if (p.width == 0) return cudaSuccess;
  if (n == 0) {
    const int64_t row_bytes = p.width * int64_t(sizeof(T));
    if (p.dwpe)
      if (Status status = cudaMemsetAsync(p.dwpe, 0, p.positions * row_bytes, stream); status != cudaSuccess)
        return status;
    return p.dwte && !p.accumulate ? cudaMemsetAsync(p.dwte, 0, p.vocabulary * row_bytes, stream) : cudaSuccess;
  }
  if (n > kEncoderMaxRows || p.positions > kEncoderMaxRows || p.vocabulary > kEncoderMaxVocabulary ||
      p.width > kEncoderMaxColumns)
    return cudaErrorInvalidValue;
  const bool packed = can_vectorize<T>(p.width, p.dwte, p.dwpe, p.dout);
  constexpr int kVec = kPack<T>;
  const int64_t slab_count = packed ? slabs<kVec, kLanes<kVec>>(p.width) : slabs<1, kLanes<1>>(p.width);
  const EncoderWorkspace<T> w = carve<T>(p.workspace, p.batch, p.length, p.vocabulary, p.width, slab_count);
  if (packed)
    launch_backward<T, Token, kVec>(p, w, stream);
  else
    launch_backward<T, Token, 1>(p, w, stream);
  return cudaGetLastError();
}

#define GPTKERNELS_INSTANTIATE(T, Token)                                                     \
  template Status encoder_forward<T, Token>(const EncoderForward<T, Token>&, Stream);        \
  template int64_t encoder_backward_workspace<T, Token>(int64_t, int64_t, int64_t, int64_t); \
  template Status encoder_backward<T, Token>(const EncoderBackward<T, Token>&, Stream);
GPTKERNELS_INSTANTIATE(double, int32_t)
GPTKERNELS_INSTANTIATE(float, int32_t)
GPTKERNELS_INSTANTIATE(bfloat16, int32_t)
GPTKERNELS_INSTANTIATE(float16, int32_t)
GPTKERNELS_INSTANTIATE(double, int64_t)
GPTKERNELS_INSTANTIATE(float, int64_t)
GPTKERNELS_INSTANTIATE(bfloat16, int64_t)
GPTKERNELS_INSTANTIATE(float16, int64_t)

}  // namespace gptkernels::cuda
