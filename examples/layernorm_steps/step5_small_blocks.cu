// Step 5: small thread blocks of 2 rows (3 KB), which start and end at different times, so that some read while others
// write. Each row writes 4 bytes of a 32-byte sector of mean and of rstd. With evict_last, the L2 cache keeps the
// sector until the other rows have written their bytes.
#include "packs.cuh"

const char* const kStep = "5 small thread blocks";

void layernorm(const Layernorm& p) {
  layernorm_packs_kernel<true><<<(p.rows + 1) / 2, dim3(32, 2)>>>(p);
}
