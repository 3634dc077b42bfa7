// Vectors of 4 or 8 elements, and single elements, whose type may be known only at run time: branches on it are uniform
// in the block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "../dtype.h"
#include "vec.cuh"

namespace fusedops::cuda {

// kVec elements as loaded: loads are issued for all tensors before the first conversion waits for one of them.
template <int kVec>
struct Raw {
  uint32_t word[kVec];  // 16-bit elements fill the first half
};

// Neither loads nor stores are marked as first to leave the cache, though each byte is used once: marked, AdamW ran at
// 92 % of the copy, unmarked at 95 (fp32, GPT-2 124M; H200).
template <int kVec>
__device__ __forceinline__ Raw<kVec> load_raw(const void* base, int64_t i, DType dtype) {
  static_assert(kVec == 4 || kVec == 8);
  Raw<kVec> raw;
  uint4 q;
  if (kVec == 8) {  // 16-bit only
    load_in_place(q, static_cast<const uint16_t*>(base) + i);
    raw.word[0] = q.x, raw.word[1] = q.y, raw.word[2] = q.z, raw.word[3] = q.w;
  } else if (dtype == DType::f32) {
    load_in_place(q, static_cast<const uint32_t*>(base) + i);
    raw.word[0] = q.x, raw.word[1] = q.y, raw.word[2] = q.z, raw.word[3] = q.w;
  } else {
    uint2 d;
    load_in_place(d, static_cast<const uint16_t*>(base) + i);
    raw.word[0] = d.x, raw.word[1] = d.y;
  }
  return raw;
}

template <int kVec>
__device__ __forceinline__ void store_raw(void* base, int64_t i, DType dtype, const Raw<kVec>& raw) {
  if (kVec == 8) {
    store_whole(static_cast<uint16_t*>(base) + i, make_uint4(raw.word[0], raw.word[1], raw.word[2], raw.word[3]));
  } else if (dtype == DType::f32) {
    store_whole(static_cast<uint32_t*>(base) + i, make_uint4(raw.word[0], raw.word[1], raw.word[2], raw.word[3]));
  } else {
    store_whole(static_cast<uint16_t*>(base) + i, make_uint2(raw.word[0], raw.word[1]));
  }
}

template <int kVec>
__device__ __forceinline__ void unpack(float (&out)[kVec], const Raw<kVec>& raw, DType dtype) {
  if (kVec == 4 && dtype == DType::f32) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) out[k] = bit_cast<float>(raw.word[k]);
  } else if (dtype == DType::bf16) {
#pragma unroll
    for (int k = 0; k < kVec / 2; ++k) {
      out[2 * k] = bit_cast<float>(raw.word[k] << 16);
      out[2 * k + 1] = bit_cast<float>(raw.word[k] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kVec / 2; ++k) {
      const __half2_raw pair = {uint16_t(raw.word[k]), uint16_t(raw.word[k] >> 16)};
      const float2 wide = __half22float2(__half2(pair));
      out[2 * k] = wide.x;
      out[2 * k + 1] = wide.y;
    }
  }
}

template <int kVec>
__device__ __forceinline__ Raw<kVec> pack(const float (&in)[kVec], DType dtype) {
  Raw<kVec> raw;
  if (kVec == 4 && dtype == DType::f32) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) raw.word[k] = bit_cast<uint32_t>(in[k]);
  } else if (dtype == DType::bf16) {
#pragma unroll
    for (int k = 0; k < kVec / 2; ++k) {
      const __nv_bfloat162_raw pair = __floats2bfloat162_rn(in[2 * k], in[2 * k + 1]);
      raw.word[k] = uint32_t(pair.x) | uint32_t(pair.y) << 16;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kVec / 2; ++k) {
      const __half2_raw pair = __floats2half2_rn(in[2 * k], in[2 * k + 1]);
      raw.word[k] = uint32_t(pair.x) | uint32_t(pair.y) << 16;
    }
  }
  return raw;
}

// One element of any type and alignment.
template <class acc_t>
__device__ __forceinline__ acc_t load_one(const void* base, int64_t i, DType dtype) {
  switch (dtype) {
    case DType::f64: return acc_t(static_cast<const double*>(base)[i]);
    case DType::f32: return acc_t(static_cast<const float*>(base)[i]);
    case DType::bf16: return acc_t(__bfloat162float(static_cast<const __nv_bfloat16*>(base)[i]));
    default: return acc_t(__half2float(static_cast<const __half*>(base)[i]));
  }
}

template <class acc_t>
__device__ __forceinline__ void store_one(void* base, int64_t i, DType dtype, acc_t value) {
  switch (dtype) {
    case DType::f64: static_cast<double*>(base)[i] = value; break;
    case DType::f32: static_cast<float*>(base)[i] = float(value); break;
    case DType::bf16: static_cast<__nv_bfloat16*>(base)[i] = __float2bfloat16_rn(float(value)); break;
    default: static_cast<__half*>(base)[i] = __float2half_rn(float(value));
  }
}

// Whether element i of base can be the start of a vector of kVec elements.
template <int kVec>
__device__ __forceinline__ bool is_aligned(const void* base, DType dtype) {
  return reinterpret_cast<uintptr_t>(base) % (kVec * size_of(dtype)) == 0;
}

}  // namespace fusedops::cuda
