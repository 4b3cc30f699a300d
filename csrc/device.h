// The device this translation unit is compiled for. An op's header declares its launchers once, in namespace
// `gptkernels::GPTKERNELS_DEVICE`, in terms of that device's number types, Stream and Status: so the two devices
// cannot come to differ in what they are called with.
#pragma once

#ifdef GPTKERNELS_CUDA
#include "cuda/device.h"
#define GPTKERNELS_DEVICE cuda
#else
#include "cpu/device.h"
#define GPTKERNELS_DEVICE cpu
#endif
