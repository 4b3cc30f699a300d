// Random delays (GPTKERNELS_RANDOM_DELAYS, docs/protocols.md) provoke rare orders of events between warps, thread
// blocks and clusters.
#pragma once

namespace gptkernels::cuda {

// About one of 8 calls sleeps for a random time of up to a few microseconds. The function has no branch, because ptxas
// does not run wgmma asynchronously across a branch.
__device__ inline void random_delay() {
#ifdef GPTKERNELS_RANDOM_DELAYS
  auto hash = static_cast<unsigned>(clock64());
  hash = (hash ^ blockIdx.x * 0x9E3779B9u ^ threadIdx.x / 32 * 0x85EBCA6Bu) * 0xC2B2AE35u;
  hash = (hash ^ hash >> 15) * 0x2C1B3C6Du;
  hash ^= hash >> 13;
  __nanosleep(hash % 8 == 0 ? hash >> 20 : 0);
#endif
}

}  // namespace gptkernels::cuda
