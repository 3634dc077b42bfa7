// Kernels of cross-entropy. Formulas: csrc/cross_entropy.h.
//
// Forward reads a row once: each thread keeps the largest logit it saw and the sum of exponentials beneath it, scaled
// anew where a larger one comes; threads, then warps, are joined likewise. Backward reads a row once and writes its
// gradient once, perhaps in its place: what an element becomes depends on it and on a few numbers of the row. Bytes per
// element: x forward, x + dx backward. Rows of an odd number of classes begin anywhere: 16-byte accesses between a head
// and a tail of single elements. A row whose target is ignored is not read.
//
// Source: Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018).
#pragma once

#include <cmath>

#include "../cross_entropy.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace fusedops::cuda {

constexpr int kLossThreads = 512;  // at most, of a row
// Blocks an SM has to have room for: 64 registers a thread, 128 where they hold fp64.
template <class x_t>
constexpr int kLossBlocks = sizeof(x_t) == 8 ? 1 : 2;

// Vectors a thread has under way at once: softcap and smoothing need registers of their own, and more time than memory.
template <bool kExtras>
constexpr int kUnroll = kExtras ? 2 : 4;

template <class Args>
struct LossParams {
  Args a;
  int classes;
};

// ---- exponentials -----------------------------------------------------------------------------------------------

constexpr float kLog2E = 1.4426950408889634f;

// exp(x), x ≤ 0, for sums of such: what is below the smallest normal number may be 0.
__device__ inline float exp_to_add(float x) { return exp2_flushed(x * kLog2E); }
__device__ inline double exp_to_add(double x) { return exp(x); }
// exp(x - y), to the last subnormal number.
__device__ inline float exp_less(float x, float y) { return exp2f(fmaf(x, kLog2E, -y * kLog2E)); }
__device__ inline double exp_less(double x, double y) { return exp(x - y); }
__device__ inline float log_of(float x) { return logf(x); }
__device__ inline double log_of(double x) { return log(x); }
__device__ inline float tanh_of(float x) { return tanhf(x); }
__device__ inline double tanh_of(double x) { return tanh(x); }
// Where a row's largest logit starts. Not -inf: less that, a logit of -inf would be NaN.
__device__ inline float lowest(float) { return -3.402823466e38f; }
__device__ inline double lowest(double) { return -1.7976931348623157e308; }

template <class T>
__device__ inline acc_of<T> widen_one(T x) {
  if constexpr (sizeof(T) == 2) {
    return widen(x);
  } else {
    return x;
  }
}
template <class T>
__device__ inline void narrow_one(acc_of<T> x, T& y) {
  if constexpr (sizeof(T) == 2) {
    narrow(x, y);
  } else {
    y = x;
  }
}

// ---- a row of any alignment ---------------------------------------------------------------------------------------

// How a row is taken apart: `head` single elements, `vecs` aligned vectors, the rest. Thread t of n has the elements
// and the vectors t, t + n, ... of each part.
template <int kVec>
struct Parts {
  int head, vecs, classes;

  // Vectors only where they are aligned in both rows; `other` may be `row`.
  template <class T>
  __device__ Parts(const T* row, const T* other, int classes) : classes(classes) {
    const auto at = reinterpret_cast<uintptr_t>(row);
    head = static_cast<int>((16 - at % 16) % 16 / sizeof(T));
    if (head > classes || (at - reinterpret_cast<uintptr_t>(other)) % 16 != 0) head = classes;
    vecs = (classes - head) / kVec;
  }
  __device__ int tail() const { return head + vecs * kVec; }  // where it begins
  __device__ int owner(int col) const {
    const int own = col < head ? col : col < tail() ? (col - head) / kVec : col - tail();
    return own % static_cast<int>(blockDim.x);
  }
};

// Calls group(columns, vectors, whole) for all of a thread's vectors, kN at a time and loaded before the first is
// used: vector i begins at columns(i) and is one of the row where whole(i). Then one(column) for its single elements.
template <int kN, class T, int kVec, class Group, class One>
__device__ inline void for_row(const T* row, const Parts<kVec>& parts, Group&& group, One&& one) {
  const int threads = blockDim.x;
  for (int begin = threadIdx.x; begin < parts.vecs; begin += kN * threads) {
    Vec<T, kVec> v[kN];
    const auto whole = [&](int i) { return begin + i * threads < parts.vecs; };
    const auto columns = [&](int i) { return parts.head + (begin + i * threads) * kVec; };
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (whole(i)) v[i] = load_row_vector<Vec<T, kVec>>(row + columns(i));
    }
    group(columns, v, whole);
  }
  for (int col = threadIdx.x; col < parts.head; col += threads) one(col);
  for (int col = parts.tail() + threadIdx.x; col < parts.classes; col += threads) one(col);
}

