#include "../ops/matmul.h"

namespace gptkernels::GPTKERNELS_DEVICE {

// ops/matmul.cpp asks cuBLAS, which this kernel does not link. Attention in float32 is then exact.
bool tf32_allowed() {
  return false;
}

}  // namespace gptkernels::GPTKERNELS_DEVICE
