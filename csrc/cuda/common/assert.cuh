// Assertions about data that only the device sees. NDEBUG does not remove them: they are part of what an op promises.
#pragma once

#include <cstdio>

// What assert() calls; <cassert> hides it in a release build.
extern "C" __host__ __device__ void __assert_fail(const char* assertion, const char* file, unsigned line,
                                                  const char* function) noexcept;

namespace gptkernels::cuda {

// Prints a sentence and ends the kernel with cudaErrorAssert, as torch's own device-side assertions do. The kernel's
// name goes to both, since what is printed may get lost with the context while the assertion's own message does not.
template <typename... Values>
__device__ __noinline__ void device_fail(const char* op, const char* what, const char* sentence, Values... values) {
  printf("gptkernels::%s: ", op);
  printf(sentence, values...);
  __assert_fail(what, "gptkernels", 0, op);
}

}  // namespace gptkernels::cuda
