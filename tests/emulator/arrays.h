// Arrays of a run-time dtype for tests of emulated kernels.
#pragma once

#include <cmath>
#include <memory>
#include <random>

#include "dtype.h"

namespace {

using fusedops::DType;

std::mt19937 generator(0);

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f64: return std::ldexp(1.0, -53);
    case DType::f32: return std::ldexp(1.0, -24);
    case DType::f16: return std::ldexp(1.0, -11);
    default: return std::ldexp(1.0, -8);
  }
}

// Elements of a run-time dtype. `skew` elements before the first make the pointer a misaligned one; the allocation ends
// with the last element, so that AddressSanitizer sees any access beyond.
struct Array {
  DType dtype;
  int64_t skew;
  std::unique_ptr<unsigned char[]> bytes;

  Array(DType dtype, int64_t n, int64_t skew = 0)
      : dtype(dtype), skew(skew), bytes(new unsigned char[(n + skew) * size_of(dtype)]) {
    memset(bytes.get(), 0xff, (n + skew) * size_of(dtype));  // NaN: unwritten elements fail
  }
  void* data() { return bytes.get() + skew * size_of(dtype); }
  double get(int64_t i) const {
    const void* p = bytes.get() + (skew + i) * size_of(dtype);
    switch (dtype) {
      case DType::f64: return *static_cast<const double*>(p);
      case DType::f32: return *static_cast<const float*>(p);
      case DType::f16: return __half2float(*static_cast<const __half*>(p));
      default: return __bfloat162float(*static_cast<const __nv_bfloat16*>(p));
    }
  }
  void set(int64_t i, double x) {
    void* p = bytes.get() + (skew + i) * size_of(dtype);
    switch (dtype) {
      case DType::f64: *static_cast<double*>(p) = x; break;
      case DType::f32: *static_cast<float*>(p) = static_cast<float>(x); break;
      case DType::f16: *static_cast<__half*>(p) = __float2half_rn(static_cast<float>(x)); break;
      default: *static_cast<__nv_bfloat16*>(p) = __float2bfloat16_rn(static_cast<float>(x));
    }
  }
  void fill(int64_t n) {
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < n; ++i) set(i, normal(generator));
  }
};

}  // namespace
