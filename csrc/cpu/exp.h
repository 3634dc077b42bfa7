// exp of vectors, for code of any instruction set. The error is below 1.3 ulp of the result; subnormal results, inf and
// NaN are as the C library's.
//
// Source: W. J. Cody, W. Waite, "Software Manual for the Elementary Functions" (1980): x = n·ln 2 + r, the Taylor
// series of exp r (|r| ≤ ln 2 / 2), times 2^n.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace fusedops::cpu {

template <class E>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  using Int = int32_t;
  static constexpr int kMantissa = 23, kBias = 127, kTerms = 8;
  static constexpr float kRound = 0x1.8p23f, kLow = -150, kHigh = 89, kLn2High = 0x1.62ep-1f, kLn2Low = 0x1.0bfbe8p-15f;
};
template <>
struct ExpConstants<double> {
  using Int = int64_t;
  static constexpr int kMantissa = 52, kBias = 1023, kTerms = 14;
  static constexpr double kRound = 0x1.8p52, kLow = -1080, kHigh = 710, kLn2High = 0x1.62e42feep-1,
                          kLn2Low = 0x1.a39ef35793c76p-33;
};

template <class V>
FUSEDOPS_ISA_INLINE V exp(const V& value) {
  using E = Element<V>;
  using C = ExpConstants<E>;
  using Ints = Vec<typename C::Int, kLanesOf<V>>;
  V x = value < C::kLow ? V{} + C::kLow : value;  // a NaN is neither
  x = x > C::kHigh ? V{} + C::kHigh : x;
  const V shifted = x * static_cast<E>(1.4426950408889634) + C::kRound;  // to an integer, in the last places
  const V n = shifted - C::kRound;
  const V r = (x - n * C::kLn2High) - n * C::kLn2Low;
  E factorial = 1;
  for (int k = 2; k < C::kTerms; ++k) factorial *= k;
  V sum = V{} + 1 / factorial;
#pragma GCC unroll 16
  for (int k = C::kTerms - 2; k >= 0; --k) {
    factorial /= k + 1;
    sum = sum * r + 1 / factorial;
  }
  // 2^n in two factors: n may be beyond the exponents of normal numbers.
  const Ints whole = bits_as<Ints>(shifted) - bits_as<Ints>(V{} + C::kRound);
  const Ints half = whole >> 1;
  const auto power = [](const Ints& e) FUSEDOPS_ISA_LAMBDA { return bits_as<V>((e + C::kBias) << C::kMantissa); };
  return sum * power(half) * power(whole - half);
}

}  // namespace fusedops::cpu
