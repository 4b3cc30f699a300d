// Assertions about data that only the device reads are part of an op's contract, so NDEBUG does not remove them.
#pragma once

#include <cstdio>

extern "C" __host__ __device__ void __assert_fail(const char* assertion, const char* file, unsigned line,
                                                  const char* function) noexcept;

namespace gptkernels::cuda {

// Prints "gptkernels::<op>: " and `sentence`, then ends the kernel with cudaErrorAssert, as torch's device-side
// assertions do. The assertion repeats `op` and says `what` is wrong, because the printf buffer may be lost with the
// context.
template <typename... Values>
__device__ __noinline__ void device_fail(const char* op, const char* what, const char* sentence, Values... values) {
  printf("gptkernels::%s: ", op);
  printf(sentence, values...);
  __assert_fail(what, "gptkernels", 0, op);
}

}  // namespace gptkernels::cuda
