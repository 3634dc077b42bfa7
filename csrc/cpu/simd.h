// Vectors of 64 bytes in the compilers' own vector types: one source, which becomes AVX-512, AVX2, SSE2 or NEON code by
// the instruction set of the function it is inlined into (isa.h). Conversions of 16-bit types are integer arithmetic,
// so that they vectorise everywhere and need no compiler that knows those types.
#pragma once

#include <cstdint>
#include <cstring>

#include "../dtype.h"
#include "isa.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // how vectors are passed: all functions here are inlined

namespace fusedops::cpu {

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));
using f64x8 = double __attribute__((vector_size(64)));
using f64x16 = double __attribute__((vector_size(128)));

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// What sums and formulas on elements of T are in: acc_t, and a vector of kLanes of them.
template <class T>
struct Lanes {
  using acc_t = float;
  using V = f32x16;
  static constexpr int kLanes = 16;
};
template <>
struct Lanes<double> {
  using acc_t = double;
  using V = f64x8;
  static constexpr int kLanes = 8;
};

template <class To, class From>
FUSEDOPS_ISA_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

FUSEDOPS_ISA_INLINE f32x16 widen(const u16x16& bits, BFloat16) {
  return bits_as<f32x16>(__builtin_convertvector(bits, u32x16) << 16);
}

FUSEDOPS_ISA_INLINE f32x16 widen(const u16x16& bits, Half) {
  const u32x16 h = __builtin_convertvector(bits, u32x16);
  const u32x16 sign = (h & 0x8000u) << 16;
  // Exponent and mantissa in their places read as 2^-112 of the value, subnormals included.
  u32x16 u = bits_as<u32x16>(bits_as<f32x16>((h & 0x7fffu) << 13) * 0x1p112f);
  u |= ((h & 0x7c00u) == 0x7c00u) ? u32x16{} + 0x7f800000u : u32x16{};
  return bits_as<f32x16>(u | sign);
}

FUSEDOPS_ISA_INLINE u16x16 narrow(const f32x16& x, BFloat16) {
  const u32x16 u = bits_as<u32x16>(x);
  const u32x16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // to nearest, ties to even
  const u32x16 quiet = (u >> 16) | 0x40u;
  return __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, u16x16);
}

FUSEDOPS_ISA_INLINE u16x16 narrow(const f32x16& x, Half) {
  const u32x16 u = bits_as<u32x16>(x);
  const u32x16 sign = (u >> 16) & 0x8000u;
  const u32x16 a = u & 0x7fffffffu;
  const u32x16 normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;  // to nearest, ties to even
  // Below 2^-14 the adder rounds: at 0.5 the last place of a float is that of a half's subnormals.
  const u32x16 tiny = bits_as<u32x16>(bits_as<f32x16>(a) + 0.5f) - 0x3f000000u;
  u32x16 h = a < (113u << 23) ? tiny : normal;
  h = a >= 0x477ff000u ? u32x16{} + 0x7c00u : h;  // 65520 and above round to infinity
  h = a > 0x7f800000u ? u32x16{} + 0x7e00u : h;
  return __builtin_convertvector(h | sign, u16x16);
}

template <class T>
FUSEDOPS_ISA_INLINE f32x16 load(const T* p) {
  u16x16 bits;
  memcpy(&bits, p, sizeof bits);
  return widen(bits, T());
}
FUSEDOPS_ISA_INLINE f32x16 load(const float* p) {
  f32x16 v;
  memcpy(&v, p, sizeof v);
  return v;
}
FUSEDOPS_ISA_INLINE f64x8 load(const double* p) {
  f64x8 v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
FUSEDOPS_ISA_INLINE void store(T* p, const f32x16& x) {
  const u16x16 bits = narrow(x, T());
  memcpy(p, &bits, sizeof bits);
}
FUSEDOPS_ISA_INLINE void store(float* p, const f32x16& x) { memcpy(p, &x, sizeof x); }
FUSEDOPS_ISA_INLINE void store(double* p, const f64x8& x) { memcpy(p, &x, sizeof x); }

// The first n lanes only; zero beyond them.
template <class T>
FUSEDOPS_ISA_INLINE typename Lanes<T>::V load_part(const T* p, int64_t n) {
  T part[Lanes<T>::kLanes] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}
template <class T>
FUSEDOPS_ISA_INLINE void store_part(T* p, int64_t n, const typename Lanes<T>::V& x) {
  T part[Lanes<T>::kLanes];
  store(part, x);
  memcpy(p, part, n * sizeof(T));
}

// Sum of the lanes, in double.
FUSEDOPS_ISA_INLINE double sum_lanes(const f32x16& v) {
  double sum = 0;
  for (int i = 0; i < 16; ++i) sum += v[i];
  return sum;
}
FUSEDOPS_ISA_INLINE double sum_lanes(const f64x8& v) {
  double sum = 0;
  for (int i = 0; i < 8; ++i) sum += v[i];
  return sum;
}

// f(type) with the element type of a run-time dtype.
template <class F>
FUSEDOPS_ISA_INLINE auto with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f16: return f(Half());
    case DType::bf16: return f(BFloat16());
    case DType::f64: return f(double());
    default: return f(float());
  }
}

}  // namespace fusedops::cpu
