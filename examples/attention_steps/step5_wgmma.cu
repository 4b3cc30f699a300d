// Step 5: wgmma, TMA and a loading warp. Four warpgroups compute, each with 64 queries. The wgmma instructions of a
// warpgroup multiply tiles of 64 x 64 asynchronously. One thread loads each tile with one TMA instruction, whose bytes
// an mbarrier counts.
//
// The stages of keys and values form a ring. A phase of `full` completes when a stage's bytes have arrived, and a phase
// of `empty` when all warps that compute have released the stage.
//
// A warpgroup starts the scores of tile j + 1 before the output of tile j, and waits for the scores only, so the tensor
// cores compute the output while the warpgroup computes the softmax.
#include "cuda/ptx/pipeline.cuh"
#include "cuda/ptx/tma.cuh"
#include "softmax.cuh"

const char* const kStep = "5 wgmma, TMA, a loading warp";

using namespace gptkernels::cuda;

constexpr int kTile = 64;
constexpr int kWarpgroups = 4;  // that compute
constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
constexpr int kStages = 4;
// A warpgroup releases neither its last tile nor any later tile. The first warpgroup's last tile is kWarpgroups - 1
// tiles before the thread block's last tile. With fewer stages, the loading thread would wait forever for an empty
// stage.
static_assert(kStages >= kWarpgroups);

using Tile = bfloat16[kTile][kChannels];  // a panel, swizzled by TMA

struct Shared {
  Tile queries[kWarpgroups];
  struct {
    Tile keys, values;
  } stages[kStages];
  uint64_t queries_full, full[kStages], empty[kStages];
};

#if GPTKERNELS_WGMMA

// Tiles are boxes of the matrix qkv (B * T, 3 * C).
__device__ void load(Shared& shared, const CUtensorMap& qkv, const Attention& p, int head, int first) {
  const int row = head / p.heads * p.tokens;
  const auto column = [&](Part part) { return (part * p.heads + head % p.heads) * kChannels; };
  const uint32_t queries_full = shared_address(&shared.queries_full);
  mbarrier_expect(queries_full, sizeof shared.queries);
  for (int i = 0; i < kWarpgroups; ++i)
    tma_load(shared_address(shared.queries[i]), qkv, column(kQuery), row + first + i * kTile, queries_full);
  RingPosition<kStages> at;
  for (int key = 0; key < first + kWarpgroups * kTile; key += kTile) {
    const uint32_t full = shared_address(&shared.full[at.slot]);
    barrier_wait(shared_address(&shared.empty[at.slot]), at.phase ^ 1);
    mbarrier_expect(full, sizeof shared.stages[0]);
    tma_load(shared_address(shared.stages[at.slot].keys), qkv, column(kKey), row + key, full);
    tma_load(shared_address(shared.stages[at.slot].values), qkv, column(kValue), row + key, full);
    at.advance();
  }
}

// The warpgroup's last tile of keys is on the diagonal.
__device__ void compute(Shared& shared, const Attention& p, int head, int first, int warpgroup) {
  float scores[kAccumulators], out[kAccumulators], rescale[2];
  uint32_t weights[kAccumulators / 2];
  OnlineSoftmax softmax;
  const int last = first / kTile, row = threadIdx.x % kWarpgroup / 32 * 16;
  const uint64_t queries = panel_descriptor(shared_address(shared.queries[warpgroup]));

  const auto start_scores = [&](int slot) {
    const uint64_t keys = panel_descriptor(shared_address(shared.stages[slot].keys));
    pin_registers(scores);
    wgmma_fence();
    for (int i = 0; i < 4; ++i)  // 16 channels
      wgmma<bfloat16, false>(scores, queries + i * kStepK, keys + i * kStepK, i > 0);
    wgmma_commit();
  };
  const auto start_out = [&](int slot, bool clear) {
    const uint64_t values = panel_descriptor(shared_address(shared.stages[slot].values));
    pin_registers(weights);
    pin_registers(out);
    wgmma_fence();
    for (int i = 0; i < 4; ++i)  // 16 keys
      wgmma<bfloat16, true>(out, &weights[4 * i], values + i * kStepRows, i > 0 || !clear);
    wgmma_commit();
  };

  barrier_wait(shared_address(&shared.queries_full), 0);
  RingPosition<kStages> at;
  barrier_wait(shared_address(&shared.full[0]), 0);
  start_scores(at.slot);
  wgmma_wait<0>();
  pin_registers(scores);
  if (last == 0) mask_diagonal(scores, row);
  softmax.add(scores, rescale);  // there is no output to rescale yet
  accumulators_to_a<bfloat16>(weights, scores);
  for (int tile = 1; tile <= last; ++tile) {
    const int previous = at.slot;
    at.advance();
    barrier_wait(shared_address(&shared.full[at.slot]), at.phase);
    start_scores(at.slot);
    start_out(previous, tile == 1);
    wgmma_wait<1>();  // waits for the scores
    pin_registers(scores);
    if (tile == last) mask_diagonal(scores, row);
    softmax.add(scores, rescale);
    wgmma_wait<0>();  // waits for the output
    pin_registers(out);
    pin_registers(weights);
    barrier_arrive_if(threadIdx.x % 32 == 0, shared_address(&shared.empty[previous]));
    for (int i = 0; i < kAccumulators; ++i) out[i] *= rescale[i / 2 % 2];
    accumulators_to_a<bfloat16>(weights, scores);
  }
  start_out(at.slot, last == 0);
  wgmma_wait<0>();
  pin_registers(out);
  softmax.store(p, head, first + row, out);
}

#endif

__global__ void __launch_bounds__(kThreads, 1)
    attention_wgmma_kernel(const __grid_constant__ CUtensorMap qkv, Attention p) {
#if GPTKERNELS_WGMMA
  extern __shared__ __align__(1024) uint8_t bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.queries_full), 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&shared.full[i]), 1);
      barrier_init(shared_address(&shared.empty[i]), 4 * kWarpgroups);  // one arrival per warp
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int head = blockIdx.y;
  const int first = (gridDim.x - 1 - blockIdx.x) * kWarpgroups * kTile;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);  // the same in all lanes
  if (warpgroup < kWarpgroups) {
    alloc_registers<112>();
    compute(shared, p, head, first + warpgroup * kTile, warpgroup);
  } else {
    dealloc_registers<24>();
    if (threadIdx.x % kWarpgroup == 0) load(shared, qkv, p, head, first);
  }
#endif
}

void attention(const Attention& p) {
  const int width = 3 * p.heads * kChannels;
  const CUtensorMap qkv = matrix_map<bfloat16>(p.qkv, int64_t(p.batches) * p.tokens, width, width, kTile, kChannels);
  check(cudaFuncSetAttribute(attention_wgmma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  attention_wgmma_kernel<<<dim3(p.tokens / (kWarpgroups * kTile), p.batches * p.heads), kThreads, sizeof(Shared)>>>(qkv,
                                                                                                                    p);
}
