// Adam and the passes over gradients on the CPU. A tensor is walked in tiles that fit the first-level cache: 16-bit
// tensors are widened into a tile of fp32, fp32 tensors are worked on in place, so the arithmetic is one loop for all
// dtypes, vectorised by the compiler once per instruction set.
#include <algorithm>
#include <cstring>

#include <c10/util/Half.h>

#include "../adam.h"
#include "../multi_tensor.h"
#include "isa.h"

namespace fusedops::cpu {

namespace {

using adam::Coefficients;
using adam::Rounding;
using adam::Scalars;
using adam::TensorRecord;

constexpr int64_t kTile = 512;

FUSEDOPS_ISA_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

FUSEDOPS_ISA_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FUSEDOPS_ISA_INLINE uint16_t bfloat_bits(float value) {  // round to nearest even
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

template <class acc_t>
FUSEDOPS_ISA_INLINE acc_t* widen(acc_t* tile, void* data, DType dtype, int64_t begin, int64_t n) {
  if (dtype == (sizeof(acc_t) == 8 ? DType::f64 : DType::f32)) return static_cast<acc_t*>(data) + begin;
  if (dtype == DType::f64) {
    const double* source = static_cast<const double*>(data) + begin;
    for (int64_t i = 0; i < n; ++i) tile[i] = static_cast<acc_t>(source[i]);
  } else if (dtype == DType::f32) {
    const float* source = static_cast<const float*>(data) + begin;
    for (int64_t i = 0; i < n; ++i) tile[i] = source[i];
  } else if (dtype == DType::bf16) {
    const uint16_t* source = static_cast<const uint16_t*>(data) + begin;
    for (int64_t i = 0; i < n; ++i) tile[i] = bits_to_float(uint32_t(source[i]) << 16);
  } else {
    const uint16_t* source = static_cast<const uint16_t*>(data) + begin;
    for (int64_t i = 0; i < n; ++i) tile[i] = c10::detail::fp16_ieee_to_fp32_value(source[i]);
  }
  return tile;
}

// Writes a tile back; one that is the tensor's own memory needs no writing.
template <class acc_t>
FUSEDOPS_ISA_INLINE void narrow(const acc_t* tile, void* data, DType dtype, int64_t begin, int64_t n) {
  if (dtype == DType::f64) {
    double* target = static_cast<double*>(data) + begin;
    if (static_cast<const void*>(target) == tile) return;
    for (int64_t i = 0; i < n; ++i) target[i] = tile[i];
  } else if (dtype == DType::f32) {
    float* target = static_cast<float*>(data) + begin;
    if (static_cast<const void*>(target) == tile) return;
    for (int64_t i = 0; i < n; ++i) target[i] = static_cast<float>(tile[i]);
  } else if (dtype == DType::bf16) {
    uint16_t* target = static_cast<uint16_t*>(data) + begin;
    for (int64_t i = 0; i < n; ++i) target[i] = bfloat_bits(static_cast<float>(tile[i]));
  } else {
    uint16_t* target = static_cast<uint16_t*>(data) + begin;
    for (int64_t i = 0; i < n; ++i) target[i] = c10::detail::fp16_ieee_from_fp32_value(static_cast<float>(tile[i]));
  }
}

template <class acc_t>
FUSEDOPS_ISA_INLINE void update_tile(const acc_t* __restrict__ g, acc_t* __restrict__ p, acc_t* __restrict__ m,
                                     acc_t* __restrict__ v, acc_t* __restrict__ top, const Coefficients<acc_t>& c,
                                     int64_t n) {
  if (top == nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      acc_t exp_avg = m[i], exp_avg_sq = v[i];
      adam::update_moments(g[i], p[i], exp_avg, exp_avg_sq, c);
      p[i] = adam::updated_param(p[i], exp_avg, exp_avg_sq, c);
      m[i] = exp_avg;
      v[i] = exp_avg_sq;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      acc_t exp_avg = m[i], exp_avg_sq = v[i];
      adam::update_moments(g[i], p[i], exp_avg, exp_avg_sq, c);
      top[i] = adam::maximum(top[i], exp_avg_sq);
      p[i] = adam::updated_param(p[i], exp_avg, top[i], c);
      m[i] = exp_avg;
      v[i] = exp_avg_sq;
    }
  }
}

// Rounds a tile to bf16 by the random bits of its elements; begin is a multiple of kOctet.
FUSEDOPS_ISA_INLINE void narrow_stochastic(const float* tile, uint16_t* target, const adam::Dither& dither,
                                           int64_t begin, int64_t n) {
  alignas(64) uint32_t bits[kTile];
  for (int64_t octet = 0; octet * adam::kOctet < n; ++octet) {
    const Words4 words = adam::octet_bits(dither, static_cast<uint64_t>(begin / adam::kOctet + octet));
    for (int k = 0; k < adam::kOctet; ++k) bits[octet * adam::kOctet + k] = adam::sixteen_bits(words, k);
  }
  for (int64_t i = 0; i < n; ++i) {
    target[begin + i] = static_cast<uint16_t>(adam::stochastic_bfloat(float_to_bits(tile[i]), bits[i]));
  }
}

// Writes the parameters of a tile of weights that have no master, and what kahan_sum keeps of their rounding.
template <class acc_t>
FUSEDOPS_ISA_INLINE void narrow_weights(acc_t* p, acc_t* scratch, const TensorRecord& r, const adam::Dither& dither,
                                        int64_t begin, int64_t n) {
  if constexpr (sizeof(acc_t) == sizeof(float)) {
    if (r.rounding == Rounding::kStochastic) {
      return narrow_stochastic(p, static_cast<uint16_t*>(r.param), dither, begin, n);
    }
  }
  narrow(p, r.param, r.param_dtype, begin, n);
  if (r.rounding != Rounding::kKahan) return;
  const acc_t* held = widen(scratch, r.param, r.param_dtype, begin, n);
  for (int64_t i = 0; i < n; ++i) p[i] = adam::lost(static_cast<float>(p[i]), static_cast<float>(held[i]));
  narrow(p, r.companion, r.param_dtype, begin, n);
}

template <class acc_t>
FUSEDOPS_ISA_INLINE void update_range(const TensorRecord& r, const void* grad, const Coefficients<acc_t>& coefficients,
                                      const adam::Dither& dither, int64_t begin, int64_t end) {
  alignas(64) acc_t tiles[6][kTile];
  const Coefficients<acc_t> c = coefficients;  // by value: the stores below cannot change it
  const bool master = r.rounding == Rounding::kMaster;
  for (; begin < end; begin += kTile) {
    const int64_t n = std::min(kTile, end - begin);
    const acc_t* g = widen(tiles[0], const_cast<void*>(grad), r.grad_dtype, begin, n);
    acc_t* p =
        master ? widen(tiles[1], r.companion, DType::f32, begin, n) : widen(tiles[1], r.param, r.param_dtype, begin, n);
    acc_t* m = widen(tiles[2], r.exp_avg, r.exp_avg_dtype, begin, n);
    acc_t* v = widen(tiles[3], r.exp_avg_sq, r.exp_avg_sq_dtype, begin, n);
    acc_t* top =
        r.max_exp_avg_sq != nullptr ? widen(tiles[4], r.max_exp_avg_sq, r.exp_avg_sq_dtype, begin, n) : nullptr;
    if (r.rounding == Rounding::kKahan) {
      const acc_t* rest = widen(tiles[5], r.companion, r.param_dtype, begin, n);
      for (int64_t i = 0; i < n; ++i) p[i] += rest[i];
    }
    update_tile(g, p, m, v, top, c, n);
    narrow(m, r.exp_avg, r.exp_avg_dtype, begin, n);
    narrow(v, r.exp_avg_sq, r.exp_avg_sq_dtype, begin, n);
    if (top != nullptr) narrow(top, r.max_exp_avg_sq, r.exp_avg_sq_dtype, begin, n);
    if (master) {
      narrow(p, r.companion, DType::f32, begin, n);
      narrow(p, r.param, r.param_dtype, begin, n);
    } else {
      narrow_weights(p, tiles[5], r, dither, begin, n);
    }
  }
}

FUSEDOPS_ISA_INLINE void update_body(const TensorRecord& r, const void* grad, const Scalars& s, int64_t begin,
                                     int64_t end) {
  if (r.param_dtype == DType::f64) {
    update_range<double>(r, grad, s.full, s.dither, begin, end);
  } else {
    update_range<float>(r, grad, s.single, s.dither, begin, end);
  }
}

template <class acc_t>
FUSEDOPS_ISA_INLINE double square_range(void* data, DType dtype, int64_t n, double factor, bool& nonfinite) {
  alignas(64) acc_t tile[kTile];
  const acc_t scale = static_cast<acc_t>(factor);
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kTile) {
    const int64_t count = std::min(kTile, n - begin);
    const acc_t* x = widen(tile, data, dtype, begin, count);
    acc_t sum = 0, poison = 0;
#pragma omp simd reduction(+ : sum, poison)
    for (int64_t i = 0; i < count; ++i) {
      const acc_t scaled = x[i] * scale;
      sum += scaled * scaled;
      poison += x[i] * acc_t(0);  // NaN from the first inf or NaN on
    }
    total += sum;
    nonfinite |= poison != poison;
  }
  return total;
}

FUSEDOPS_ISA_INLINE double square_body(const void* data, DType dtype, int64_t n, double factor, bool& nonfinite) {
  void* const mutable_data = const_cast<void*>(data);  // widen's tile may be the data itself, which is only read here
  return dtype == DType::f64 ? square_range<double>(mutable_data, dtype, n, factor, nonfinite)
                             : square_range<float>(mutable_data, dtype, n, factor, nonfinite);
}

template <class acc_t>
FUSEDOPS_ISA_INLINE void scale_range(void* data, DType dtype, int64_t n, acc_t factor) {
  alignas(64) acc_t tile[kTile];
  for (int64_t begin = 0; begin < n; begin += kTile) {
    const int64_t count = std::min(kTile, n - begin);
    acc_t* x = widen(tile, data, dtype, begin, count);
    for (int64_t i = 0; i < count; ++i) x[i] *= factor;
    narrow(x, data, dtype, begin, count);
  }
}

FUSEDOPS_ISA_INLINE void scale_body(void* data, DType dtype, int64_t n, double factor) {
  if (dtype == DType::f64) {
    scale_range<double>(data, dtype, n, factor);
  } else {
    scale_range<float>(data, dtype, n, static_cast<float>(factor));
  }
}

#ifdef FUSEDOPS_TARGET_AVX2
FUSEDOPS_TARGET_AVX2 void update_avx2(const TensorRecord& r, const void* grad, const Scalars& s, int64_t begin,
                                      int64_t end) {
  update_body(r, grad, s, begin, end);
}
FUSEDOPS_TARGET_AVX512 void update_avx512(const TensorRecord& r, const void* grad, const Scalars& s, int64_t begin,
                                          int64_t end) {
  update_body(r, grad, s, begin, end);
}
FUSEDOPS_TARGET_AVX2 double square_avx2(const void* data, DType dtype, int64_t n, double factor, bool& nonfinite) {
  return square_body(data, dtype, n, factor, nonfinite);
}
FUSEDOPS_TARGET_AVX512 double square_avx512(const void* data, DType dtype, int64_t n, double factor, bool& nonfinite) {
  return square_body(data, dtype, n, factor, nonfinite);
}
FUSEDOPS_TARGET_AVX2 void scale_avx2(void* data, DType dtype, int64_t n, double factor) {
  scale_body(data, dtype, n, factor);
}
FUSEDOPS_TARGET_AVX512 void scale_avx512(void* data, DType dtype, int64_t n, double factor) {
  scale_body(data, dtype, n, factor);
}
#endif

}  // namespace

