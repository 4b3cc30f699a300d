// Times cuBLASLt's algorithms for a matmul. Host code.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "algorithm_cache.h"
#include "cuda/device.h"

namespace gptkernels::cuda {

class Timer {
 public:
  explicit Timer(Stream stream) : stream_(stream) {}
  ~Timer() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  template <typename Launch>
  void time(const Launch& launch) {
    mark();
    launch();
    mark();
  }

  std::vector<float> read() const {
    std::vector<float> times;
    if (cudaStreamSynchronize(stream_) != cudaSuccess) return times;
    for (size_t i = 0; i + 1 < events_.size(); i += 2) {
      float milliseconds = 0;
      if (cudaEventElapsedTime(&milliseconds, events_[i], events_[i + 1]) != cudaSuccess) return {};
      times.push_back(milliseconds);
    }
    return times;
  }

 private:
  void mark() {
    cudaEvent_t event = nullptr;
    if (cudaEventCreate(&event) != cudaSuccess) return;
    events_.push_back(event);
    cudaEventRecord(event, stream_);
  }

  Stream stream_;
  std::vector<cudaEvent_t> events_;
};

// Compares the medians of times[round * count + algorithm]. Returns 0, the heuristic's first algorithm, unless the
// fastest one is more than 2 % faster, because the heuristic's order is the same in every run, but times vary.
inline size_t fastest(const std::vector<float>& times, size_t count, int rounds) {
  constexpr float kClearly = 0.98f;
  const auto median = [&](size_t index) {
    std::vector<float> sorted;
    for (int round = 0; round < rounds; ++round) sorted.push_back(times[round * count + index]);
    std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
    return sorted[sorted.size() / 2];
  };
  size_t best = 0;
  for (size_t i = 1; i < count; ++i)
    if (median(i) < median(best)) best = i;
  return median(best) < kClearly * median(0) ? best : 0;
}

// Every round times each algorithm once, so that a change of the clock rate affects all of them. Synchronises with the
// stream.
template <typename Launch>
std::optional<LtAlgorithm> autotune(std::vector<LtAlgorithm> algorithms, Stream stream, const Launch& launch) {
  constexpr int kRounds = 8;
  std::erase_if(algorithms, [&](const LtAlgorithm& algorithm) { return !launch(algorithm); });
  if (algorithms.empty()) return std::nullopt;
  Timer timer(stream);
  for (int round = 0; round < kRounds; ++round)
    for (const LtAlgorithm& algorithm : algorithms) timer.time([&] { launch(algorithm); });
  const std::vector<float> times = timer.read();
  if (times.size() != kRounds * algorithms.size()) return algorithms[0];
  return algorithms[fastest(times, algorithms.size(), kRounds)];
}

inline bool is_captured(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

}  // namespace gptkernels::cuda
