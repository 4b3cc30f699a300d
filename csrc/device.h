// Selects the namespace `gptkernels::GPTKERNELS_DEVICE` and its number types, Stream and Status, in which an op's
// header declares its launchers once for both devices.
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
