// An op's header declares its launchers once, in namespace `gptkernels::GPTKERNELS_DEVICE`; this header selects that
// namespace's number types, Stream and Status for the translation unit's device.
#pragma once

#ifdef GPTKERNELS_CUDA
#include "cuda/device.h"
#define GPTKERNELS_DEVICE cuda
#else
#include "cpu/device.h"
#define GPTKERNELS_DEVICE cpu
#endif

// Instantiates a launcher for every floating dtype that the ops support.
#define GPTKERNELS_FOR_FLOATING(MACRO) \
  MACRO(double)                        \
  MACRO(float)                         \
  MACRO(bfloat16)                      \
  MACRO(float16)
