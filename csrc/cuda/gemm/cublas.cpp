#include "cublas.h"

#include <dlfcn.h>

#include <initializer_list>

namespace gptkernels::cuda {
namespace {

// The handles are torch's, so the functions must be of torch's cuBLAS. dlsym() also searches the libraries on which
// libtorch_cuda.so depends, which include cuBLAS and cuBLASLt.
void* loaded_cublas() {
  for (const char* name : {"libtorch_cuda.so", "libcublas.so.13", "libcublas.so.12"})
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD); library && dlsym(library, "cublasLtMatmul"))
      return library;
  return nullptr;
}

void* find(const char* function) {
  static void* const library = loaded_cublas();
  return library ? dlsym(library, function) : nullptr;
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
