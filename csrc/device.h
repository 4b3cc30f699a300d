// Selects the device that this translation unit is compiled for. An op's header declares its launchers once, in
// namespace `gptkernels::GPTKERNELS_DEVICE`, with that device's number types, Stream and Status.
#pragma once

#ifdef GPTKERNELS_CUDA
#include "cuda/device.h"
#define GPTKERNELS_DEVICE cuda
#else
#include "cpu/device.h"
#define GPTKERNELS_DEVICE cpu
#endif

// Calls MACRO(T) for every floating dtype that the ops support, to instantiate a launcher.
#define GPTKERNELS_FOR_FLOATING(MACRO) \
  MACRO(double)                        \
  MACRO(float)                         \
  MACRO(bfloat16)                      \
  MACRO(float16)
