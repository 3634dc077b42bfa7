// Forward of LayerNorm and RMSNorm:  y = (x - mean)·rstd·w + b,  rstd = 1/sqrt(var + eps)   (RMSNorm: mean = 0)
//
// A row is read once, 16 bytes a thread and access, and stays in registers; squares are summed about a warp's own mean,
// so a large mean costs no more than its rounding to fp32. Bytes per element: x + y. Rows that begin anywhere are
// read likewise (shifted.cuh), rows wider than the registers of a block by a cluster of blocks. Where there are no
// clusters, and of sums and mixes of dtypes that are not compiled for this, rows are kept in shared memory, or read
// again where that is too small as well. Where a row comes from is norm_rows.cuh's business.
#pragma once

#include <cmath>

#include "launch.h"
#include "norm_rows.cuh"
#include "reduce.cuh"

namespace fusedops::cuda {

// Threads at most of a row in registers: 64 registers each; 128 where they hold fp64, or two rows and perhaps random
// bits.
template <class Row>
constexpr int kFwdThreads = sizeof(typename Row::acc_t) == 8 || Row::kStores || Row::kClusters ? 512 : 1024;
// 16-byte vectors a thread holds at most: four, or six of four elements.
template <class Row>
constexpr int kFwdVecs = Row::kVec == 4 ? 6 : 4;

struct FwdParams {
  NormFwd n;
  int hidden;
  float inverse_hidden;
  bool aligned;  // every access of a whole vector is an aligned one
  bool staged;   // wide rows: the row fits in shared memory
  int blocks;    // of a row, a cluster
  bool few;      // rows: there is time to ask for the parameters before the row is known
};

__device__ inline float inverse_sqrt(float x) { return rsqrtf(x); }
__device__ inline double inverse_sqrt(double x) { return 1.0 / sqrt(x); }
// Of a warp's count, for the mean that its squares are summed about: it may be off by an ulp more than by a division,
// which in fp32 is a call.
__device__ inline float quick_inverse(float x) { return __fdividef(1.0f, x); }
__device__ inline double quick_inverse(double x) { return 1.0 / x; }

template <bool kRms, class acc_t>
__device__ inline void write_stats(const FwdParams& p, int64_t row, acc_t mean, acc_t rstd) {
  if (threadIdx.x != 0) return;
  if (!kRms && p.n.mean) static_cast<acc_t*>(p.n.mean)[row] = mean;
  if (p.n.rstd) static_cast<acc_t*>(p.n.rstd)[row] = rstd;
}

// Sums of a row from its warps' means and sums of squares about them (Chan, Golub, LeVeque 1979): one exchange and one
// barrier. Leaves the row's in `mean` and `squares`; returns how far the warp's mean was off. `count(w)`: elements of
// warp w. Only for rows of several warps, which are alone in their block.
template <bool kRms, class acc_t, class Count>
__device__ inline acc_t join_warps(acc_t (*exchange)[2], acc_t inverse_hidden, Count&& count, acc_t& mean,
                                   acc_t& squares) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  if (lane == 0) {
    exchange[threadIdx.x / kWarp][0] = mean;
    exchange[threadIdx.x / kWarp][1] = squares;
  }
  __syncthreads();
  acc_t other_mean = 0, other_squares = 0, shift = 0;
  if (lane < warps) {
    other_mean = exchange[lane][0];
    other_squares = exchange[lane][1];
  }
  if constexpr (!kRms) {
    const acc_t n = lane < warps ? count(lane) : 0;
    const acc_t row_mean = warp_sum(other_mean * n) * inverse_hidden;
    shift = mean - row_mean;
    mean = row_mean;
    other_mean -= row_mean;
    other_squares += other_mean * (other_mean * n);  // in this order lanes without a warp add no 0 * inf
  }
  squares = warp_sum(other_squares);
  return shift;
}

