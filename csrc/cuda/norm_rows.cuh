// Where the forward kernels' rows come from, and what is stored of a row beside y. A row type is the row of one call
// that a thread works on, kVec columns at a time. kShifted: it may begin and end anywhere; kClusters: it may have
// several blocks. norm_fwd_kernel needs load() and take(), norm_fwd_wide_kernel read() and read_again():
//
//   Loaded load(col)                    starts to read a whole, aligned vector
//   Kept take(loaded, col, valid)       its elements; stores what there is to store, where `valid`
//   Kept read(col, left, aligned)       both, anywhere in a row; zero past its end
//   Kept read_again(col, left, aligned) its elements once more, after read() by the same thread
//
// Where the row stores sums (kStores), both kernels call store_again(y, col, ...) after they stored a vector of y.
#pragma once

#include "../norm.h"
#include "shifted.cuh"
#include "vec.cuh"

namespace fusedops::cuda {

// The rows of x.
template <class x_t, class y_type>
struct InputRow {
  using acc_t = acc_of<x_t>;
  using y_t = y_type;
  static constexpr int kVec = vec_width<x_t, y_t>;
  static constexpr bool kStores = false;
  static constexpr bool kShifted = false, kClusters = false;
  using Kept = Vec<x_t, kVec>;
  using Loaded = Kept;

  const x_t* x;  // [hidden]

  __device__ InputRow(const NormFwd& n, int64_t row) : x(static_cast<const x_t*>(n.x) + row * n.x_stride) {}
  __device__ Loaded load(int col) const { return load_row_vector<Loaded>(x + col); }
  __device__ Kept take(const Loaded& loaded, int, bool) const { return loaded; }
  __device__ Kept read(int col, int left, bool aligned) const { return load_row<x_t, kVec>(x, col, left, aligned); }
  __device__ Kept read_again(int col, int left, bool aligned) const { return read(col, left, aligned); }
};

// The same, several blocks wide.
template <class x_t, class y_t>
struct WideRow : InputRow<x_t, y_t> {
  static constexpr bool kClusters = true;
  using InputRow<x_t, y_t>::InputRow;
};

// The rows of x, wherever they begin.
template <class x_t, class y_type>
struct ShiftedRow {
  using acc_t = acc_of<x_t>;
  using y_t = y_type;
  static constexpr int kVec = vec_width<x_t, y_t>;
  static constexpr bool kStores = false;
  static constexpr bool kShifted = true, kClusters = true;
  using Kept = Vec<x_t, kVec>;
  using Loaded = ShiftedLoad<x_t, kVec>;

  const x_t* x;  // [hidden]
  int shift, hidden;

  __device__ ShiftedRow(const NormFwd& n, int64_t row)
      : x(static_cast<const x_t*>(n.x) + row * n.x_stride),
        shift(shift_of<Kept>(x)),
        hidden(static_cast<int>(n.hidden)) {}
  __device__ Loaded load(int col) const {
    Loaded loaded;
    loaded.start(x, shift, col, hidden - col);
    return loaded;
  }
  __device__ Kept take(const Loaded& loaded, int, bool) const { return loaded.take(shift); }
};

// kN of the numbers residual + dropout(x), before they are rounded.
template <bool kDropout, int kN, class acc_t>
__device__ inline void add_residual(const NormFwd& n, int64_t row, int col, acc_t (&x)[kN],
                                    const acc_t (&residual)[kN]) {
  if (kDropout && n.dropout.seed) {
    acc_t factor[kN];
    dropout_factors(n.dropout, row, col, factor);
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j] *= factor[j];
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] += residual[j];
}

// The rows of an add + norm whose residual and sum are of one dtype. Random bits take registers, so rows without
// dropout do without the code.
template <class x_t, class residual_t, class y_type, bool kDropout>
struct SumRow {
  using acc_t = acc_of<x_t>;
  using y_t = y_type;
  static constexpr int kVec =
      vec_width<x_t, y_t> < vec_width<x_t, residual_t> ? vec_width<x_t, y_t> : vec_width<x_t, residual_t>;
  static constexpr bool kStores = true;
  static constexpr bool kShifted = false, kClusters = false;
  using Kept = Vec<residual_t, kVec>;
  struct Loaded {
    Vec<x_t, kVec> x;
    Vec<residual_t, kVec> residual;
  };

  const NormFwd& n;
  int64_t row;

  __device__ SumRow(const NormFwd& n, int64_t row) : n(n), row(row) {}
  __device__ Loaded load(int col) const {
    return {load_row_vector<Vec<x_t, kVec>>(static_cast<const x_t*>(n.x) + row * n.x_stride + col),
            load_row_vector<Vec<residual_t, kVec>>(static_cast<const residual_t*>(n.residual) +
                                                   row * n.residual_stride + col)};
  }
  __device__ Kept take(const Loaded& loaded, int col, bool valid) const {
    acc_t x[kVec], residual[kVec];
    widen(loaded.x, x);
    widen(loaded.residual, residual);
    if (valid) add_residual<kDropout>(n, row, col, x, residual);
    Kept sum;
    narrow(x, sum);
    if (valid && n.sum != n.residual_out) store(static_cast<residual_t*>(n.sum) + row * n.hidden + col, sum);
    return sum;
  }
  __device__ void store_again(const acc_t (&y)[kVec], int col) const {
    if (!n.residual_out) return;
    Kept out;
    narrow(y, out);
    store(static_cast<residual_t*>(n.residual_out) + row * n.hidden + col, out);
  }
};

// The rows of an add + norm of any dtypes, which are found out at each access.
template <class x_acc_t, class y_type>
struct MixedSumRow {
  using acc_t = x_acc_t;
  using y_t = y_type;
  static constexpr int kVec = vec_width<acc_t, acc_t>;
  static constexpr bool kStores = true;
  static constexpr bool kShifted = false, kClusters = false;
  using Kept = Vec<acc_t, kVec>;

  const NormFwd& n;
  int64_t row;

  __device__ MixedSumRow(const NormFwd& n, int64_t row) : n(n), row(row) {}
  __device__ Kept read(int col, int left, bool aligned) const {
    acc_t x[kVec], residual[kVec];
    load_param(row_at(n.x, n.x_dtype, row * n.x_stride), n.x_dtype, col, left, aligned, x);
    load_param(row_at(n.residual, n.residual_dtype, row * n.residual_stride), n.residual_dtype, col, left, aligned,
               residual);
    add_residual<true>(n, row, col, x, residual);
    store_rounded(n.sum, n.sum_dtype, row * n.hidden + col, left, aligned, x);
    Kept kept;
    narrow(x, kept);
    return kept;
  }
  __device__ Kept read_again(int col, int left, bool aligned) const {
    acc_t x[kVec];
    load_param(row_at(n.sum, n.sum_dtype, row * n.hidden), n.sum_dtype, col, left, aligned, x);
    Kept kept;
    narrow(x, kept);
    return kept;
  }
  __device__ void store_again(acc_t (&y)[kVec], int col, int left, bool aligned) const {
    if (n.residual_out) store_rounded(n.residual_out, n.sum_dtype, row * n.hidden + col, left, aligned, y);
  }
};

}  // namespace fusedops::cuda