template <class acc_t>
__device__ inline acc_t element_or(const void* p, int64_t i, acc_t other) {
  return p ? static_cast<const acc_t*>(p)[i] : other;
}

// Whether a target is a class; one that is none ends the kernel.
__device__ inline bool is_class(int64_t target, int classes) {
  if (target >= 0 && target < classes) return true;
  if (threadIdx.x == 0) {
    stop_kernel("cross_entropy: target: expected class indices from 0 to classes - 1, or ignore_index");
  }
  return false;
}

// ---- forward ------------------------------------------------------------------------------------------------------

// The largest of some logits, the sum of exp(logit - largest), and what label smoothing adds up.
template <class acc_t>
struct Online {
  acc_t largest = lowest(acc_t()), sum = 0, logits = 0;

  __device__ void raise(acc_t other) {
    const acc_t next = other > largest ? other : largest;  // a NaN is not, and shows in the sum
    sum *= exp_to_add(largest - next);
    largest = next;
  }
  __device__ void join_warp() {
    raise(warp_max(largest));
    sum = warp_sum(sum);
    logits = warp_sum(logits);
  }
};

template <class T, int kN>
__device__ inline acc_of<T> largest_of(const Vec<T, kN>& v, acc_of<T> most) {
#pragma unroll
  for (int j = 0; j < kN; ++j) most = element(v, j) > most ? element(v, j) : most;
  return most;
}

// Losses of a row a block, or of blockDim.y rows of a warp each. kExtras: softcap, label smoothing.
template <class x_t, bool kExtras>
__global__ void __launch_bounds__(kLossThreads, kLossBlocks<x_t>)
    cross_entropy_fwd_kernel(const LossParams<CrossEntropyFwd> p) {
  using acc_t = acc_of<x_t>;
  constexpr int kVec = vec_width<x_t, x_t>, kN = kUnroll<kExtras>;
  __shared__ acc_t exchange[3][kMaxWarps];
  const CrossEntropy& c = p.a.c;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= c.rows) return;  // a warp leaves as one, and only where no barrier follows
  auto *losses = static_cast<acc_t*>(p.a.losses), *stats = static_cast<acc_t*>(p.a.stats);
  const int64_t target = c.target[row];
  if (target == c.ignore_index) {
    if (threadIdx.x != 0) return;
    losses[row] = 0;
    if (stats) stats[2 * row] = stats[2 * row + 1] = 0;
    return;
  }
  if (!is_class(target, p.classes)) return;

  const x_t* x = static_cast<const x_t*>(c.x) + row * c.x_stride;
  const acc_t cap = static_cast<acc_t>(c.softcap), inverse_cap = 1 / cap;
  const bool smooth = kExtras && c.smoothing != 0, cap_given = kExtras && c.softcap != 0;
  const auto logit = [&](acc_t value) { return cap_given ? cap * tanh_of(value * inverse_cap) : value; };
  const auto weighted = [&](acc_t z, int col) { return z * element_or<acc_t>(c.weight, col, 1); };
  Online<acc_t> seen;
  for_row<kN>(
      x, Parts<kVec>(x, x, p.classes),
      [&](auto&& columns, const auto& v, auto&& whole) {
        // Plain logits are raised to the largest of them all, and widened twice, which takes fewer registers.
        if constexpr (!kExtras) {
          acc_t most = seen.largest;
#pragma unroll
          for (int i = 0; i < kN; ++i) {
            if (whole(i)) most = largest_of(v[i], most);
          }
          seen.raise(most);
        }
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          if (!whole(i)) continue;
          acc_t z[kVec], part = 0;
          widen(v[i], z);
          if constexpr (kExtras) {
            acc_t most = seen.largest;
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
              z[j] = logit(z[j]);
              most = z[j] > most ? z[j] : most;
              if (smooth) seen.logits += weighted(z[j], columns(i) + j);
            }
            seen.raise(most);
          }
#pragma unroll
          for (int j = 0; j < kVec; ++j) part += exp_to_add(z[j] - seen.largest);
          seen.sum += part;
        }
      },
      [&](int col) {
        const acc_t z = logit(widen_one(x[col]));
        seen.raise(z);
        seen.sum += exp_to_add(z - seen.largest);
        if (smooth) seen.logits += weighted(z, col);
      });
  seen.join_warp();
  if (blockDim.x > kWarp) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (lane == 0) {
      exchange[0][warp] = seen.largest;
      exchange[1][warp] = seen.sum;
      exchange[2][warp] = seen.logits;
    }
    __syncthreads();
    if (warp != 0) return;
    seen = Online<acc_t>();
    if (lane < static_cast<int>(blockDim.x) / kWarp) {
      seen.largest = exchange[0][lane];
      seen.sum = exchange[1][lane];
      seen.logits = exchange[2][lane];
    }
    seen.join_warp();
  }
  if (threadIdx.x != 0) return;
  const acc_t smoothing = static_cast<acc_t>(c.smoothing), z_loss = static_cast<acc_t>(c.z_loss);
  const acc_t log_sum = log_of(seen.sum), lse = seen.largest + log_sum;
  const acc_t own = (1 - smoothing) * element_or<acc_t>(c.weight, target, 1);
  acc_t loss = own * (log_sum + (seen.largest - logit(widen_one(x[target]))));
  if (smooth) {
    const acc_t all = element_or<acc_t>(c.weights, 0, static_cast<acc_t>(p.classes));
    loss += smoothing / p.classes * (all * lse - seen.logits);
  }
  if (z_loss != 0) loss += z_loss * lse * lse;
  losses[row] = loss;
  if (!stats) return;
  stats[2 * row] = seen.largest;
  stats[2 * row + 1] = log_sum;
}

