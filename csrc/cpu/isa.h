// One binary for every x86-64 and aarch64 machine: a kernel body is written once as FUSEDOPS_ISA_INLINE and called
// from one thin function per instruction set, into which the compiler inlines and vectorises it. The choice is made
// at run time; nothing is compiled with a global -m flag, which would crash older machines at load.
#pragma once

namespace fusedops::cpu {

enum class Isa { base, avx2, avx512 };
constexpr int kBaseBytes = 16, kAvx2Bytes = 32, kAvx512Bytes = 64;  // of a vector register

Isa active_isa();

}  // namespace fusedops::cpu

#define FUSEDOPS_ISA_INLINE inline __attribute__((always_inline))
// Behind the parameters of a lambda that such a function calls more than once: the compiler may leave it to itself.
#define FUSEDOPS_ISA_LAMBDA __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__)
#define FUSEDOPS_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FUSEDOPS_TARGET_AVX512 \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