void adam_update(const TensorRecord& record, const void* grad, const Scalars& scalars, int64_t begin, int64_t end) {
#ifdef FUSEDOPS_TARGET_AVX2
  if (active_isa() == Isa::avx512) return update_avx512(record, grad, scalars, begin, end);
  if (active_isa() == Isa::avx2) return update_avx2(record, grad, scalars, begin, end);
#endif
  update_body(record, grad, scalars, begin, end);
}

double sum_squares(const void* data, DType dtype, int64_t n, double factor, bool& nonfinite) {
#ifdef FUSEDOPS_TARGET_AVX2
  if (active_isa() == Isa::avx512) return square_avx512(data, dtype, n, factor, nonfinite);
  if (active_isa() == Isa::avx2) return square_avx2(data, dtype, n, factor, nonfinite);
#endif
  return square_body(data, dtype, n, factor, nonfinite);
}

void scale(void* data, DType dtype, int64_t n, double factor) {
#ifdef FUSEDOPS_TARGET_AVX2
  if (active_isa() == Isa::avx512) return scale_avx512(data, dtype, n, factor);
  if (active_isa() == Isa::avx2) return scale_avx2(data, dtype, n, factor);
#endif
  scale_body(data, dtype, n, factor);
}

}  // namespace fusedops::cpu