// ---- the reduction ------------------------------------------------------------------------------------------------

constexpr int kSumThreads = 1024;
constexpr int64_t kSumRows = 8192;  // of a block
constexpr int kSumBlocks = 1024;    // at most: what one block can finish at once

struct LossSums {
  CrossEntropyFwd f;
  double* partial;  // [blocks, 2]: losses, weights; null where one block does it all
  int blocks;
};

// Leaves the sums over a block's threads in thread 0.
__device__ inline void sum_block(double& losses, double& weights) {
  __shared__ double buffers[2][kMaxWarps];
  RowSum<double> sum{buffers, static_cast<int>(blockDim.x) / kWarp};
  losses = sum(losses);
  weights = sum(weights);
}

template <class acc_t>
__device__ inline void write_loss(const CrossEntropyFwd& f, double losses, double weights) {
  const bool mean = f.c.reduction == Reduction::mean;
  *static_cast<acc_t*>(f.loss) = static_cast<acc_t>(mean ? losses / weights : losses);
  if (mean) *static_cast<acc_t*>(f.total_weight) = static_cast<acc_t>(weights);
}

// Sums of losses and, for a mean, of weights, in double.
template <class acc_t>
__global__ void __launch_bounds__(kSumThreads, 1) sum_losses_kernel(const LossSums p) {
  const CrossEntropy& c = p.f.c;
  double losses = 0, weights = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
#pragma unroll 4
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; row < c.rows; row += stride) {
    losses += static_cast<const acc_t*>(p.f.losses)[row];
    const int64_t target = c.target[row];
    if (target != c.ignore_index) weights += element_or<acc_t>(c.weight, target, 1);
  }
  sum_block(losses, weights);
  if (threadIdx.x != 0) return;
  if (p.partial == nullptr) return write_loss<acc_t>(p.f, losses, weights);
  p.partial[2 * blockIdx.x] = losses;
  p.partial[2 * blockIdx.x + 1] = weights;
}

template <class acc_t>
__global__ void __launch_bounds__(kSumThreads, 1) finish_loss_kernel(const LossSums p) {
  const int block = threadIdx.x;
  double losses = block < p.blocks ? p.partial[2 * block] : 0.0;
  double weights = block < p.blocks ? p.partial[2 * block + 1] : 0.0;
  sum_block(losses, weights);
  if (threadIdx.x == 0) write_loss<acc_t>(p.f, losses, weights);
}

