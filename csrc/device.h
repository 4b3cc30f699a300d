// The device that this translation unit is compiled for. An op's header declares its launchers once for both devices,
// in namespace `gptkernels::GPTKERNELS_DEVICE`, with that device's number types, Stream and Status.
#pragma once

#ifdef GPTKERNELS_CUDA
#include "cuda/device.h"
#define GPTKERNELS_DEVICE cuda
#else
#include "cpu/device.h"
#define GPTKERNELS_DEVICE cpu
#endif

// MACRO(T) for every floating dtype that the ops take: the explicit instantiations of a launcher.
#define GPTKERNELS_FOR_FLOATING(MACRO) \
  MACRO(double)                        \
  MACRO(float)                         \
  MACRO(bfloat16)                      \
  MACRO(float16)
