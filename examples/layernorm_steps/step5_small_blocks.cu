// Step 5: small thread blocks, and statistics that stay in the L2 cache. Thread blocks of 2 rows (3 KB) start and end
// at different times, so that at any moment some thread blocks read while others write. Each row writes 4 bytes of a
// 32-byte sector of mean and of rstd. With evict_last, the sector stays in the cache until the other rows have written
// their bytes of the sector.
#include "packs.cuh"

const char* const kStep = "5 small thread blocks";

void layernorm(const Layernorm& p) {
  layernorm_packs_kernel<true><<<(p.rows + 1) / 2, dim3(32, 2)>>>(p);
}
