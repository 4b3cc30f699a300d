#include "capability.h"

// Python calls these two functions through ctypes.
extern "C" __attribute__((visibility("default"))) const char* gptkernels_cpu_capability() {
  return gptkernels::cpu::name(gptkernels::cpu::capability_choice().capability);
}

extern "C" __attribute__((visibility("default"))) const char* gptkernels_cpu_capability_error() {
  return gptkernels::cpu::capability_choice().error.c_str();
}
