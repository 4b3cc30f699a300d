#include "../sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "simd.h"

namespace gptkernels::cpu {
namespace {

// NaN if there is a NaN.
float largest_of(const std::vector<float>& x) {
  float largest = -std::numeric_limits<float>::infinity();
  for (const float value : x) {
    if (std::isnan(value)) return value;
    largest = std::max(largest, value);
  }
  return largest;
}

template <typename T>
float threshold_of(const Sample<T>& p, const std::vector<float>& x, float largest) {
  float threshold = -std::numeric_limits<float>::infinity();
  if (p.top_k < p.vocabulary) {
    std::vector<float> sorted = x;
    std::nth_element(sorted.begin(), sorted.begin() + (p.top_k - 1), sorted.end(), std::greater<>());
    threshold = sorted[static_cast<size_t>(p.top_k - 1)];
  }
  if (p.top_p >= 1) return threshold;
  std::vector<float> left;
  std::copy_if(x.begin(), x.end(), std::back_inserter(left), [&](float value) { return value >= threshold; });
  std::sort(left.begin(), left.end(), std::greater<>());
  const auto units = [&](float value) {
    return static_cast<int64_t>(std::nearbyint(std::exp(value - largest) * static_cast<float>(kSampleUnits)));
  };
  int64_t total = 0, sum = 0;
  for (const float value : left) total += units(value);
  const auto requested = std::max<int64_t>(static_cast<int64_t>(std::ceil(p.top_p * static_cast<double>(total))), 1);
  for (const float value : left)
    if ((sum += units(value)) >= requested) return value;
  return threshold;
}

template <typename T>
int64_t draw(const Sample<T>& p, int64_t b) {
  const T* logits = p.logits + b * p.logits_stride;
  const float* noise = p.noise ? p.noise + b * p.vocabulary : nullptr;
  const auto temperature = static_cast<float>(noise ? p.temperature : 1.0);
  std::vector<float> x(static_cast<size_t>(p.vocabulary));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(accumulate_t<T>(logits[i])) / temperature;
  const float largest = largest_of(x);
  if (!std::isfinite(largest)) return -1;
  if (noise == nullptr) {
    // The logits are compared, not x, because different float64 logits may round to the same float32.
    const T* best = std::max_element(logits, logits + p.vocabulary,
                                     [](const T& a, const T& c) { return accumulate_t<T>(a) < accumulate_t<T>(c); });
    return best - logits;
  }
  const float threshold = threshold_of(p, x, largest);
  size_t best = 0;
  float highest = -1;
  for (size_t i = 0; i < x.size(); ++i) {
    const float score = x[i] < threshold ? -1.0f : std::exp(x[i] - largest) / noise[i];
    if (score > highest) best = i, highest = score;
  }
  return static_cast<int64_t>(best);
}

}  // namespace

template <typename T>
Status sample(const Sample<T>& p, Stream stream) {
  for (int64_t b = 0; b < p.batch; ++b)
    if (p.lengths[b] < 0 || p.lengths[b] >= p.sequence_length)
      return {"length " + std::to_string(p.lengths[b]) + " of sequence " + std::to_string(b) + " is not from 0 to " +
              std::to_string(p.sequence_length - 1)};
  parallel_for(stream, p.batch, 8 * p.vocabulary, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) p.sequences[b * p.sequence_length + p.lengths[b]++] = draw(p, b);
  });
  return {};
}

#define GPTKERNELS_INSTANTIATE(T) template Status sample<T>(const Sample<T>&, Stream);
GPTKERNELS_FOR_FLOATING(GPTKERNELS_INSTANTIATE)

}  // namespace gptkernels::cpu
