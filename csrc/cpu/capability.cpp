#include "capability.h"

// For Python, by ctypes: the name of the copy that runs, and the error if the environment's wish cannot be met.
extern "C" __attribute__((visibility("default"))) const char* gptkernels_cpu_capability() {
  return gptkernels::cpu::name(gptkernels::cpu::capability_choice().capability);
}

extern "C" __attribute__((visibility("default"))) const char* gptkernels_cpu_capability_error() {
  return gptkernels::cpu::capability_choice().error.c_str();
}
