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

template <class To, class From>
__device__ inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

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

// Words, not elements: of elements of 16 bits the compiler keeps each in a register of its own, and takes an
// instruction more to take it out of its word and to put it back.
template <class T, int kN>
struct alignas(sizeof(T) * kN) Vec {
  static_assert(sizeof(T) * kN <= 16, "one access moves at most 16 bytes");
  using Raw = typename Word<sizeof(T) * kN>::type;
  unsigned words[sizeof(T) * kN / 4];
};

// Elements that one thread handles together, so that neither side needs more than 16 bytes.
template <class A, class B>
constexpr int vec_width = 16 / static_cast<int>(sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));

// ---- element conversions: through intrinsics, which hold under __CUDA_NO_*_CONVERSIONS__ ------------------------

__device__ inline double widen(double x) { return x; }
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ inline void narrow(float x, __half& y) { y = __float2half_rn(x); }
__device__ inline void narrow(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

__device__ inline float half_of_word(unsigned word, bool high, __nv_bfloat16) {
  return bit_cast<float>(high ? word & 0xffff0000u : word << 16);
}
__device__ inline float half_of_word(unsigned word, bool high, __half) {
  const __half2 pair = bit_cast<__half2>(word);
  return high ? __high2float(pair) : __low2float(pair);
}

// Element j, in the type that is reckoned in.
template <class T, int kN>
__device__ inline acc_of<T> element(const Vec<T, kN>& v, int j) {
  if constexpr (sizeof(T) == 2) {
    return half_of_word(v.words[j / 2], j % 2, T());
  } else {
    acc_of<T> x;
    memcpy(&x, v.words + j * sizeof(T) / 4, sizeof x);
    return x;
  }
}

__device__ inline unsigned narrow_pair(float low, float high, __nv_bfloat16) {
  return bit_cast<unsigned>(__floats2bfloat162_rn(low, high));
}
__device__ inline unsigned narrow_pair(float low, float high, __half) {
  return bit_cast<unsigned>(__floats2half2_rn(low, high));
}

template <class T, int kN>
__device__ inline void widen(const Vec<T, kN>& v, acc_of<T> (&x)[kN]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] = element(v, j);
}

template <class T, int kN>
__device__ inline void add_widened(const Vec<T, kN>& v, acc_of<T> (&x)[kN]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] += element(v, j);
}

template <class T, int kN>
__device__ inline void narrow(const acc_of<T> (&x)[kN], Vec<T, kN>& v) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) v.words[j] = narrow_pair(x[2 * j], x[2 * j + 1], T());
  } else {
    memcpy(&v, x, sizeof v);
  }
}

// ---- aligned accesses -------------------------------------------------------------------------------------------

template <class V>
__device__ inline V load(const void* p) {
  return bit_cast<V>(*static_cast<const typename V::Raw*>(p));
}

// Of a row that is read once. Kept where it stands, so that all of a thread's loads are under way before the first is
// waited for. Marked as first to leave the cache, rows came slower: fp32 90 % of the copy at 4096 columns instead of
// 93, sums of bf16 88 instead of 92 (H200).
template <class V>
__device__ inline V load_row_vector(const void* p) {
  typename V::Raw raw;
  load_in_place(raw, p);
  return bit_cast<V>(raw);
}

template <class V>
__device__ inline void store(void* p, const V& v) {
  *static_cast<typename V::Raw*>(p) = bit_cast<typename V::Raw>(v);
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
  if (aligned && left > 0) return load_row_vector<Vec<T, kN>>(row + col);
  T elements[kN] = {};
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (j < left) elements[j] = row[col + j];
  }
  Vec<T, kN> v;
  memcpy(&v, elements, sizeof v);
  return v;
}

template <class T, int kN>
__device__ inline void store_row(T* row, int col, int left, bool aligned, const acc_of<T> (&x)[kN]) {
  Vec<T, kN> v;
  narrow(x, v);
  if (aligned) {
    if (left > 0) store_whole(row + col, bit_cast<typename Vec<T, kN>::Raw>(v));
    return;
  }
  T elements[kN];
  memcpy(elements, &v, sizeof v);
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (j < left) row[col + j] = elements[j];
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
    acc_of<T> x[kPart];
    widen(load<Vec<T, kPart>>(static_cast<const T*>(p) + col + part * kPart), x);
#pragma unroll
    for (int j = 0; j < kPart; ++j) out[part * kPart + j] = x[j];
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
    acc_t stored[kPart];
#pragma unroll
    for (int j = 0; j < kPart; ++j) stored[j] = x[part + j];
    narrow(stored, v);
    widen(v, stored);
#pragma unroll
    for (int j = 0; j < kPart; ++j) x[part + j] = stored[j];
    if (aligned) {
      if (left > 0) store_whole(out + part, bit_cast<typename Vec<T, kPart>::Raw>(v));
    } else {
      T elements[kPart];
      memcpy(elements, &v, sizeof v);
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        if (part + j < left) out[part + j] = elements[j];
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
