// From a run-time value to a compile-time one: the only place where a dtype or a flag becomes a template argument.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../dtype.h"

namespace fusedops::cuda {

template <class T>
struct Type {
  using type = T;
};

template <bool kValue>
struct Bool {
  static constexpr bool value = kValue;
};

template <int kValue>
struct Int {
  static constexpr int value = kValue;
};

template <class F>
auto with_bool(bool value, F&& f) {
  return value ? f(Bool<true>()) : f(Bool<false>());
}

// fp32, fp16 or bf16
template <class F>
auto with_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f16: return f(Type<__half>());
    case DType::bf16: return f(Type<__nv_bfloat16>());
    default: return f(Type<float>());
  }
}

// Two dtypes that mix freely, except that fp64 meets only fp64.
template <class F>
auto with_float_pair(DType a, DType b, F&& f) {
  if (a == DType::f64) return f(Type<double>(), Type<double>());
  return with_float(a, [&](auto a_type) { return with_float(b, [&](auto b_type) { return f(a_type, b_type); }); });
}

}  // namespace fusedops::cuda