// ---- backward -----------------------------------------------------------------------------------------------------

// Gradients of a row a block, or of blockDim.y rows of a warp each; dx may be x.
template <class x_t, bool kExtras>
__global__ void __launch_bounds__(kLossThreads, kLossBlocks<x_t>)
    cross_entropy_bwd_kernel(const LossParams<CrossEntropyBwd> p) {
  using acc_t = acc_of<x_t>;
  constexpr int kVec = vec_width<x_t, x_t>, kN = kUnroll<kExtras>;
  const CrossEntropy& c = p.a.c;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= c.rows) return;
  const x_t* x = static_cast<const x_t*>(c.x) + row * c.x_stride;
  x_t* dx = static_cast<x_t*>(p.a.dx) + row * p.a.dx_stride;
  const Parts<kVec> parts(x, dx, p.classes);
  const int64_t target = c.target[row];
  if (target == c.ignore_index) {
    const acc_t nothing[kVec] = {};
    Vec<x_t, kVec> zeros;
    narrow(nothing, zeros);
    for (int i = threadIdx.x; i < parts.vecs; i += blockDim.x) {
      store_whole(dx + parts.head + i * kVec, bit_cast<typename Vec<x_t, kVec>::Raw>(zeros));
    }
    for (int col = threadIdx.x; col < parts.head; col += blockDim.x) narrow_one(acc_t(0), dx[col]);
    for (int col = parts.tail() + threadIdx.x; col < p.classes; col += blockDim.x) narrow_one(acc_t(0), dx[col]);
    return;
  }
  if (!is_class(target, p.classes)) return;

  const acc_t* stats = static_cast<const acc_t*>(p.a.stats) + 2 * row;
  const acc_t largest = stats[0], log_sum = stats[1];
  acc_t g = static_cast<const acc_t*>(p.a.dloss)[c.reduction == Reduction::none ? row : 0];
  if (c.reduction == Reduction::mean) g /= *static_cast<const acc_t*>(p.a.total_weight);
  const acc_t smoothing = static_cast<acc_t>(c.smoothing), share = g * smoothing / p.classes;
  const acc_t own = g * (1 - smoothing) * element_or<acc_t>(c.weight, target, 1);
  acc_t of_exp = own + 2 * g * static_cast<acc_t>(c.z_loss) * (largest + log_sum);
  if (kExtras) of_exp += share * element_or<acc_t>(c.weights, 0, static_cast<acc_t>(p.classes));
  const acc_t cap = static_cast<acc_t>(c.softcap), inverse_cap = 1 / cap;
  const bool smooth = kExtras && c.smoothing != 0, cap_given = kExtras && c.softcap != 0;
  // `less` is what the target alone has.
  const auto gradient = [&](acc_t value, int col, acc_t less) {
    const acc_t y = cap_given ? tanh_of(value * inverse_cap) : acc_t(0);
    const acc_t z = cap_given ? cap * y : value;
    acc_t d = of_exp * exp_less(z - largest, log_sum) - less;
    if (smooth) d -= share * element_or<acc_t>(c.weight, col, 1);
    return cap_given ? d * (1 - y * y) : d;
  };
  // Who writes the target's element writes it again, with what is its own; read now, for dx may be x.
  const int at = static_cast<int>(target);
  const bool is_mine = parts.owner(at) == static_cast<int>(threadIdx.x);
  const acc_t at_target = is_mine ? widen_one(x[at]) : acc_t(0);
  for_row<kN>(
      x, parts,
      [&](auto&& columns, const auto& v, auto&& whole) {
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          if (!whole(i)) continue;
          acc_t d[kVec];
#pragma unroll
          for (int j = 0; j < kVec; ++j) d[j] = gradient(element(v[i], j), columns(i) + j, 0);
          Vec<x_t, kVec> out;
          narrow(d, out);
          store_whole(dx + columns(i), bit_cast<typename Vec<x_t, kVec>::Raw>(out));
        }
      },
      [&](int col) { narrow_one(gradient(widen_one(x[col]), col, 0), dx[col]); });
  if (is_mine) narrow_one(gradient(at_target, at, own), dx[at]);
}

}  // namespace fusedops::cuda
