// Step 4: one instruction loads or stores a pack of 8 bfloat16 (16 bytes), so the kernel needs an eighth of the load,
// store and address instructions. A row of 768 elements is 96 packs, 3 per thread.
#include "packs.cuh"

const char* const kStep = "4 packs of 16 bytes";

void layernorm(const Layernorm& p) {
  layernorm_packs_kernel<false><<<(p.rows + 7) / 8, dim3(32, 8)>>>(p);
}
