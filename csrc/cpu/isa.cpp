#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "../build_info.h"

namespace fusedops::cpu {

namespace {

// What the user caps PyTorch's own kernels at, with PyTorch's variable and names.
Isa most_allowed() {
  const char* cap = std::getenv("ATEN_CPU_CAPABILITY");
  if (cap == nullptr) return Isa::avx512;
  if (std::string_view(cap) == "default") return Isa::base;
  return std::string_view(cap) == "avx2" ? Isa::avx2 : Isa::avx512;
}

Isa detect() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) return Isa::avx512;
  if (avx2) return Isa::avx2;
#endif
  return Isa::base;
}

}  // namespace

Isa active_isa() {
  static const Isa isa = std::min(detect(), most_allowed());
  return isa;
}

const char* isa() {
  switch (active_isa()) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    default: return "default";
  }
}

}  // namespace fusedops::cpu
