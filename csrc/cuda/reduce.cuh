// Sums over a warp and over the warps of a row. All are in a fixed order, so results repeat bit for bit.
#pragma once

#include <cuda_runtime.h>

#include "ptx.cuh"

namespace fusedops::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;

template <class acc_t>
__device__ inline acc_t warp_sum(acc_t x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  return x;
}

template <class acc_t>
__device__ inline acc_t warp_max(acc_t x) {  // of numbers: a NaN may be passed over
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const acc_t other = __shfl_xor_sync(kFullWarp, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

// kN sums at once, for little more than the price of one: at each step half of the lanes hand half of their values
// over. Lane l ends with the sum of v[l / (32 / kN)]. kN is a power of two.
template <int kN, class acc_t>
__device__ inline acc_t warp_sum_each(acc_t (&v)[kN]) {
  const int lane = threadIdx.x % kWarp;
  int offset = kWarp / 2;
#pragma unroll
  for (int half = kN / 2; half > 0; half /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const acc_t give = upper ? v[k] : v[k + half];
      const acc_t keep = upper ? v[k + half] : v[k];
      v[k] = keep + __shfl_xor_sync(kFullWarp, give, offset);
    }
  }
#pragma unroll
  for (int step = kWarp / kN / 2; step > 0; step /= 2) v[0] += __shfl_xor_sync(kFullWarp, v[0], step);
  return v[0];
}

// A sum that keeps what rounding takes from it, so that a thread adds up a long row as exactly as a short one.
// Source: Knuth, The Art of Computer Programming 2, 4.2.2, theorem B.
template <class acc_t>
struct ExactSum {
  acc_t high = 0, low = 0;

  __device__ void add(acc_t x) {
    const acc_t sum = high + x, added = sum - high;
    low += (high - (sum - added)) + (x - added);
    high = sum;
  }
  __device__ acc_t total() const { return low == low ? high + low : high; }  // of an infinite sum, low is NaN
};

// Sum over a block's warps, or over the one warp of a row where rows share a block (warps == 1). Two buffers in turn
// make one barrier enough: a buffer is written again only after the barrier that follows its reading.
template <class acc_t>
struct RowSum {
  acc_t (*buffers)[kMaxWarps];  // shared, [2][kMaxWarps]
  int warps;
  int turn = 0;

  __device__ acc_t operator()(acc_t x) {
    x = warp_sum(x);
    if (warps == 1) return x;
    const int lane = threadIdx.x % kWarp;
    acc_t* buffer = buffers[turn];
    turn ^= 1;
    if (lane == 0) buffer[threadIdx.x / kWarp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? buffer[lane] : acc_t(0));
  }
};

// Where the warps of a block leave kN sums each; the rows lie on banks of their own.
template <class acc_t, int kN>
struct Exchange {
  acc_t sums[kN][kMaxWarps + kWarp / kN];
};

// kN sums over the warps of a row, those from `first` on, in one exchange and one barrier; every thread gets all of
// them.
template <int kN, class acc_t>
__device__ inline void row_sum_each(acc_t (&v)[kN], Exchange<acc_t, kN>& exchange, int first, int warps, int barrier) {
  constexpr int kLanes = kWarp / kN;  // lanes that hold the same sum
  const int lane = threadIdx.x % kWarp;
  acc_t sum = warp_sum_each(v);
  if (warps > 1) {
    acc_t* sums = exchange.sums[lane / kLanes] + first;
    if (lane % kLanes == 0) sums[threadIdx.x / kWarp] = sum;
    sync_group(barrier, warps * kWarp);
    sum = 0;
#pragma unroll
    for (int part = 0; part < kMaxWarps / kLanes; ++part) {
      const int warp = part * kLanes + lane % kLanes;
      if (warp < warps) sum += sums[warp];
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
  }
#pragma unroll
  for (int k = 0; k < kN; ++k) v[k] = __shfl_sync(kFullWarp, sum, k * kLanes);
}

}  // namespace fusedops::cuda