// Makes a row's mean and sum of squares of those of its blocks, of `cols` columns each; returns how far the block's
// mean was off.
template <bool kRms, class acc_t>
__device__ inline acc_t join_blocks(acc_t (*exchange)[2], const FwdParams& p, int cols, acc_t inverse_hidden,
                                    acc_t& mean, acc_t& squares) {
  wait_for_cluster();
  if (threadIdx.x < p.blocks) {
    store_to_block(&exchange[cluster_rank()][0], threadIdx.x, mean);
    store_to_block(&exchange[cluster_rank()][1], threadIdx.x, squares);
  }
  sync_cluster();
  const auto count = [&](int block) { return static_cast<acc_t>(min(max(p.hidden - block * cols, 0), cols)); };
  acc_t row_mean = 0, row_squares = 0;
  if constexpr (!kRms) {
    for (int block = 0; block < p.blocks; ++block) row_mean += exchange[block][0] * count(block);
    row_mean *= inverse_hidden;
  }
  for (int block = 0; block < p.blocks; ++block) {
    const acc_t off = kRms ? acc_t(0) : exchange[block][0] - row_mean;
    row_squares += exchange[block][1] + off * (off * count(block));
  }
  const acc_t shift = mean - row_mean;
  mean = row_mean;
  squares = row_squares;
  return shift;
}

