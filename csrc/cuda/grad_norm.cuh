// Passes over gradients: sum of squares with inf check (one read), and multiplication in place.
#pragma once

#include "../multi_tensor.h"
#include "raw.cuh"
#include "reduce.cuh"

namespace fusedops::cuda {

// Sum over the block in a fixed order; the result is thread 0's.
template <int kThreads>
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[kThreads / kWarp];
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0.0;
  if (threadIdx.x == 0) {
    for (int w = 0; w < kThreads / kWarp; ++w) sum += warps[w];
  }
  return sum;
}

template <int kThreads, int kVec, int kUnroll>
__device__ __forceinline__ int64_t square_vectors(const char* data, DType dtype, int64_t count, float factor,
                                                  float& sum, float& poison) {
  constexpr int kStride = kThreads * kVec;
  const int64_t end = count - count % kVec;
  for (int64_t base = int64_t(threadIdx.x) * kVec; base < end; base += kUnroll * kStride) {
    Raw<kVec> raw[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kStride < end) raw[u] = load_raw<kVec>(data, base + u * kStride, dtype);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float x[kVec];
      unpack(x, raw[u], dtype);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        poison += x[k] * 0.0f;  // NaN from the first inf or NaN on
        const float scaled = x[k] * factor;
        sum += scaled * scaled;
      }
    }
  }
  return end;
}

template <int kThreads, class acc_t>
__device__ __forceinline__ void square_scalars(const char* data, DType dtype, int64_t begin, int64_t count,
                                               acc_t factor, acc_t& sum, acc_t& poison) {
  for (int64_t i = begin + threadIdx.x; i < count; i += kThreads) {
    const acc_t x = load_one<acc_t>(data, i, dtype);
    poison += x * acc_t(0);
    const acc_t scaled = x * factor;
    sum += scaled * scaled;
  }
}

template <int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads) sum_squares_kernel(const GradNormArgs args) {
  const Chunk chunk = args.chunks[blockIdx.x];
  const TensorSpan span = args.spans[chunk.tensor];
  const float scale = args.grad_scale != nullptr ? *args.grad_scale : 1.0f;
  const DType dtype = DType(span.dtype);
  const int64_t first = int64_t(chunk.index) * args.chunk_size;
  const int64_t left = int64_t(span.numel) - first;
  const int64_t count = left < args.chunk_size ? left : args.chunk_size;
  const char* data = static_cast<const char*>(span.data) + first * size_of(dtype);
  double total;
  bool nonfinite;
  if (dtype == DType::f64) {
    double sum = 0.0, poison = 0.0;
    square_scalars<kThreads, double>(data, dtype, 0, count, 1.0 / scale, sum, poison);
    total = sum;
    nonfinite = poison != poison;
  } else {
    const float factor = 1.0f / scale;
    float sum = 0.0f, poison = 0.0f;
    int64_t done = 0;
    if (dtype == DType::f32) {
      if (is_aligned<4>(data, dtype))
        done = square_vectors<kThreads, 4, kUnroll>(data, DType::f32, count, factor, sum, poison);
    } else if (is_aligned<8>(data, dtype)) {
      done = dtype == DType::bf16 ? square_vectors<kThreads, 8, kUnroll>(data, DType::bf16, count, factor, sum, poison)
                                  : square_vectors<kThreads, 8, kUnroll>(data, DType::f16, count, factor, sum, poison);
    }
    square_scalars<kThreads, float>(data, dtype, done, count, factor, sum, poison);
    total = sum;
    nonfinite = poison != poison;
  }
  if (nonfinite && args.found_inf != nullptr) *args.found_inf = 1.0f;  // every writer writes the same
  total = block_sum<kThreads>(total);
  if (threadIdx.x == 0) args.partials[blockIdx.x] = total;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) finish_norm_kernel(const GradNormArgs args) {
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < args.chunk_count; i += kThreads) sum += args.partials[i];
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) store_one<double>(args.norm, 0, args.norm_dtype, sqrt(sum));
}

template <int kThreads, int kVec, int kUnroll>
__device__ __forceinline__ int64_t scale_vectors(char* data, DType dtype, int64_t count, float factor) {
  constexpr int kStride = kThreads * kVec;
  const int64_t end = count - count % kVec;
  for (int64_t base = int64_t(threadIdx.x) * kVec; base < end; base += kUnroll * kStride) {
    Raw<kVec> raw[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kStride < end) raw[u] = load_raw<kVec>(data, base + u * kStride, dtype);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kStride < end) {
        float x[kVec];
        unpack(x, raw[u], dtype);
#pragma unroll
        for (int k = 0; k < kVec; ++k) x[k] *= factor;
        store_raw<kVec>(data, base + u * kStride, dtype, pack(x, dtype));
      }
    }
  }
  return end;
}

template <int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads) grad_scale_kernel(const GradScaleArgs args) {
  const double factor = load_one<double>(args.coef, 0, args.coef_dtype);
  if (factor == 1.0) return;
  const Chunk chunk = args.chunks[blockIdx.x];
  const TensorSpan span = args.spans[chunk.tensor];
  const DType dtype = DType(span.dtype);
  const int64_t first = int64_t(chunk.index) * args.chunk_size;
  const int64_t left = int64_t(span.numel) - first;
  const int64_t count = left < args.chunk_size ? left : args.chunk_size;
  char* data = static_cast<char*>(span.data) + first * size_of(dtype);
  int64_t done = 0;
  if (dtype == DType::f32) {
    if (is_aligned<4>(data, dtype)) done = scale_vectors<kThreads, 4, kUnroll>(data, DType::f32, count, float(factor));
  } else if (dtype != DType::f64 && is_aligned<8>(data, dtype)) {
    done = dtype == DType::bf16 ? scale_vectors<kThreads, 8, kUnroll>(data, DType::bf16, count, float(factor))
                                : scale_vectors<kThreads, 8, kUnroll>(data, DType::f16, count, float(factor));
  }
  if (dtype == DType::f64) {
    for (int64_t i = threadIdx.x; i < count; i += kThreads) reinterpret_cast<double*>(data)[i] *= factor;
  } else {
    for (int64_t i = done + threadIdx.x; i < count; i += kThreads) {
      store_one<float>(data, i, dtype, load_one<float>(data, i, dtype) * float(factor));
    }
  }
}

}  // namespace fusedops::cuda
