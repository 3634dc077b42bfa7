// Vectors of up to 16 bytes: how rows are loaded, converted and stored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "../dtype.h"
#include "ptx.cuh"

namespace fusedops::cuda {

// The type that sums and formulas are in.
template <class T>
struct Acc {
  using type = float;
};
template <>
struct Acc<double> {
  using type = double;
};
template <class T>
using acc_of = typename Acc<T>::type;

template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = unsigned int;
};

template <class T, int kN>
struct alignas(sizeof(T) * kN) Vec {
  static_assert(sizeof(T) * kN <= 16, "one access moves at most 16 bytes");
  using Raw = typename Word<sizeof(T) * kN>::type;
  T v[kN];
};

// Elements that one thread handles together, so that neither side needs more than 16 bytes.
template <class A, class B>
constexpr int vec_width = 16 / static_cast<int>(sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));

// ---- element conversions: through intrinsics, which hold under __CUDA_NO_*_CONVERSIONS__ ------------------------

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ inline void narrow(float x, float& y) { y = x; }
__device__ inline void narrow(double x, double& y) { y = x; }
__device__ inline void narrow(float x, __half& y) { y = __float2half_rn(x); }
__device__ inline void narrow(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

template <class T, int kN>
__device__ inline void narrow(const acc_of<T> (&x)[kN], Vec<T, kN>& y) {
#pragma unroll
  for (int j = 0; j < kN; ++j) narrow(x[j], y.v[j]);
}

// ---- aligned accesses -------------------------------------------------------------------------------------------

template <class V>
__device__ inline V load(const void* p) {
  const auto raw = *static_cast<const typename V::Raw*>(p);
  V v;
  memcpy(&v, &raw, sizeof v);
  return v;
}

// For data that this kernel reads once: first to leave the caches, which are for weights.
template <class V>
__device__ inline V load_once(const void* p) {
  const auto raw = __ldcs(static_cast<const typename V::Raw*>(p));
  V v;
  memcpy(&v, &raw, sizeof v);
  return v;
}

template <class V>
__device__ inline void store(void* p, const V& v) {
  typename V::Raw raw;
  memcpy(&raw, &v, sizeof v);
  *static_cast<typename V::Raw*>(p) = raw;
}

// ---- rows: kN elements from column `col` on, `left` = hidden - col of them in the row -------------------------------

// Calls f(0) .. f(kN - 1) while the index is in the row, without a test for each where all are.
template <int kN, class F>
__device__ inline void for_valid(int left, F&& f) {
  if (left >= kN) {
#pragma unroll
    for (int j = 0; j < kN; ++j) f(j);
  } else {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (j < left) f(j);
    }
  }
}

// Zero past the row's end. `aligned`: every vector of the row is whole and aligned.
template <class T, int kN>
__device__ inline Vec<T, kN> load_row(const T* row, int col, int left, bool aligned) {
  Vec<T, kN> v;
  if (aligned && left > 0) return load_once<Vec<T, kN>>(row + col);
  memset(&v, 0, sizeof v);
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (j < left) v.v[j] = row[col + j];
  }
  return v;
}

