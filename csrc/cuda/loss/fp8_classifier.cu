#include "fp8_dlogit.cuh"
#include "fused_classifier.cuh"

namespace gptkernels::cuda {

template Status fused_classifier_forward(const FusedClassifierForward<float, Fp8Dlogit>&, Stream);
template Status fused_classifier_forward(const FusedClassifierForward<bfloat16, Fp8Dlogit>&, Stream);
template Status fused_classifier_forward(const FusedClassifierForward<float16, Fp8Dlogit>&, Stream);

}  // namespace gptkernels::cuda
