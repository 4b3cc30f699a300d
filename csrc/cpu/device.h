#pragma once

#include <bit>
#include <cstdint>
#include <string>

namespace gptkernels::cpu {

// Conversion from float rounds to nearest even, and NaN stays NaN.
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

// The conversions have no branches, so that the compiler can vectorize loops of them.
struct float16 {
  uint16_t bits;

  float16() = default;
  explicit float16(float value) : bits(round(value)) {}
  operator float() const {
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7FFFu) << 13;
    // Multiplying by 2^112 gives normal and denormal values the right exponent.
    const float finite = std::bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t special = magnitude | 0x7F800000u;
    const uint32_t u = magnitude >= (31u << 23) ? special : std::bit_cast<uint32_t>(finite);
    return std::bit_cast<float>(u | (static_cast<uint32_t>(bits & 0x8000u) << 16));
  }

  static uint16_t round(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    // Changes the exponent's bias from 127 to 15, and rounds away the low 13 bits of the significand.
    const uint32_t normal = (magnitude - (112u << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    // For denormal results: the last bit of 0.5 in float32 is 2^-24, as is that of a float16 denormal, so adding 0.5
    // rounds to a multiple of 2^-24.
    const uint32_t denormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
    const uint32_t finite = magnitude < (113u << 23) ? denormal : normal;
    const uint32_t overflow = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    return static_cast<uint16_t>(((u >> 16) & 0x8000u) | (magnitude >= 0x477FF000u ? overflow : finite));
  }
};

// Loops use store(), because a temporary bfloat16 or float16 on the stack would prevent vectorization.
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

struct Status {
  std::string error;
  bool ok() const { return error.empty(); }
};

// A thread pool. parallel_for calls body(begin, end, context) on disjoint ranges that cover [begin, end), and returns
// when all calls have returned. There are at most (end - begin) / grain ranges, rounded up.
struct Stream {
  using Body = void (*)(int64_t begin, int64_t end, void* context);
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);
};

inline Stream serial_stream() {
  return {[](int64_t begin, int64_t end, int64_t, Stream::Body body, void* context) {
    if (begin < end) body(begin, end, context);
  }};
}

// `cost` is the approximate number of elements read per index.
template <typename Fn>
void parallel_for(Stream stream, int64_t n, int64_t cost, const Fn& fn) {
  constexpr int64_t kMinElementsPerThread = 16384;
  const int64_t grain = kMinElementsPerThread / (cost > 0 ? cost : 1) + 1;
  stream.parallel_for(
      0, n, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<const Fn*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

}  // namespace gptkernels::cpu
