// TMA copies of panels (wgmma.cuh).
#pragma once

#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace gptkernels::cuda {

#if GPTKERNELS_WGMMA

template <int kPanels>
__device__ void load_panels(uint32_t shared, int panel_bytes, const CUtensorMap& map, int row, int head, int batch,
                            uint32_t full) {
  for (int i = 0; i < kPanels; ++i) tma_load(shared + i * panel_bytes, map, i * kPanelColumns, row, head, batch, full);
}

template <int kPanels>
__device__ void store_panels(const CUtensorMap& map, uint32_t shared, int panel_bytes, int row, int head, int batch) {
  for (int i = 0; i < kPanels; ++i) tma_store(map, shared + i * panel_bytes, i * kPanelColumns, row, head, batch);
  tma_store_commit();
}

#endif

}  // namespace gptkernels::cuda
