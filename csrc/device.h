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

// The floating dtypes of every op, in the types of device.h: GPTKERNELS_FOR_FLOATING(M) is M(double) M(float) ... At
// the end of a kernel's file M instantiates its launchers.
#define GPTKERNELS_FOR_FLOATING(M) M(double) M(float) M(bfloat16) M(float16)
