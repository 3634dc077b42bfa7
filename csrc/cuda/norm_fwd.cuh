// Forward of LayerNorm and RMSNorm:  y = (x - mean)·rstd·w + b,  rstd = 1/sqrt(var + eps)   (RMSNorm: mean = 0)
//
// A row is read once, 16 bytes a thread and access, and stays in registers; the variance is a second pass over those
// registers, so a large mean costs no accuracy. Bytes per element: x + y. Rows wider than the registers of a block
// are kept in shared memory, or read again where that is too small as well.
#pragma once

#include "../norm.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace fusedops::cuda {

constexpr int kFwdMaxThreads = 512;

// Blocks of that size an SM must hold. Two leave 64 registers, which all fit that load 64 bytes a thread and do not
// store wider elements: 1,024 threads an SM then keep 64 KiB of loads under way.
template <class x_t, class y_t, int kElems>
constexpr int kFwdMinBlocks = sizeof(x_t) * kElems <= 64 && sizeof(y_t) <= sizeof(x_t) ? 2 : 1;

struct FwdParams {
  NormFwd n;
  int hidden;
  bool aligned;  // every access of a whole vector is an aligned one
  bool staged;   // wide rows: the row fits in shared memory
};

// Scale and shift of kN columns, and what they do to x - mean.
template <class y_t, int kN, class acc_t>
__device__ inline void write_y(const FwdParams& p, y_t* y_row, int col, acc_t rstd, acc_t (&x)[kN]) {
  const int left = p.hidden - col;
  acc_t w[kN];
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] *= rstd;
  if (p.n.weight) {
    load_param(p.n.weight, p.n.weight_dtype, col, left, p.aligned, w);
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j] *= w[j] + static_cast<acc_t>(p.n.weight_offset);
  }
  if (p.n.bias) {
    load_param(p.n.bias, p.n.bias_dtype, col, left, p.aligned, w);
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j] += w[j];
  }
  store_row<y_t, kN>(y_row, col, left, p.aligned, x);
}

__device__ inline float inverse_sqrt(float x) { return rsqrtf(x); }
__device__ inline double inverse_sqrt(double x) { return 1.0 / sqrt(x); }

template <bool kRms, class acc_t>
__device__ inline void write_stats(const FwdParams& p, int64_t row, acc_t mean, acc_t rstd) {
  if (threadIdx.x != 0) return;
  if (!kRms && p.n.mean) static_cast<acc_t*>(p.n.mean)[row] = mean;
  if (p.n.rstd) static_cast<acc_t*>(p.n.rstd)[row] = rstd;
}

// blockDim.x threads a row, each with kElems of its elements; blockDim.y rows a block where a warp is enough for one.
template <class x_t, class y_t, bool kRms, int kElems>
__global__ void __launch_bounds__(kFwdMaxThreads, kFwdMinBlocks<x_t, y_t, kElems>) norm_fwd_kernel(const FwdParams p) {
  using acc_t = acc_of<x_t>;
  constexpr int kVec = vec_width<x_t, y_t>;
  constexpr int kVecs = kElems / kVec;
  __shared__ acc_t buffers[2][kMaxWarps];
  RowSum<acc_t> row_sum{buffers, static_cast<int>(blockDim.x) / kWarp};

  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < p.n.rows; row += step) {
    const x_t* x_row = static_cast<const x_t*>(p.n.x) + row * p.n.x_stride;  // [hidden]
    y_t* y_row = static_cast<y_t*>(p.n.y) + row * p.hidden;                  // [hidden]
    Vec<x_t, kVec> x[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int col = (i * blockDim.x + threadIdx.x) * kVec;
      x[i] = load_row<x_t, kVec>(x_row, col, p.hidden - col, p.aligned);
    }

    acc_t mean = 0;
    if constexpr (!kRms) {
      acc_t sum = 0;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum += widen(x[i].v[j]);  // zeros past the row's end
      }
      mean = row_sum(sum) / p.hidden;
    }
    acc_t squares = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if constexpr (kRms) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) squares += widen(x[i].v[j]) * widen(x[i].v[j]);
      } else {
        for_valid<kVec>(p.hidden - (i * blockDim.x + threadIdx.x) * kVec, [&](int j) {
          const acc_t d = widen(x[i].v[j]) - mean;
          squares += d * d;
        });
      }
    }
    const acc_t rstd = inverse_sqrt(row_sum(squares) / p.hidden + static_cast<acc_t>(p.n.eps));
    write_stats<kRms>(p, row, mean, rstd);

#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      acc_t centred[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) centred[j] = widen(x[i].v[j]) - mean;
      write_y<y_t>(p, y_row, (i * blockDim.x + threadIdx.x) * kVec, rstd, centred);
    }
  }
}

// One block a row of any width. Each thread keeps its own columns in shared memory, so no barrier guards them.
template <class x_t, class y_t, bool kRms>
__global__ void __launch_bounds__(1024, 1) norm_fwd_wide_kernel(const FwdParams p) {
  using acc_t = acc_of<x_t>;
  constexpr int kVec = vec_width<x_t, y_t>;
  using XVec = Vec<x_t, kVec>;
  unsigned char* smem = dynamic_smem();
  XVec* stage = reinterpret_cast<XVec*>(smem);
  __shared__ acc_t buffers[2][kMaxWarps];
  RowSum<acc_t> row_sum{buffers, static_cast<int>(blockDim.x) / kWarp};
  const int vecs = (p.hidden + kVec - 1) / kVec;

  for (int64_t row = blockIdx.x; row < p.n.rows; row += gridDim.x) {
    const x_t* x_row = static_cast<const x_t*>(p.n.x) + row * p.n.x_stride;  // [hidden]
    y_t* y_row = static_cast<y_t*>(p.n.y) + row * p.hidden;                  // [hidden]
    const auto read = [&](int i) { return load_row<x_t, kVec>(x_row, i * kVec, p.hidden - i * kVec, p.aligned); };
    acc_t sum = 0;
    if (p.staged || !kRms) {
#pragma unroll 2
      for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
        const XVec v = read(i);
        if (p.staged) stage[i] = v;
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum += widen(v.v[j]);
      }
    }
    const acc_t mean = kRms ? acc_t(0) : row_sum(sum) / p.hidden;
    acc_t squares = 0;
#pragma unroll 2
    for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
      const XVec v = p.staged ? stage[i] : read(i);
      for_valid<kVec>(p.hidden - i * kVec, [&](int j) {
        const acc_t d = widen(v.v[j]) - mean;
        squares += d * d;
      });
    }
    const acc_t rstd = inverse_sqrt(row_sum(squares) / p.hidden + static_cast<acc_t>(p.n.eps));
    write_stats<kRms>(p, row, mean, rstd);
#pragma unroll 2
    for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
      const XVec v = p.staged ? stage[i] : read(i);
      acc_t centred[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) centred[j] = widen(v.v[j]) - mean;
      write_y<y_t>(p, y_row, i * kVec, rstd, centred);
    }
  }
}

}  // namespace fusedops::cuda
