// Online softmax on sm_90a that rarely needs maxima. The exponentials of row i are relative to a reference r_i: p_ij =
// exp(s_ij - r_i), and out_i = sum_j p_ij v_j / sum_j p_ij. The division cancels any r_i. Rules for r_i:
//
//   - r_i is a score of a key that query i sees. The p of this key is 1 when rounded to 16 bits (kFarFromZero), so the
//     sum is nearly 1 or larger, the division is safe, and a p that underflows is negligible.
//   - Each thread's sum over its columns of a key tile is below kLargestSum = 2^20, so every p is below 2^20. bfloat16
//     has the exponents of float32, so rounding p has a relative error of at most 2^-8 for any r_i. Sums of p v over a
//     key tile are below 2^22 max|v|. For float16, whose largest number is 65504, kLargestSum is 2^12.
//   - r_i need not be the maximum. The largest p is then not 1 but a rounded number, and if this p is nearly the whole
//     sum, out has the rounding error of p (docs/notes/attention.md).
//   - If a thread's sum is not below kLargestSum, or is NaN, the warp computes the scores of the key tile again, raises
//     r_i to their maximum, and multiplies the earlier sums by exp(r_i - new r_i).
//
// Therefore a row needs a maximum only in the first key tile in which it sees a key. In other key tiles it is enough to
// compare the sums with kLargestSum.
#pragma once

#include "common.cuh"

namespace gptkernels::cuda {

#if GPTKERNELS_WGMMA

// The four lanes of a quad hold a row's columns (wgmma.cuh).
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ inline bool quad_any(bool x) {
  return __ballot_sync(~0u, x) >> (threadIdx.x % 32 & ~3u) & 0xF;
}

// A thread's state of rows lane / 4 and lane / 4 + 8 of the warp's 16 rows. Scores and references are dot products plus
// an additive mask's values / scale; `factor`, scale * log2(e), converts them to exponents of 2.
template <typename T>
struct Softmax {
  static constexpr float kLargestSum = std::is_same_v<T, bfloat16> ? 1 << 20 : 1 << 12;

  float factor;
  float reference[2] = {};      // -inf: no reference yet
  float sum[2] = {};            // over this thread's columns
  bool needs_reference = true;  // whether a row of the warp has no reference, or one far from 0

  __device__ bool is_far(int r) const {
    return fabsf(reference[r]) * factor > kFarFromZero<T> && reference[r] != -INFINITY;
  }

  // Raises references to the maximum of every kEvery-th group of 8 columns. Only rows without a reference or with
  // `too_low` change: the whole warp calls this function if any of its rows needs it, but a row's result must not
  // depend on other rows.
  template <int kEvery, int n>
  __device__ void raise_references(const float (&scores)[n], const bool (&too_low)[2], float (&rescale)[2]) {
    bool needs = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = -INFINITY, odd = -INFINITY;
#pragma unroll
      for (int i = 0; i < n / 4; i += kEvery) {
        even = fmaxf(even, scores[4 * i + 2 * r]);
        odd = fmaxf(odd, scores[4 * i + 2 * r + 1]);
      }
      const float largest = fmaxf(reference[r], quad_max(fmaxf(even, odd)));
      rescale[r] = 1;
      if (reference[r] == -INFINITY || too_low[r]) {
        rescale[r] = reference[r] == -INFINITY ? 0 : exp2_approximately((reference[r] - largest) * factor);
        reference[r] = largest;
      }
      needs |= reference[r] == -INFINITY || is_far(r);
    }
    needs_reference = __any_sync(~0u, needs);
  }

  // Sets `base` to the reference. If the reference is far from 0, reference * factor would be rounded too coarsely, so
  // the reference is subtracted from the scores, and `base` is 0.
  template <int n>
  __device__ void find_base(float (&scores)[n], float (&base)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = reference[r];
      if (!is_far(r)) continue;
#pragma unroll
      for (int i = 0; i < n / 2; ++i) scores[i / 2 * 4 + i % 2 + 2 * r] -= reference[r];
      base[r] = 0;
    }
  }

  template <int n>
  __device__ void exponentials(float (&scores)[n], float (&sums)[2], const float (&base)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float bias = base[r] == -INFINITY ? 0 : -base[r] * factor;
      float even = 0, odd = 0;
#pragma unroll
      for (int i = 0; i < n / 4; ++i) {
        float& x = scores[4 * i + 2 * r];
        float& y = scores[4 * i + 2 * r + 1];
        x = exp2_approximately(fmaf(x, factor, bias));
        y = exp2_approximately(fmaf(y, factor, bias));
        even += x;
        odd += y;
      }
      sums[r] = even + odd;
    }
  }

  __device__ void start_rows() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0;
    needs_reference = true;
  }

  // Replaces a key tile's masked scores by exponentials. Returns whether the caller must multiply its earlier sums by
  // `rescale`. begin() is called before the exponentials, and end() after them. compute_again() must write the masked
  // scores to `scores` again.
  template <int kEvery, int n, typename Begin, typename End, typename Again>
  __device__ bool add(float (&scores)[n], float (&rescale)[2], const Begin& begin, const End& end,
                      const Again& compute_again) {
    rescale[0] = rescale[1] = 1;
    bool rescales = needs_reference;
    float base[2] = {reference[0], reference[1]}, sums[2];
    if (needs_reference) {
      raise_references<kEvery>(scores, {false, false}, rescale);
      find_base(scores, base);
    }
    begin();
    exponentials(scores, sums, base);
    end(sums);
    if (__any_sync(~0u, !(sums[0] < kLargestSum) || !(sums[1] < kLargestSum))) [[unlikely]] {
      const bool too_low[2] = {quad_any(!(sums[0] < kLargestSum)), quad_any(!(sums[1] < kLargestSum))};
      compute_again();
      float raised[2];
      raise_references<1>(scores, too_low, raised);
      find_base(scores, base);
      exponentials(scores, sums, base);
      rescale[0] *= raised[0];
      rescale[1] *= raised[1];
      rescales = true;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = sum[r] * rescale[r] + sums[r];
    return rescales;
  }
};

#endif

}  // namespace gptkernels::cuda
