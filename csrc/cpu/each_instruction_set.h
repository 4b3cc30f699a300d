// Compiles vector.h and the file that the macro GPTKERNELS_KERNELS names, whose kernels use Vector<A>, once for each
// instruction set, in a namespace with the name GPTKERNELS_NAME and the suffix _avx512, _avx2 or _baseline.
// GPTKERNELS_WIDEST(function(...)) calls the copy for the chosen instruction set (capability.h). Include this file once
// per source file, outside namespaces, after all headers that the kernels need. Loops without Vector use vectorised()
// (simd.h) instead.

#include "capability.h"

#define GPTKERNELS_PASTE(a, b) a##b
#define GPTKERNELS_JOIN(a, b) GPTKERNELS_PASTE(a, b)
#define GPTKERNELS_IN(isa) GPTKERNELS_JOIN(GPTKERNELS_NAME, isa)

#ifdef GPTKERNELS_X86
#include <immintrin.h>
#endif

#ifndef __clang__
#pragma GCC diagnostic push
// The warnings about _mm512_undefined_ps, and about scratch memory that a function receives and then writes, are wrong.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#ifdef GPTKERNELS_X86

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define GPTKERNELS_ISA GPTKERNELS_IN(_avx512)
#define GPTKERNELS_VECTOR_BITS 512
#include "vector.h"
// Must follow vector.h.
#include GPTKERNELS_KERNELS
#undef GPTKERNELS_ISA
#undef GPTKERNELS_VECTOR_BITS
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define GPTKERNELS_ISA GPTKERNELS_IN(_avx2)
#define GPTKERNELS_VECTOR_BITS 256
#include "vector.h"
// Must follow vector.h.
#include GPTKERNELS_KERNELS
#undef GPTKERNELS_ISA
#undef GPTKERNELS_VECTOR_BITS
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

#define GPTKERNELS_ISA GPTKERNELS_IN(_baseline)
#define GPTKERNELS_VECTOR_BITS 0
#include "vector.h"
// Must follow vector.h.
#include GPTKERNELS_KERNELS
#undef GPTKERNELS_ISA
#undef GPTKERNELS_VECTOR_BITS

#ifndef __clang__
#pragma GCC diagnostic pop
#endif

#ifdef GPTKERNELS_X86
#define GPTKERNELS_WIDEST(call)                                       \
  switch (capability_choice().capability) {                           \
    case Capability::kAvx512: GPTKERNELS_IN(_avx512)::call; break;    \
    case Capability::kAvx2: GPTKERNELS_IN(_avx2)::call; break;        \
    case Capability::kDefault: GPTKERNELS_IN(_baseline)::call; break; \
  }
#else
#define GPTKERNELS_WIDEST(call) GPTKERNELS_IN(_baseline)::call
#endif
