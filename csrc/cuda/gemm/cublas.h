// The functions of cuBLAS and cuBLASLt. The library does not link them, so that it works with torch's cuBLAS of CUDA 12
// and of CUDA 13. In namespace gptkernels::cuda the name of each function in this list is a pointer, which is null if
// cuBLAS was not found. Host code may include this header.
//
// cuBLAS 12.6 (torch 2.10's oldest) has all these functions, and the sizes that cuBLASLt's *Init_internal functions
// receive let it accept the structs of newer headers.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#define GPTKERNELS_FOR_CUBLAS(apply)            \
  apply(cublasGemmStridedBatchedEx_64);         \
  apply(cublasGetMathMode);                     \
  apply(cublasGetStatusString);                 \
  apply(cublasSetMathMode);                     \
  apply(cublasLtGetVersion);                    \
  apply(cublasLtMatmul);                        \
  apply(cublasLtMatmulAlgoCheck);               \
  apply(cublasLtMatmulAlgoConfigGetAttribute);  \
  apply(cublasLtMatmulAlgoConfigSetAttribute);  \
  apply(cublasLtMatmulAlgoGetHeuristic);        \
  apply(cublasLtMatmulDescInit_internal);       \
  apply(cublasLtMatmulDescSetAttribute);        \
  apply(cublasLtMatmulPreferenceInit_internal); \
  apply(cublasLtMatmulPreferenceSetAttribute);  \
  apply(cublasLtMatrixLayoutInit_internal);     \
  apply(cublasLtMatrixLayoutSetAttribute)

namespace gptkernels::cuda {

#define GPTKERNELS_DECLARE(name) extern const decltype(&::name) name
GPTKERNELS_FOR_CUBLAS(GPTKERNELS_DECLARE);
#undef GPTKERNELS_DECLARE

// Returns the name of a function that was not found, or null if all were found.
const char* missing_cublas_function();

}  // namespace gptkernels::cuda
