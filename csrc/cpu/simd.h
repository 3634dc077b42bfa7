// Vectors in the compilers' own vector types, as wide as the registers of the instruction set of the function they are
// inlined into (isa.h): wider ones would live in memory. One source, which becomes AVX-512, AVX2, SSE2 or NEON code.
// Conversions of 16-bit types are integer arithmetic, so that they vectorise everywhere and need no compiler that knows
// those types.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../dtype.h"
#include "isa.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // how vectors are passed: all functions here are inlined

namespace fusedops::cpu {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// What sums and formulas on elements of T are in.
template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class E, int kLanes>
struct VecOf {
  typedef E type __attribute__((vector_size(kLanes * sizeof(E))));
};
template <class E, int kLanes>
using Vec = typename VecOf<E, kLanes>::type;
template <class V>
using Element = std::decay_t<decltype(V()[0])>;
template <class V>
constexpr int kLanesOf = sizeof(V) / sizeof(Element<V>);

template <class To, class From>
FUSEDOPS_ISA_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// The bits of 16-bit elements, and the same many lanes of 32.
template <class V>
using Bits16 = Vec<uint16_t, kLanesOf<V>>;
template <class V>
using Bits32 = Vec<uint32_t, kLanesOf<V>>;

template <class V>
FUSEDOPS_ISA_INLINE V widen(const Bits16<V>& bits, BFloat16) {
  return bits_as<V>(__builtin_convertvector(bits, Bits32<V>) << 16);
}

template <class V>
FUSEDOPS_ISA_INLINE V widen(const Bits16<V>& bits, Half) {
  using U = Bits32<V>;
  const U h = __builtin_convertvector(bits, U);
  const U sign = (h & 0x8000u) << 16;
  // Exponent and mantissa in their places read as 2^-112 of the value, subnormals included.
  U u = bits_as<U>(bits_as<V>((h & 0x7fffu) << 13) * 0x1p112f);
  u |= ((h & 0x7c00u) == 0x7c00u) ? U{} + 0x7f800000u : U{};
  return bits_as<V>(u | sign);
}

template <class V>
FUSEDOPS_ISA_INLINE Bits16<V> narrow(const V& x, BFloat16) {
  using U = Bits32<V>;
  const U u = bits_as<U>(x);
  const U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // to nearest, ties to even
  const U quiet = (u >> 16) | 0x40u;
  return __builtin_convertvector(x == x ? rounded : quiet, Bits16<V>);  // NaN alone is not itself
}

template <class V>
FUSEDOPS_ISA_INLINE Bits16<V> narrow(const V& x, Half) {
  using U = Bits32<V>;
  const U u = bits_as<U>(x);
  const U sign = (u >> 16) & 0x8000u;
  const U a = u & 0x7fffffffu;
  const U normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;  // to nearest, ties to even
  // Below 2^-14 the adder rounds: at 0.5 the last place of a float is that of a half's subnormals.
  const U tiny = bits_as<U>(bits_as<V>(a) + 0.5f) - 0x3f000000u;
  U h = a < (113u << 23) ? tiny : normal;
  h = a >= 0x477ff000u ? U{} + 0x7c00u : h;  // 65520 and above round to infinity
  h = a > 0x7f800000u ? U{} + 0x7e00u : h;
  return __builtin_convertvector(h | sign, Bits16<V>);
}

template <class V, class T>
FUSEDOPS_ISA_INLINE V load(const T* p) {
  if constexpr (std::is_same_v<T, Element<V>>) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
  } else {
    Bits16<V> bits;
    memcpy(&bits, p, sizeof bits);
    return widen<V>(bits, T());
  }
}
template <class V, class T>
FUSEDOPS_ISA_INLINE void store(T* p, const V& x) {
  if constexpr (std::is_same_v<T, Element<V>>) {
    memcpy(p, &x, sizeof x);
  } else {
    const Bits16<V> bits = narrow(x, T());
    memcpy(p, &bits, sizeof bits);
  }
}

// Copies n < kLanes elements in steps of known size, without a call.
template <int kLanes, class T>
FUSEDOPS_ISA_INLINE void copy_part(T* to, const T* from, int64_t n) {
  if constexpr (kLanes > 1) {
    constexpr int kStep = kLanes / 2;
    if (n & kStep) {
      memcpy(to, from, kStep * sizeof(T));
      to += kStep;
      from += kStep;
    }
    copy_part<kStep>(to, from, n);
  }
}

// The first n lanes only; zero beyond them.
template <class V, class T>
FUSEDOPS_ISA_INLINE V load_part(const T* p, int64_t n) {
  T part[kLanesOf<V>] = {};
  copy_part<kLanesOf<V>>(part, p, n);
  return load<V>(part);
}
template <class V, class T>
FUSEDOPS_ISA_INLINE void store_part(T* p, int64_t n, const V& x) {
  T part[kLanesOf<V>];
  store(part, x);
  copy_part<kLanesOf<V>>(p, part, n);
}

// Sum of the lanes, in double; half to half, for a chain of additions lane by lane would take as long as a short row.
template <class V>
FUSEDOPS_ISA_INLINE double sum_lanes(const V& v) {
  constexpr int kLanes = kLanesOf<V>;
  if constexpr (kLanes == 2) {
    return v[0] + v[1];
  } else if constexpr (kLanes == 4) {
    return (static_cast<double>(v[0]) + v[2]) + (static_cast<double>(v[1]) + v[3]);
  } else {
    using Wide = Vec<double, kLanes / 2>;
    Vec<Element<V>, kLanes / 2> halves[2];
    memcpy(halves, &v, sizeof v);
    return sum_lanes(__builtin_convertvector(halves[0], Wide) + __builtin_convertvector(halves[1], Wide));
  }
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
