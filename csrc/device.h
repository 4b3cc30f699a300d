// An op's header declares its launchers once, in the namespace `gptkernels::GPTKERNELS_DEVICE`, with the device's
// number types, Stream and Status.
#pragma once

#ifdef GPTKERNELS_CUDA
#include "cuda/device.h"
#define GPTKERNELS_DEVICE cuda
#else
#include "cpu/device.h"
#define GPTKERNELS_DEVICE cpu
#endif

#define GPTKERNELS_FOR_FLOATING(MACRO) \
  MACRO(double)                        \
  MACRO(float)                         \
  MACRO(bfloat16)                      \
  MACRO(float16)