// One row in the registers of blockDim.x threads, kVecs vectors each. A warp's columns lie together, so a thread's
// vectors are a constant apart. kWhole: every vector is in the row. weight and bias are param_t, 16-byte aligned. A
// shifted row may begin anywhere, end anywhere, and have several blocks.
//
// Instructions are the limit in 16 bits, not loads under way: with strided columns, a test at each access and
// parameters of any dtype, 8192 x 2048 bf16 ran at 66 % of the copy; so it runs at 89 % (H200).
template <bool kRms, bool kWhole, class param_t, class Row, int kVecs>
__device__ inline void norm_row(const FwdParams& p, int64_t row, typename Row::acc_t (*exchange)[2]) {
  using acc_t = typename Row::acc_t;
  using y_t = typename Row::y_t;
  constexpr int kVec = Row::kVec;
  constexpr int kApart = kWarp * kVec;                           // columns from one vector of a thread to the next
  constexpr int kColumns = kVecs * kApart;                       // of a warp
  const bool alone = blockDim.x == kWarp;                        // its mean is the block's
  const int cols = static_cast<int>(blockDim.x) * kVecs * kVec;  // of a block
  const int begin = Row::kClusters && p.blocks > 1 ? cluster_rank() * cols : 0;  // of this one
  const int warp_first = begin + static_cast<int>(threadIdx.x) / kWarp * kColumns;
  const int first = warp_first + threadIdx.x % kWarp * kVec;
  const int left = p.hidden - first;
  const auto valid = [&](int i) { return kWhole || left > i * kApart; };
  const auto within = [&](int i, int j) { return left > i * kApart + j; };
  const auto all_valid = [&](int i) { return Row::kShifted ? left >= i * kApart + kVec : valid(i); };
  const auto count = [&](int w) { return kWhole ? kColumns : min(max(p.hidden - begin - w * kColumns, 0), kColumns); };
  const int warp = threadIdx.x / kWarp;
  const auto inverse_hidden = sizeof(acc_t) == 8 ? acc_t(1) / p.hidden : acc_t(p.inverse_hidden);

  if constexpr (Row::kClusters) {
    if (p.blocks > 1) start_in_cluster();
  }
  const param_t* weight = static_cast<const param_t*>(p.n.weight);
  const param_t* bias = static_cast<const param_t*>(p.n.bias);
  const Row source(p.n, row);
  typename Row::Loaded loaded[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (valid(i)) {
      loaded[i] = source.load(first + i * kApart);
    } else {
      memset(&loaded[i], 0, sizeof loaded[i]);
    }
  }
  if (p.few) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (weight && valid(i)) prefetch(weight + first + i * kApart);
      if (bias && valid(i)) prefetch(bias + first + i * kApart);
    }
  }
  acc_t c[kVecs][kVec];  // the row; then its distance from the warp's mean
  acc_t sum = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    widen(source.take(loaded[i], first + i * kApart, valid(i)), c[i]);
    if constexpr (!kRms) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum += c[i][j];
    }
  }
  acc_t mean = 0, squares = 0, shift = 0;
  if constexpr (!kRms) mean = warp_sum(sum) * (alone ? inverse_hidden : quick_inverse(acc_t(max(count(warp), 1))));
  const auto centre = [&](acc_t& x) {
    x -= mean;
    squares += x * x;
  };
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (all_valid(i)) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) centre(c[i][j]);
    } else if (Row::kShifted) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (within(i, j)) centre(c[i][j]);
      }
    }
  }
  squares = warp_sum(squares);
  const int here = min(p.hidden - begin, cols);
  const acc_t inverse_here = Row::kClusters && p.blocks > 1 ? quick_inverse(acc_t(max(here, 1))) : inverse_hidden;
  if (!alone) shift = join_warps<kRms>(exchange, inverse_here, count, mean, squares);
  if constexpr (Row::kClusters) {
    __shared__ acc_t of_blocks[kMostBlocks][2];
    if (p.blocks > 1) shift += join_blocks<kRms>(of_blocks, p, cols, inverse_hidden, mean, squares);
  }
  const acc_t rstd = inverse_sqrt(squares * inverse_hidden + static_cast<acc_t>(p.n.eps));
  if (begin == 0) write_stats<kRms>(p, row, mean, rstd);
  shift *= rstd;

  y_t* y_row = static_cast<y_t*>(p.n.y) + row * p.hidden;
  y_t* y_at = y_row + first;
  const auto load_part_of = [&](const param_t* param, int i, acc_t(&out)[kVec]) {
    if (!Row::kShifted || (p.aligned && all_valid(i))) {
      load_param_as<param_t>(param + first, i * kApart, out);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        out[j] = within(i, j) ? acc_t(widen(param[first + i * kApart + j])) : acc_t(0);
      }
    }
  };
  ShiftedStore<y_t, kVec> shifted(y_row, warp_first, min(warp_first + kColumns, p.hidden));
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    if (!Row::kShifted && !valid(i)) continue;
#pragma unroll
    for (int j = 0; j < kVec; ++j) c[i][j] = c[i][j] * rstd + shift;
    acc_t w[kVec], b[kVec];
    if (weight) {
      load_part_of(weight, i, w);
      if constexpr (kRms) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) c[i][j] *= w[j] + static_cast<acc_t>(p.n.weight_offset);
      } else if (bias) {
        load_part_of(bias, i, b);
#pragma unroll
        for (int j = 0; j < kVec; ++j) c[i][j] = c[i][j] * w[j] + b[j];
      } else {
#pragma unroll
        for (int j = 0; j < kVec; ++j) c[i][j] *= w[j];
      }
    }
    Vec<y_t, kVec> y;
    narrow(c[i], y);
    if constexpr (Row::kShifted) {
      shifted(first + i * kApart, y);
    } else {
      store(y_at + i * kApart, y);
    }
    if constexpr (Row::kStores) source.store_again(c[i], first + i * kApart);
  }
  if constexpr (Row::kShifted) shifted.finish(warp_first + kColumns);
}

// A row a block or a cluster, or blockDim.y rows of a warp each.
template <class Row, bool kRms, int kVecs>
__global__ void __launch_bounds__(kFwdThreads<Row>, 1) norm_fwd_kernel(const FwdParams p) {
  using acc_t = typename Row::acc_t;
  __shared__ acc_t exchange[kFwdThreads<Row> / kWarp][2];
  const unsigned block = Row::kClusters ? blockIdx.x / p.blocks : blockIdx.x;
  const int64_t row = static_cast<int64_t>(block) * blockDim.y + threadIdx.y;
  if (row >= p.n.rows) return;  // a warp leaves as one, and only where no barrier follows
  // Sums move twice the bytes for few more instructions: there the test at each access costs no time, only its code.
  const bool whole = !Row::kStores && !Row::kClusters && static_cast<int>(blockDim.x) * kVecs * Row::kVec == p.hidden;
  const auto with_params_of = [&](auto example) {
    using param_t = decltype(example);
    if constexpr (!Row::kClusters) {
      if (whole) return norm_row<kRms, true, param_t, Row, kVecs>(p, row, exchange);
    }
    norm_row<kRms, false, param_t, Row, kVecs>(p, row, exchange);
  };
  if constexpr (sizeof(acc_t) == 8) {
    with_params_of(double());
  } else {
    if (p.n.weight_dtype == DType::f32) with_params_of(float());
    if (p.n.weight_dtype == DType::bf16) with_params_of(__nv_bfloat16());
    if (p.n.weight_dtype == DType::f16) with_params_of(__half());
  }
}

