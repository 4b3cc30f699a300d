// The fastest of several algorithms for a product, by timing. Host code.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "algorithm_cache.h"
#include "cuda/device.h"

namespace gptkernels::cuda {

// Times launches one by one, without waiting between them.
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

  // The milliseconds of each launch so far; empty if the device failed.
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

// The index of the fastest, by the median of its launches; times has those of the first round, then of the next. The
// first choice is kept unless another is clearly faster: the heuristic's order is the same at every run, and times are
// not.
inline size_t fastest(const std::vector<float>& times, size_t count, int rounds) {
  constexpr float kClearly = 0.98f;
  const auto median = [&](size_t choice) {
    std::vector<float> own;
    for (int round = 0; round < rounds; ++round) own.push_back(times[round * count + choice]);
    std::nth_element(own.begin(), own.begin() + own.size() / 2, own.end());
    return own[own.size() / 2];
  };
  size_t best = 0;
  for (size_t i = 1; i < count; ++i)
    if (median(i) < median(best)) best = i;
  return median(best) < kClearly * median(0) ? best : 0;
}

// The fastest of the choices. launch(choice) computes the product by it and says whether it could. The choices take
// turns, so that a change of the clock is fair to all. Those that cannot be launched are left out; without any there is
// no result. It waits for the device.
template <typename Launch>
std::optional<AlgorithmChoice> time_choices(std::vector<AlgorithmChoice> choices, Stream stream, const Launch& launch) {
  constexpr int kRounds = 8;
  std::erase_if(choices, [&](const AlgorithmChoice& choice) { return !launch(choice); });
  if (choices.empty()) return std::nullopt;
  Timer timer(stream);
  for (int round = 0; round < kRounds; ++round)
    for (const AlgorithmChoice& choice : choices) timer.time([&] { launch(choice); });
  const std::vector<float> times = timer.read();
  if (times.size() != kRounds * choices.size()) return choices[0];
  return choices[fastest(times, choices.size(), kRounds)];
}

// Whether launches are being captured, so that nothing can be timed.
inline bool is_captured(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

}  // namespace gptkernels::cuda
