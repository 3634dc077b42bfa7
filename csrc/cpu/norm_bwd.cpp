// LayerNorm and RMSNorm backward on the CPU, also of a sum. Formulas: csrc/cuda/norm_bwd.cuh.
//
// dweight and dbias are fp32 over a block of rows and double from block to block; blocks depend on the shape alone.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "norm_rows.h"

namespace fusedops::cpu {

namespace {

constexpr int64_t kMinRows = 16, kMaxRows = 64;  // rows of a block of dweight and dbias
constexpr int64_t kColumns = 256;                // columns finished together
constexpr int64_t kWide = 2048;                  // columns; see bwd_rows

// out = grad + dsum, of a row; they may be the same memory.
template <class V, class acc_t>
FUSEDOPS_ISA_INLINE void add_dsum(const NormBwd& n, int64_t row, const acc_t* grad, acc_t* out) {
  with_elements<acc_t>(n.dsum, n.x_dtype, [&](auto* dsum) FUSEDOPS_ISA_LAMBDA {
    dsum += row * n.dsum_stride;
    for_columns<V>(0, n.hidden, [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA {
      access.store(out + i, access.load(grad + i) + access.load(dsum + i));
    });
  });
}

// Stores the gradients of both summands; `dx` is the sum's, without what it has from elsewhere.
template <class V, class acc_t>
FUSEDOPS_ISA_INLINE void store_summands(const NormBwd& n, int64_t row, acc_t* dx) {
  if (n.dsum && !n.post_norm) add_dsum<V>(n, row, dx, dx);
  if (n.dx) store_as<V>(n.dx, n.dx_dtype, row, n.hidden, dx);
  if (!n.dinput) return;
  if (n.dropout.seed) drop(n.dropout, row, n.hidden, dx);
  store_as<V>(n.dinput, n.dinput_dtype, row, n.hidden, dx);
}

template <class acc_t>
struct BwdRows {
  const NormBwd& n;
  const acc_t* weight;
  acc_t* dweight;  // [hidden], sums over these rows; or null
  acc_t* dbias;    // likewise
  int64_t begin, end;
};

// A row of backward: what the last pass over its columns reads, and where dx goes.
template <class x_t>
struct BwdRow {
  const Acc<x_t>*x, *dy;
  x_t* dx;           // null: dx is
  Acc<x_t>* dx_sum;  // a sum's gradient, of which store_summands makes those that are wanted
  Acc<x_t> mean, rstd, mean_g, mean_gx;
};

template <class V, class x_t>
FUSEDOPS_ISA_INLINE void sum_gradients(const BwdRows<Acc<x_t>>& r, BwdRow<x_t>& row) {
  const int64_t hidden = r.n.hidden;
  double sum_g = 0, sum_gx = 0;
  sum_row<V>(hidden, sum_g, sum_gx, [&](int64_t i, auto access, V& s, V& sx) FUSEDOPS_ISA_LAMBDA {
    V g = access.load(row.dy + i);
    if (r.weight) g *= access.load(r.weight + i);
    s += g;
    sx += g * access.only_valid((access.load(row.x + i) - row.mean) * row.rstd);  // lanes past the end may be inf
  });
  row.mean_g = r.n.rms ? Acc<x_t>(0) : static_cast<Acc<x_t>>(sum_g / hidden);
  row.mean_gx = static_cast<Acc<x_t>>(sum_gx / hidden);
}

// kTogether rows at a time pass through dweight and dbias, which wide rows would push out of the nearest cache each
// time. Narrow ones do not, and memory is read fastest one row after the other.
template <class x_t, class dy_t, int kBytes, int kTogether>
FUSEDOPS_ISA_INLINE void bwd_rows(const BwdRows<Acc<x_t>>& r) {
  using acc_t = Acc<x_t>;
  using V = Vec<acc_t, kBytes / sizeof(acc_t)>;
  const int64_t hidden = r.n.hidden;
  std::vector<acc_t> x_copy[kTogether], dy_copy[kTogether], dx_sum[kTogether];
  const bool wants_dx = r.n.dx || r.n.dinput;
  if (r.dweight) std::fill_n(r.dweight, hidden, acc_t(0));
  if (r.dbias) std::fill_n(r.dbias, hidden, acc_t(0));
  for (int64_t first = r.begin; first < r.end; first += kTogether) {
    // One row is a constant, so that what belongs to it stays in registers.
    const int count = kTogether == 1 ? 1 : static_cast<int>(std::min<int64_t>(kTogether, r.end - first));
    BwdRow<x_t> rows[kTogether];
    for (int k = 0; k < count; ++k) {
      const int64_t row = first + k;
      BwdRow<x_t>& own = rows[k];
      own.x = widen_row<V>(static_cast<const x_t*>(r.n.x) + row * r.n.x_stride, hidden, x_copy[k]);
      own.dy = widen_row<V>(static_cast<const dy_t*>(r.n.dy) + row * r.n.dy_stride, hidden, dy_copy[k]);
      if (r.n.post_norm) {
        dy_copy[k].resize(hidden);
        add_dsum<V>(r.n, row, own.dy, dy_copy[k].data());
        own.dy = dy_copy[k].data();
      }
      if (r.n.add) dx_sum[k].resize(hidden);
      own.dx = r.n.dx && !r.n.add ? static_cast<x_t*>(r.n.dx) + row * hidden : nullptr;
      own.dx_sum = dx_sum[k].data();
      own.mean = r.n.rms ? acc_t(0) : static_cast<const acc_t*>(r.n.mean)[row];
      own.rstd = static_cast<const acc_t*>(r.n.rstd)[row];
      if (wants_dx) sum_gradients<V>(r, own);
    }
    const int64_t next = std::min(first + 1, r.end - 1);
    const x_t* next_x = static_cast<const x_t*>(r.n.x) + next * r.n.x_stride;
    const dy_t* next_dy = static_cast<const dy_t*>(r.n.dy) + next * r.n.dy_stride;
    for_columns<V>(0, hidden, [&](int64_t i, auto access) {
      if constexpr (kTogether == 1) {
        __builtin_prefetch(next_x + i);
        __builtin_prefetch(next_dy + i);
      }
      V dweight = {}, dbias = {}, weight = {};
      if (r.dweight) dweight = access.load(r.dweight + i);
      if (r.dbias) dbias = access.load(r.dbias + i);
      if (r.weight) weight = access.load(r.weight + i);
      for (int k = 0; k < count; ++k) {
        const BwdRow<x_t>& row = rows[k];
        const V dy = access.load(row.dy + i);
        const V xhat = (access.load(row.x + i) - row.mean) * row.rstd;
        dweight += dy * xhat;
        dbias += dy;
        if (!wants_dx) continue;
        const V g = r.weight ? dy * weight : dy;
        const V dx = (g - row.mean_g - xhat * row.mean_gx) * row.rstd;
        if (row.dx) {
          access.store(row.dx + i, dx);
        } else {
          access.store(row.dx_sum + i, dx);
        }
      }
      if (r.dweight) access.store(r.dweight + i, dweight);
      if (r.dbias) access.store(r.dbias + i, dbias);
    });
    if (!r.n.add || !wants_dx) continue;
    for (int k = 0; k < count; ++k) store_summands<V>(r.n, first + k, dx_sum[k].data());
  }
}

// Adds the partial rows [blocks][hidden] up, columns [begin, end), into a parameter's gradient.
template <class acc_t>
void finish_columns(const acc_t* partial, int64_t blocks, int64_t hidden, void* out, DType dtype, int64_t begin,
                    int64_t end) {
  for (int64_t from = begin; from < end; from += kColumns) {
    const int64_t width = std::min(kColumns, end - from);
    double sums[kColumns] = {}, low[kColumns] = {};
    for (int64_t b = 0; b < blocks; ++b) {
      const acc_t* row = partial + b * hidden + from;
      for (int64_t j = 0; j < width; ++j) {
        const double sum = sums[j] + row[j];
        if constexpr (std::is_same_v<acc_t, double>) {  // what rounding took (Knuth's two-sum): fp64 has no wider type
          const double added = sum - sums[j];
          low[j] += (sums[j] - (sum - added)) + (row[j] - added);
        }
        sums[j] = sum;
      }
    }
    for (int64_t j = 0; j < width; ++j) {
      if (std::isfinite(low[j])) sums[j] += low[j];
    }
    with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      if constexpr (std::is_same_v<Acc<T>, acc_t>) {
        acc_t rounded[kColumns];
        for (int64_t j = 0; j < width; ++j) rounded[j] = static_cast<acc_t>(sums[j]);
        for_columns<Base<acc_t>>(0, width, [&](int64_t i, auto access) {
          access.store(static_cast<T*>(out) + from + i, access.load(rounded + i));
        });
      }
    });
  }
}

template <class x_t, class dy_t>
void bwd_rows_base(const BwdRows<Acc<x_t>>& r) {
  r.n.hidden < kWide ? bwd_rows<x_t, dy_t, kBaseBytes, 1>(r) : bwd_rows<x_t, dy_t, kBaseBytes, 4>(r);
}
#ifdef FUSEDOPS_TARGET_AVX2
template <class x_t, class dy_t>
FUSEDOPS_TARGET_AVX2 void bwd_rows_avx2(const BwdRows<Acc<x_t>>& r) {
  r.n.hidden < kWide ? bwd_rows<x_t, dy_t, kAvx2Bytes, 1>(r) : bwd_rows<x_t, dy_t, kAvx2Bytes, 4>(r);
}
template <class x_t, class dy_t>
FUSEDOPS_TARGET_AVX512 void bwd_rows_avx512(const BwdRows<Acc<x_t>>& r) {
  r.n.hidden < kWide ? bwd_rows<x_t, dy_t, kAvx512Bytes, 1>(r) : bwd_rows<x_t, dy_t, kAvx512Bytes, 4>(r);
}
#endif

template <class x_t, class dy_t>
auto pick_bwd() {
#ifdef FUSEDOPS_TARGET_AVX2
  if (active_isa() == Isa::avx512) return &bwd_rows_avx512<x_t, dy_t>;
  if (active_isa() == Isa::avx2) return &bwd_rows_avx2<x_t, dy_t>;
#endif
  return &bwd_rows_base<x_t, dy_t>;
}

template <class x_t, class dy_t>
void run_bwd(const NormBwd& n) {
  using acc_t = Acc<x_t>;
  const Param<acc_t> weight(n.weight, n.weight_dtype, n.weight_offset, n.hidden);
  const int64_t block = std::clamp(n.rows / 32, kMinRows, kMaxRows);
  const int64_t blocks = (n.rows + block - 1) / block;
  const auto partials = [&](const void* out) {  // [blocks][hidden]
    return std::unique_ptr<acc_t[]>(out ? new acc_t[blocks * n.hidden] : nullptr);
  };
  const auto dweight = partials(n.dweight), dbias = partials(n.dbias);
  const auto rows = pick_bwd<x_t, dy_t>();
  at::parallel_for(0, blocks, std::max<int64_t>(1, kGrain / (n.hidden * block)), [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      rows({n, weight.data, dweight ? dweight.get() + b * n.hidden : nullptr,
            dbias ? dbias.get() + b * n.hidden : nullptr, b * block, std::min(n.rows, (b + 1) * block)});
    }
  });
  if (!dweight && !dbias) return;
  at::parallel_for(0, n.hidden, std::max<int64_t>(kColumns, kGrain / blocks), [&](int64_t begin, int64_t end) {
    if (dweight) finish_columns(dweight.get(), blocks, n.hidden, n.dweight, n.weight_dtype, begin, end);
    if (dbias) finish_columns(dbias.get(), blocks, n.hidden, n.dbias, n.dbias_dtype, begin, end);
  });
}

}  // namespace

void norm_bwd(const NormBwd& n) {
  with_pair(n.x_dtype, n.dy_dtype, [&](auto x, auto dy) { run_bwd<decltype(x), decltype(dy)>(n); });
}

}  // namespace fusedops::cpu
