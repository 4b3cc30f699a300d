#include <dlfcn.h>

#include <initializer_list>

#include "cublas.h"

namespace gptkernels::cuda {
namespace {

// The handles are torch's, so the functions must be of the same library. dlsym() also searches the libraries on which
// libtorch_cuda.so depends, which include cuBLAS and cuBLASLt of torch's CUDA version.
void* find(const char* function) {
  for (const char* library : {"libtorch_cuda.so", "libcublas.so.13", "libcublas.so.12"})
    if (void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD))
      if (void* found = dlsym(loaded, function)) return found;
  return nullptr;
}

}  // namespace

#define GPTKERNELS_DEFINE(name) const decltype(&::name) name = reinterpret_cast<decltype(&::name)>(find(#name))
GPTKERNELS_FOR_CUBLAS(GPTKERNELS_DEFINE);

const char* missing_cublas_function() {
#define GPTKERNELS_CHECK(name) \
  if (!name) return #name
  GPTKERNELS_FOR_CUBLAS(GPTKERNELS_CHECK);
  return nullptr;
}

}  // namespace gptkernels::cuda
