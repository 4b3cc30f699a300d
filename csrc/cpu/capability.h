#pragma once

#include <cstdlib>
#include <string>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GPTKERNELS_X86 1
#endif

namespace gptkernels::cpu {

// In ascending order: a processor with a capability also has those before it. kDefault is the compiler's default
// target.
enum class Capability { kDefault, kAvx2, kAvx512 };

inline const char* name(Capability capability) {
  switch (capability) {
    case Capability::kAvx512: return "avx512";
    case Capability::kAvx2: return "avx2";
    default: return "default";
  }
}

inline Capability processor_capability() {
#ifdef GPTKERNELS_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Capability::kDefault;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Capability::kAvx512 : Capability::kAvx2;
#else
  return Capability::kDefault;
#endif
}

struct CapabilityChoice {
  Capability capability;
  std::string error;  // or empty
};

inline CapabilityChoice choose_capability(const char* requested, Capability most) {
  if (requested == nullptr || *requested == '\0') return {most, {}};
  for (const Capability capability : {Capability::kDefault, Capability::kAvx2, Capability::kAvx512}) {
    if (std::string(requested) != name(capability)) continue;
    if (capability <= most) return {capability, {}};
    return {most, std::string("GPTKERNELS_CPU_CAPABILITY asks for ") + requested + ", but this processor has only " +
                      name(most)};
  }
  return {most, std::string("GPTKERNELS_CPU_CAPABILITY must be default, avx2 or avx512, got ") + requested};
}

inline const CapabilityChoice& capability_choice() {
  static const CapabilityChoice choice =
      choose_capability(std::getenv("GPTKERNELS_CPU_CAPABILITY"), processor_capability());
  return choice;
}

}  // namespace gptkernels::cpu