template <class T, int kN>
__device__ inline void store_row(T* row, int col, int left, bool aligned, const acc_of<T> (&x)[kN]) {
  Vec<T, kN> v;
  narrow(x, v);
  if (aligned) {
    if (left > 0) {
      typename Vec<T, kN>::Raw raw;
      memcpy(&raw, &v, sizeof v);
      store_whole(row + col, raw);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (j < left) row[col + j] = v.v[j];
  }
}

// ---- dtypes known at run time only, the same for all threads: parameters, and rows of rare mixes ------------------

__device__ inline double load_element(const void* p, DType dtype, int64_t at, double) {
  return static_cast<const double*>(p)[at];
}
__device__ inline float load_element(const void* p, DType dtype, int64_t at, float) {
  if (dtype == DType::f32) return static_cast<const float*>(p)[at];
  if (dtype == DType::bf16) return widen(static_cast<const __nv_bfloat16*>(p)[at]);
  return widen(static_cast<const __half*>(p)[at]);
}

__device__ inline void store_element(void* p, DType dtype, int64_t at, double x) { static_cast<double*>(p)[at] = x; }
__device__ inline void store_element(void* p, DType dtype, int64_t at, float x) {
  if (dtype == DType::f32) static_cast<float*>(p)[at] = x;
  if (dtype == DType::bf16) narrow(x, static_cast<__nv_bfloat16*>(p)[at]);
  if (dtype == DType::f16) narrow(x, static_cast<__half*>(p)[at]);
}

template <class T, int kN, class acc_t>
__device__ inline void load_param_as(const void* p, int col, acc_t (&out)[kN]) {
  constexpr int kPart = kN * sizeof(T) > 16 ? 16 / sizeof(T) : kN;
#pragma unroll
  for (int part = 0; part < kN / kPart; ++part) {
    const auto v = load<Vec<T, kPart>>(static_cast<const T*>(p) + col + part * kPart);
#pragma unroll
    for (int j = 0; j < kPart; ++j) out[part * kPart + j] = widen(v.v[j]);
  }
}

// kN values of a parameter or of a row as acc_t; zero past the end.
template <int kN>
__device__ inline void load_param(const void* p, DType dtype, int col, int left, bool aligned, float (&out)[kN]) {
  if (aligned && left > 0) {
    if (dtype == DType::f32) return load_param_as<float>(p, col, out);
    if (dtype == DType::bf16) return load_param_as<__nv_bfloat16>(p, col, out);
    return load_param_as<__half>(p, col, out);
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) out[j] = j < left ? load_element(p, dtype, col + j, 0.0f) : 0.0f;
}
template <int kN>
__device__ inline void load_param(const void* p, DType, int col, int left, bool aligned, double (&out)[kN]) {
  if (aligned && left > 0) return load_param_as<double>(p, col, out);
#pragma unroll
  for (int j = 0; j < kN; ++j) out[j] = j < left ? static_cast<const double*>(p)[col + j] : 0.0;
}

// Rounds kN values to T, stores them from element `at` on, and leaves what was stored.
template <class T, int kN, class acc_t>
__device__ inline void store_rounded_as(void* p, int64_t at, int left, bool aligned, acc_t (&x)[kN]) {
  constexpr int kPart = kN * sizeof(T) > 16 ? 16 / sizeof(T) : kN;
  T* out = static_cast<T*>(p) + at;
#pragma unroll
  for (int part = 0; part < kN; part += kPart) {
    Vec<T, kPart> v;
#pragma unroll
    for (int j = 0; j < kPart; ++j) narrow(x[part + j], v.v[j]);
#pragma unroll
    for (int j = 0; j < kPart; ++j) x[part + j] = widen(v.v[j]);
    if (aligned) {
      if (left > 0) {
        typename Vec<T, kPart>::Raw raw;
        memcpy(&raw, &v, sizeof v);
        store_whole(out + part, raw);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        if (part + j < left) out[part + j] = v.v[j];
      }
    }
  }
}
template <int kN>
__device__ inline void store_rounded(void* p, DType dtype, int64_t at, int left, bool aligned, float (&x)[kN]) {
  if (dtype == DType::f32) return store_rounded_as<float>(p, at, left, aligned, x);
  if (dtype == DType::bf16) return store_rounded_as<__nv_bfloat16>(p, at, left, aligned, x);
  store_rounded_as<__half>(p, at, left, aligned, x);
}
template <int kN>
__device__ inline void store_rounded(void* p, DType, int64_t at, int left, bool aligned, double (&x)[kN]) {
  store_rounded_as<double>(p, at, left, aligned, x);
}

// The row that starts at element `at` of a tensor.
__device__ inline const void* row_at(const void* p, DType dtype, int64_t at) {
  return static_cast<const char*>(p) + at * size_of(dtype);
}

}  // namespace fusedops::cuda
