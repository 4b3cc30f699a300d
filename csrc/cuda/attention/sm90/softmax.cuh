// The softmax of attention's forward on sm_90a, one key tile after the other.
//
// The exponentials of row i are relative to a reference r_i: p_ij = exp(s_ij - r_i), and out_i is sum_j p_ij v_j /
// sum_j p_ij. The division cancels any r_i, so r_i need not be the row's maximum. These are the conditions for r_i and
// their consequences:
//
//   - r_i is a score of a key that query i sees. The p of this key is 1 when it is rounded to 16 bits (kFarFromZero). So
//     the sum is nearly 1 or larger, and the division is safe. A p that underflows is negligible compared with the sum.
//   - Each thread's sum over its columns of a key tile is below kLargestSum = 2^20, so every p is below 2^20, too.
//     bfloat16 has the exponents of float32, so the relative error of a p of any size is at most 2^-8. All terms of a
//     row's sums have the same factor exp(-r_i), which changes no relative error. The sums of a key tile are below 2^22
//     max|v|, and cannot overflow for ordinary v. For float16, whose largest number is 65504, kLargestSum is 2^12.
//   - If r_i is not the maximum, the largest p is not 1, and is rounded. If this p is nearly the whole sum, out has the
//     rounding error of this p. If r_i is the maximum, this p is 1 and has no rounding error (docs/notes/attention.md).
//   - If a thread's sum is not below kLargestSum, or is NaN, the warp computes the scores of the key tile again, raises
//     r_i to their maximum, and multiplies the earlier sums by exp(r_i - new r_i).
//
// Therefore only the first key tile of a row needs a maximum, and only over some of its columns. For the later key
// tiles the kernel compares the sums with kLargestSum.
#pragma once

#include "common.cuh"

namespace gptkernels::cuda {

#if GPTKERNELS_WGMMA

// Returns the maximum over the four lanes of a quad, which hold the columns of a row (wgmma.cuh).
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ inline bool quad_any(bool x) {
  return __ballot_sync(~0u, x) >> (threadIdx.x % 32 & ~3u) & 0xF;
}

// A thread's part of the softmax of its two rows: rows lane / 4 and lane / 4 + 8 of the warp's 16 rows. Scores and
// references are dot products of queries and keys, plus an additive mask's values / scale. `factor`, scale * log2(e),
// converts these dot products to exponents of 2.
template <typename T>
struct Softmax {
  static constexpr float kLargestSum = std::is_same_v<T, bfloat16> ? 1 << 20 : 1 << 12;

  float factor;
  float reference[2] = {};      // -inf if the row has no reference yet
  float sum[2] = {};            // sums over this thread's columns
  bool needs_reference = true;  // whether a row of the warp has no reference, or a reference far from 0 (is_far)

  __device__ bool is_far(int r) const {
    return fabsf(reference[r]) * factor > kFarFromZero<T> && reference[r] != -INFINITY;
  }

  // Raises a row's reference to the maximum of its scores, if the maximum is higher. Changes only rows that have no
  // reference yet or whose `too_low` is set: the whole warp calls this function if any of its rows needs it, but the
  // result of a row must not depend on other rows. Sets `rescale` to the factors that make earlier sums relative to the
  // new references. Reads every kEvery-th group of 8 columns, from the first group on.
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

  // Sets `base` to the numbers to which the exponentials are relative: the references. A reference far from 0 is
  // instead subtracted from the scores, and the base is 0, because the product of such a reference and `factor` would
  // be rounded too coarsely.
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

  // Replaces scores by their exponentials relative to `base`, and sums the exponentials.
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

  // Resets the state for the rows of another query tile.
  __device__ void start_rows() {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0;
    needs_reference = true;
  }

  // Replaces the masked scores of a key tile by exponentials and adds them to the sums. Returns whether the caller must
  // multiply its earlier sums of these rows by `rescale`. The first references are maxima over every kEvery-th group of
  // columns. begin() and end() are called before and after the exponentials. compute_again() writes the masked scores
  // again.
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