// Scale and shift of kN columns, and what they do to x - mean, which they leave in its place.
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

// One block a row of any width, alignment and parameters. Each thread keeps its own columns in shared memory, so no
// barrier guards them. The variance is the corrected two-pass one (Chan, Golub, LeVeque 1983): what the mean was off by
// shows as the mean of what is left.
template <class Row, bool kRms>
__global__ void __launch_bounds__(1024, 1) norm_fwd_wide_kernel(const FwdParams p) {
  using acc_t = typename Row::acc_t;
  using Kept = typename Row::Kept;
  constexpr int kVec = Row::kVec;
  unsigned char* smem = dynamic_smem();
  Kept* stage = reinterpret_cast<Kept*>(smem);
  __shared__ acc_t buffers[2][kMaxWarps];
  RowSum<acc_t> row_sum{buffers, static_cast<int>(blockDim.x) / kWarp};
  const int vecs = (p.hidden + kVec - 1) / kVec;

  for (int64_t row = blockIdx.x; row < p.n.rows; row += gridDim.x) {
    const Row source(p.n, row);
    auto* y_row = static_cast<typename Row::y_t*>(p.n.y) + row * p.hidden;  // [hidden]
    const auto read = [&](int i) {
      return p.staged ? stage[i] : source.read_again(i * kVec, p.hidden - i * kVec, p.aligned);
    };
    ExactSum<acc_t> sum;
    if (p.staged || !kRms || Row::kStores) {
#pragma unroll 2
      for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
        const Kept kept = source.read(i * kVec, p.hidden - i * kVec, p.aligned);
        if (p.staged) stage[i] = kept;
        acc_t x[kVec], part = 0;
        widen(kept, x);
#pragma unroll
        for (int j = 0; j < kVec; ++j) part += x[j];
        sum.add(part);
      }
    }
    acc_t mean = kRms ? acc_t(0) : row_sum(sum.total()) / p.hidden;
    ExactSum<acc_t> squares, rest;
#pragma unroll 2
    for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
      acc_t x[kVec], part = 0, off = 0;
      widen(read(i), x);
      for_valid<kVec>(p.hidden - i * kVec, [&](int j) {
        const acc_t d = x[j] - mean;
        part += d * d;
        off += d;
      });
      squares.add(part);
      if constexpr (!kRms) rest.add(off);
    }
    acc_t variance = row_sum(squares.total()) / p.hidden;
    if constexpr (!kRms) {
      const acc_t off = row_sum(rest.total()) / p.hidden;
      // Squares that add up to inf stay that: off², of a mean of 1e30, may be inf as well, and inf - inf is NaN.
      if (variance < acc_t(INFINITY)) variance = variance > off * off ? variance - off * off : acc_t(0);
      mean += off;
    }
    const acc_t rstd = inverse_sqrt(variance + static_cast<acc_t>(p.n.eps));
    write_stats<kRms>(p, row, mean, rstd);
#pragma unroll 2
    for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
      acc_t centred[kVec];
      widen(read(i), centred);
#pragma unroll
      for (int j = 0; j < kVec; ++j) centred[j] -= mean;
      write_y(p, y_row, i * kVec, rstd, centred);
      if constexpr (Row::kStores) source.store_again(centred, i * kVec, p.hidden - i * kVec, p.aligned);
    }
  }
}

}  // namespace fusedops::cuda
