// What a CPU launcher is called with and answers: number types, the stream, the status.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

namespace gptkernels::cpu {

// bfloat16 is the upper half of a float32; storing rounds to nearest even and keeps NaN a NaN.
struct bfloat16 {
  uint16_t bits;

  bfloat16() = default;
  explicit bfloat16(float value) : bits(round(value)) {}
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

  static uint16_t round(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(value != value ? 0x7FC0u : rounded);
  }
};

// IEEE binary16 by integer and float32 arithmetic alone, without branches, so that loops of conversions
// vectorise on every compiler.
struct float16 {
  uint16_t bits;

  float16() = default;
  explicit float16(float value) : bits(round(value)) {}
  operator float() const {
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7FFFu) << 13;
    // Multiplying by 2^112 restores the exponent of normal and denormal values alike.
    const float finite = std::bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t special = magnitude | 0x7F800000u;
    const uint32_t u = magnitude >= (31u << 23) ? special : std::bit_cast<uint32_t>(finite);
    return std::bit_cast<float>(u | (static_cast<uint32_t>(bits & 0x8000u) << 16));
  }

  static uint16_t round(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    // Normal results: move the exponent from bias 127 to bias 15 and round the 13 bits that fall off.
    const uint32_t normal = (magnitude - (112u << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Denormal results: adding 0.5 makes the float32 adder round at 2^-24, the last bit of a denormal.
    const uint32_t denormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
    const uint32_t finite = magnitude < (113u << 23) ? denormal : normal;
    const uint32_t overflow = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    return static_cast<uint16_t>(((u >> 16) & 0x8000u) | (magnitude >= 0x477FF000u ? overflow : finite));
  }
};

// Rounds into place. Loops store through this, never by assigning a bfloat16 or float16 made on the side: a struct on
// the stack keeps the compiler from vectorising.
inline void store(double& to, double value) {
  to = value;
}
inline void store(float& to, float value) {
  to = value;
}
inline void store(bfloat16& to, float value) {
  to.bits = bfloat16::round(value);
}
inline void store(float16& to, float value) {
  to.bits = float16::round(value);
}

// Sums and statistics are float32, float64 for float64.
template <typename T>
struct accumulate {
  using type = float;
};
template <>
struct accumulate<double> {
  using type = double;
};
template <typename T>
using accumulate_t = typename accumulate<T>::type;

// Empty when the launch went well, otherwise a sentence for the user.
struct Status {
  std::string error;
  bool ok() const { return error.empty(); }
};

// The thread pool that a launcher works on: calls body(begin, end, context) over disjoint ranges that cover
// [begin, end), each at least `grain` long but for the last, and returns when all are done.
struct Stream {
  using Body = void (*)(int64_t begin, int64_t end, void* context);
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);
};

// For programs without a pool.
inline Stream serial_stream() {
  return {[](int64_t begin, int64_t end, int64_t, Stream::Body body, void* context) {
    if (begin < end) body(begin, end, context);
  }};
}

// fn(begin, end) over [0, n) on the stream's threads; `cost` is roughly the elements that one index touches.
template <typename Fn>
void parallel_for(Stream stream, int64_t n, int64_t cost, const Fn& fn) {
  constexpr int64_t kElementsWorthAThread = 16384;
  const int64_t grain = kElementsWorthAThread / (cost > 0 ? cost : 1) + 1;
  stream.parallel_for(
      0, n, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<const Fn*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

}  // namespace gptkernels::cpu
