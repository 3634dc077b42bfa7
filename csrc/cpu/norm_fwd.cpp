// LayerNorm and RMSNorm forward on the CPU, also of a sum. Formulas: csrc/cuda/norm_fwd.cuh.
//
// The variance is the corrected two-pass one (Chan, Golub, LeVeque, "Algorithms for computing the sample variance",
// 1983).
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "norm_rows.h"

namespace fusedops::cpu {

namespace {

// The row after this one, or null: fetched while this one is computed with, for passes over a row that the nearest
// cache holds would leave memory idle.
struct Ahead {
  const char* row;
  int size;

  FUSEDOPS_ISA_INLINE Ahead(const void* p, DType dtype, int64_t offset)
      : row(p ? static_cast<const char*>(p) + offset * size_of(dtype) : nullptr), size(size_of(dtype)) {}
  FUSEDOPS_ISA_INLINE void fetch(int64_t col) const {
    if (row) __builtin_prefetch(row + col * size);
  }
};

// The row residual + dropout(x), stored and then read as it was rounded. Each step is a pass over the row, which the
// nearest cache holds: one loop an operand, not one for each mix of dtypes. What is stored as acc_t is not rounded:
// that row is made where it stays, so that its memory and x's are waited for together.
template <class V, class acc_t>
FUSEDOPS_ISA_INLINE const acc_t* summed_row(const NormFwd& n, int64_t row, std::vector<acc_t>& copy) {
  const bool in_place = n.sum_dtype == (std::is_same_v<acc_t, double> ? DType::f64 : DType::f32) && !n.residual_out;
  if (!in_place) copy.resize(n.hidden);
  acc_t* sum = in_place ? static_cast<acc_t*>(n.sum) + row * n.hidden : copy.data();
  with_elements<acc_t>(n.x, n.x_dtype, [&](auto* x) FUSEDOPS_ISA_LAMBDA {
    x += row * n.x_stride;
    for_columns<V>(0, n.hidden,
                   [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA { access.store(sum + i, access.load(x + i)); });
  });
  if (n.dropout.seed) drop(n.dropout, row, n.hidden, sum);
  with_elements<acc_t>(n.residual, n.residual_dtype, [&](auto* residual) FUSEDOPS_ISA_LAMBDA {
    residual += row * n.residual_stride;
    for_columns<V>(0, n.hidden, [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA {
      access.store(sum + i, access.load(sum + i) + access.load(residual + i));
    });
  });
  if (in_place) return sum;
  with_elements<acc_t>(n.sum, n.sum_dtype, [&](auto* out) FUSEDOPS_ISA_LAMBDA {
    out += row * n.hidden;
    for_columns<V>(0, n.hidden, [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA {
      access.store(out + i, access.load(sum + i));
      access.store(sum + i, access.load(out + i));
    });
  });
  return sum;
}

template <class acc_t>
struct FwdRows {
  const NormFwd& n;
  const acc_t* weight;
  const acc_t* bias;
  int64_t begin, end;
};

template <class x_t, class y_t, int kBytes>
FUSEDOPS_ISA_INLINE void fwd_rows(const FwdRows<Acc<x_t>>& r) {
  using acc_t = Acc<x_t>;
  using V = Vec<acc_t, kBytes / sizeof(acc_t)>;
  const int64_t hidden = r.n.hidden;
  std::vector<acc_t> x_copy;
  for (int64_t row = r.begin; row < r.end; ++row) {
    const acc_t* x = nullptr;
    if constexpr (std::is_same_v<x_t, acc_t>) {  // what an add + norm of any dtypes is called with
      if (r.n.residual) x = summed_row<V>(r.n, row, x_copy);
    }
    if (!x) x = widen_row<V>(static_cast<const x_t*>(r.n.x) + row * r.n.x_stride, hidden, x_copy);
    y_t* y = static_cast<y_t*>(r.n.y) + row * hidden;
    const int64_t next = std::min(row + 1, r.end - 1);
    const Ahead next_x(r.n.x, r.n.x_dtype, next * r.n.x_stride);
    const Ahead next_residual(r.n.residual, r.n.residual_dtype, next * r.n.residual_stride);
    double sum = 0, squares = 0, rest = 0, unused;
    if (!r.n.rms) {
      sum_row<V>(hidden, sum, unused,
                 [&](int64_t i, auto access, V& s, V&) FUSEDOPS_ISA_LAMBDA { s += access.load(x + i); });
    }
    acc_t mean = static_cast<acc_t>(sum / hidden);
    sum_row<V>(hidden, squares, rest, [&](int64_t i, auto access, V& s, V& t) FUSEDOPS_ISA_LAMBDA {
      next_x.fetch(i);
      next_residual.fetch(i);
      const V d = access.only_valid(access.load(x + i) - mean);
      s += d * d;
      t += d;
    });
    double variance = squares / hidden;
    if (!r.n.rms) {  // what the mean was off by shows as the mean of what is left; in rows with tiny spread it counts
      rest /= hidden;
      variance = std::max(variance - rest * rest, 0.0);
      mean = static_cast<acc_t>(mean + rest);
    }
    const acc_t rstd = static_cast<acc_t>(1.0 / std::sqrt(variance + r.n.eps));
    if (r.n.mean) static_cast<acc_t*>(r.n.mean)[row] = mean;
    if (r.n.rstd) static_cast<acc_t*>(r.n.rstd)[row] = rstd;
    for_columns<V>(0, hidden, [&](int64_t i, auto access) {
      V v = (access.load(x + i) - mean) * rstd;
      if (r.weight) v *= access.load(r.weight + i);
      if (r.bias) v += access.load(r.bias + i);
      access.store(y + i, v);
      if (r.n.residual_out) access.store(x_copy.data() + i, v);  // where x is
    });
    if (r.n.residual_out) store_as<V>(r.n.residual_out, r.n.sum_dtype, row, hidden, x_copy.data());
  }
}

template <class x_t, class y_t>
void fwd_rows_base(const FwdRows<Acc<x_t>>& r) {
  fwd_rows<x_t, y_t, kBaseBytes>(r);
}
#ifdef FUSEDOPS_TARGET_AVX2
template <class x_t, class y_t>
FUSEDOPS_TARGET_AVX2 void fwd_rows_avx2(const FwdRows<Acc<x_t>>& r) {
  fwd_rows<x_t, y_t, kAvx2Bytes>(r);
}
template <class x_t, class y_t>
FUSEDOPS_TARGET_AVX512 void fwd_rows_avx512(const FwdRows<Acc<x_t>>& r) {
  fwd_rows<x_t, y_t, kAvx512Bytes>(r);
}
#endif

template <class x_t, class y_t>
auto pick_fwd() {
#ifdef FUSEDOPS_TARGET_AVX2
  if (active_isa() == Isa::avx512) return &fwd_rows_avx512<x_t, y_t>;
  if (active_isa() == Isa::avx2) return &fwd_rows_avx2<x_t, y_t>;
#endif
  return &fwd_rows_base<x_t, y_t>;
}

template <class x_t, class y_t>
void run_fwd(const NormFwd& n) {
  using acc_t = Acc<x_t>;
  const Param<acc_t> weight(n.weight, n.weight_dtype, n.weight_offset, n.hidden);
  const Param<acc_t> bias(n.bias, n.bias_dtype, 0, n.hidden);
  const auto rows = pick_fwd<x_t, y_t>();
  at::parallel_for(0, n.rows, std::max<int64_t>(1, kGrain / n.hidden),
                   [&](int64_t begin, int64_t end) { rows({n, weight.data, bias.data, begin, end}); });
}

}  // namespace

void norm_fwd(const NormFwd& n) {
  const DType sum = n.x_dtype == DType::f64 ? DType::f64 : DType::f32;
  with_pair(n.residual ? sum : n.x_dtype, n.y_dtype, [&](auto x, auto y) { run_fwd<decltype(x), decltype(y)>(n); });
}

}  // namespace fusedops::cpu
