#pragma once

#include "../fused_classifier.h"
#include "fp8_numbers.h"

namespace gptkernels::cpu {

inline void store(Fp8Dlogit& to, float value) {
  to.bits = Fp8E5M2::round(value * Fp8Dlogit::kMultiplier);
}

}  // namespace gptkernels::cpu
