// LayerNorm and RMSNorm on the CPU, forward and backward, also of a sum. Formulas: csrc/cuda/norm_fwd.cuh and
// norm_bwd.cuh.
//
// The variance is the corrected two-pass one (Chan, Golub, LeVeque, "Algorithms for computing the sample variance",
// 1983).
// Sums along a row are fp32 vectors over blocks of columns and double from block to block; dweight and dbias are fp32
// over a block of rows and double from block to block. Blocks depend on the shape alone, so results do not depend on
// the number of threads.
#include "../norm.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace fusedops::cpu {

namespace {

constexpr int64_t kGrain = 16384;                // elements that are worth a thread
constexpr int64_t kSumLength = 32;               // terms a lane adds up before its sum goes on in double
constexpr int64_t kMinRows = 16, kMaxRows = 64;  // rows of a block of dweight and dbias
constexpr int64_t kColumns = 256;                // columns finished together

// Calls f(column, load, store) for all columns of [begin, end), a vector at a time; load and store are whole-vector
// accesses but for the last one, whose lanes past the end read as zero.
struct Whole {
  template <class T>
  FUSEDOPS_ISA_INLINE typename Lanes<T>::V load(const T* p) const {
    return cpu::load(p);
  }
  template <class T>
  FUSEDOPS_ISA_INLINE void store(T* p, const typename Lanes<T>::V& x) const {
    cpu::store(p, x);
  }
  template <class V>
  FUSEDOPS_ISA_INLINE V only_valid(const V& x) const {
    return x;
  }
};
struct Part {
  int64_t n;
  template <class T>
  FUSEDOPS_ISA_INLINE typename Lanes<T>::V load(const T* p) const {
    return load_part(p, n);
  }
  template <class T>
  FUSEDOPS_ISA_INLINE void store(T* p, const typename Lanes<T>::V& x) const {
    store_part(p, n, x);
  }
  template <class V>
  FUSEDOPS_ISA_INLINE V only_valid(V x) const {
    for (size_t i = n; i < sizeof(V) / sizeof(x[0]); ++i) x[i] = 0;
    return x;
  }
};
template <int kLanes, class F>
FUSEDOPS_ISA_INLINE void for_columns(int64_t begin, int64_t end, const F& f) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) f(i, Whole());
  if (i < end) f(i, Part{end - i});
}

// A row as acc_t: itself, or a copy that spares 16-bit elements a conversion in each pass.
template <class T>
FUSEDOPS_ISA_INLINE const typename Lanes<T>::acc_t* widen_row(const T* row, int64_t hidden,
                                                              std::vector<typename Lanes<T>::acc_t>& copy) {
  if constexpr (std::is_same_v<T, typename Lanes<T>::acc_t>) {
    return row;
  } else {
    copy.resize(hidden);
    auto* out = copy.data();
    for_columns<Lanes<T>::kLanes>(0, hidden,
                                  [&](int64_t i, auto access) { access.store(out + i, access.load(row + i)); });
    return out;
  }
}

// A sum of doubles that keeps what each addition rounds away (Neumaier, 1974): fp64 rows have no wider type to add in.
struct Sum {
  double sum = 0, rest = 0;

  FUSEDOPS_ISA_INLINE void add(double x) {
    const double next = sum + x;
    rest += std::abs(sum) >= std::abs(x) ? (sum - next) + x : (x - next) + sum;
    sum = next;
  }
  FUSEDOPS_ISA_INLINE double value() const { return std::isfinite(sum) ? sum + rest : sum; }
};

// Two row sums of what f(column, access, sum_a, sum_b) adds up.
template <class V, int kLanes, class F>
FUSEDOPS_ISA_INLINE void sum_row(int64_t hidden, double& a, double& b, const F& f) {
  constexpr int64_t kBlock = kSumLength * 2 * kLanes;
  Sum total_a, total_b;
  for (int64_t begin = 0; begin < hidden; begin += kBlock) {
    const int64_t end = std::min(hidden, begin + kBlock);
    V sums_a[2] = {}, sums_b[2] = {};  // two of each hide the adder's latency
    int64_t i = begin;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      f(i, Whole(), sums_a[0], sums_b[0]);
      f(i + kLanes, Whole(), sums_a[1], sums_b[1]);
    }
    for_columns<kLanes>(i, end, [&](int64_t col, auto access) { f(col, access, sums_a[0], sums_b[0]); });
    total_a.add(sum_lanes(sums_a[0] + sums_a[1]));
    total_b.add(sum_lanes(sums_b[0] + sums_b[1]));
  }
  a = total_a.value();
  b = total_b.value();
}

// A [hidden] parameter as acc_t (plus an offset), and null for one that is absent.
template <class acc_t>
struct Param {
  std::vector<acc_t> copy;
  const acc_t* data = nullptr;

  Param(const void* p, DType dtype, double offset, int64_t hidden) {
    if (!p) return;
    data = static_cast<const acc_t*>(p);
    if (dtype == (std::is_same_v<acc_t, double> ? DType::f64 : DType::f32) && offset == 0) return;
    copy.resize(hidden);
    with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      if constexpr (std::is_same_v<typename Lanes<T>::acc_t, acc_t>) {
        for_columns<Lanes<T>::kLanes>(0, hidden, [&](int64_t i, auto access) {
          access.store(copy.data() + i, access.load(static_cast<const T*>(p) + i) + static_cast<acc_t>(offset));
        });
      }
    });
    data = copy.data();
  }
};

// ---- add + norm -------------------------------------------------------------------------------------------------

// f(p as a pointer to its elements) where those are computed with in acc_t, as all of a call are.
template <class acc_t, class F>
FUSEDOPS_ISA_INLINE void with_elements(const void* p, DType dtype, const F& f) {
  with_dtype(dtype, [&](auto element) FUSEDOPS_ISA_LAMBDA {
    using T = decltype(element);
    if constexpr (std::is_same_v<typename Lanes<T>::acc_t, acc_t>) f(static_cast<T*>(const_cast<void*>(p)));
  });
}

template <class acc_t>
FUSEDOPS_ISA_INLINE void drop(const Dropout& dropout, int64_t row, int64_t hidden, acc_t* values) {
  acc_t factor[4];
  for (int64_t col = 0; col < hidden; col += 4) {
    dropout_factors(dropout, row, col, factor);
    for (int64_t k = 0; k < std::min<int64_t>(4, hidden - col); ++k) values[col + k] *= factor[k];
  }
}

// The row residual + dropout(x), stored and then read as it was rounded. Each step is a pass over the row, which the
// nearest cache holds: one loop an operand, not one for each mix of dtypes.
template <class acc_t>
FUSEDOPS_ISA_INLINE const acc_t* summed_row(const NormFwd& n, int64_t row, std::vector<acc_t>& copy) {
  constexpr int kLanes = Lanes<acc_t>::kLanes;
  copy.resize(n.hidden);
  acc_t* sum = copy.data();
  with_elements<acc_t>(n.x, n.x_dtype, [&](auto* x) FUSEDOPS_ISA_LAMBDA {
    x += row * n.x_stride;
    for_columns<kLanes>(0, n.hidden,
                        [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA { access.store(sum + i, access.load(x + i)); });
  });
  if (n.dropout.seed) drop(n.dropout, row, n.hidden, sum);
  with_elements<acc_t>(n.residual, n.residual_dtype, [&](auto* residual) FUSEDOPS_ISA_LAMBDA {
    residual += row * n.residual_stride;
    for_columns<kLanes>(0, n.hidden, [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA {
      access.store(sum + i, access.load(sum + i) + access.load(residual + i));
    });
  });
  with_elements<acc_t>(n.sum, n.sum_dtype, [&](auto* out) FUSEDOPS_ISA_LAMBDA {
    out += row * n.hidden;
    for_columns<kLanes>(0, n.hidden, [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA {
      access.store(out + i, access.load(sum + i));
      access.store(sum + i, access.load(out + i));
    });
  });
  return sum;
}

// Rounds a row of acc_t to a dtype.
template <class acc_t>
FUSEDOPS_ISA_INLINE void store_as(void* out, DType dtype, int64_t row, int64_t hidden, const acc_t* from) {
  with_elements<acc_t>(out, dtype, [&](auto* to) FUSEDOPS_ISA_LAMBDA {
    to += row * hidden;
    for_columns<Lanes<acc_t>::kLanes>(
        0, hidden, [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA { access.store(to + i, access.load(from + i)); });
  });
}

// out = grad + dsum, of a row; they may be the same memory.
template <class acc_t>
FUSEDOPS_ISA_INLINE void add_dsum(const NormBwd& n, int64_t row, const acc_t* grad, acc_t* out) {
  with_elements<acc_t>(n.dsum, n.x_dtype, [&](auto* dsum) FUSEDOPS_ISA_LAMBDA {
    dsum += row * n.dsum_stride;
    for_columns<Lanes<acc_t>::kLanes>(0, n.hidden, [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA {
      access.store(out + i, access.load(grad + i) + access.load(dsum + i));
    });
  });
}

// Stores the gradients of both summands; `dx` is the sum's, without what it has from elsewhere.
template <class acc_t>
FUSEDOPS_ISA_INLINE void store_summands(const NormBwd& n, int64_t row, acc_t* dx) {
  if (n.dsum && !n.post_norm) add_dsum(n, row, dx, dx);
  if (n.dx) store_as(n.dx, n.dx_dtype, row, n.hidden, dx);
  if (!n.dinput) return;
  if (n.dropout.seed) drop(n.dropout, row, n.hidden, dx);
  store_as(n.dinput, n.dinput_dtype, row, n.hidden, dx);
}

// ---- forward ----------------------------------------------------------------------------------------------------

template <class acc_t>
struct FwdRows {
  const NormFwd& n;
  const acc_t* weight;
  const acc_t* bias;
  int64_t begin, end;
};

template <class x_t, class y_t>
FUSEDOPS_ISA_INLINE void fwd_rows(const FwdRows<typename Lanes<x_t>::acc_t>& r) {
  using acc_t = typename Lanes<x_t>::acc_t;
  using V = typename Lanes<x_t>::V;
  constexpr int kLanes = Lanes<x_t>::kLanes;
  const int64_t hidden = r.n.hidden;
  std::vector<acc_t> x_copy;
  for (int64_t row = r.begin; row < r.end; ++row) {
    const acc_t* x = nullptr;
    if constexpr (std::is_same_v<x_t, acc_t>) {  // what an add + norm of any dtypes is called with
      if (r.n.residual) x = summed_row(r.n, row, x_copy);
    }
    if (!x) x = widen_row(static_cast<const x_t*>(r.n.x) + row * r.n.x_stride, hidden, x_copy);
    y_t* y = static_cast<y_t*>(r.n.y) + row * hidden;
    double sum = 0, squares = 0, rest = 0, unused;
    if (!r.n.rms) {
      sum_row<V, kLanes>(hidden, sum, unused, [&](int64_t i, auto access, V& s, V&) { s += access.load(x + i); });
    }
    acc_t mean = static_cast<acc_t>(sum / hidden);
    sum_row<V, kLanes>(hidden, squares, rest, [&](int64_t i, auto access, V& s, V& t) {
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
    for_columns<kLanes>(0, hidden, [&](int64_t i, auto access) {
      V v = (access.load(x + i) - mean) * rstd;
      if (r.weight) v *= access.load(r.weight + i);
      if (r.bias) v += access.load(r.bias + i);
      access.store(y + i, v);
      if (r.n.residual_out) access.store(x_copy.data() + i, v);  // where x is
    });
    if (r.n.residual_out) store_as(r.n.residual_out, r.n.sum_dtype, row, hidden, x_copy.data());
  }
}

// ---- backward ---------------------------------------------------------------------------------------------------

template <class acc_t>
struct BwdRows {
  const NormBwd& n;
  const acc_t* weight;
  acc_t* dweight;  // [hidden], sums over these rows; or null
  acc_t* dbias;    // likewise
  int64_t begin, end;
};

template <class x_t, class dy_t>
FUSEDOPS_ISA_INLINE void bwd_rows(const BwdRows<typename Lanes<x_t>::acc_t>& r) {
  using acc_t = typename Lanes<x_t>::acc_t;
  using V = typename Lanes<x_t>::V;
  constexpr int kLanes = Lanes<x_t>::kLanes;
  const int64_t hidden = r.n.hidden;
  std::vector<acc_t> x_copy, dy_copy, dx_copy(r.n.add ? hidden : 0);
  const bool wants_dx = r.n.dx || r.n.dinput;
  if (r.dweight) std::fill_n(r.dweight, hidden, acc_t(0));
  if (r.dbias) std::fill_n(r.dbias, hidden, acc_t(0));
  for (int64_t row = r.begin; row < r.end; ++row) {
    const acc_t* x = widen_row(static_cast<const x_t*>(r.n.x) + row * r.n.x_stride, hidden, x_copy);
    const acc_t* dy = widen_row(static_cast<const dy_t*>(r.n.dy) + row * r.n.dy_stride, hidden, dy_copy);
    if (r.n.post_norm) {
      dy_copy.resize(hidden);
      add_dsum(r.n, row, dy, dy_copy.data());
      dy = dy_copy.data();
    }
    x_t* dx = r.n.dx && !r.n.add ? static_cast<x_t*>(r.n.dx) + row * hidden : nullptr;
    const acc_t mean = r.n.rms ? acc_t(0) : static_cast<const acc_t*>(r.n.mean)[row];
    const acc_t rstd = static_cast<const acc_t*>(r.n.rstd)[row];
    double sum_g = 0, sum_gx = 0;
    if (wants_dx) {
      sum_row<V, kLanes>(hidden, sum_g, sum_gx, [&](int64_t i, auto access, V& s, V& sx) {
        V g = access.load(dy + i);
        if (r.weight) g *= access.load(r.weight + i);
        s += g;
        sx += g * ((access.load(x + i) - mean) * rstd);
      });
    }
    const acc_t mean_g = r.n.rms ? acc_t(0) : static_cast<acc_t>(sum_g / hidden);
    const acc_t mean_gx = static_cast<acc_t>(sum_gx / hidden);
    for_columns<kLanes>(0, hidden, [&](int64_t i, auto access) {
      const V d = access.load(dy + i);
      const V xhat = (access.load(x + i) - mean) * rstd;
      if (r.dweight) access.store(r.dweight + i, access.load(r.dweight + i) + d * xhat);
      if (r.dbias) access.store(r.dbias + i, access.load(r.dbias + i) + d);
      if (wants_dx) {
        V g = d;
        if (r.weight) g *= access.load(r.weight + i);
        g = (g - mean_g - xhat * mean_gx) * rstd;
        if (dx) {
          access.store(dx + i, g);
        } else {
          access.store(dx_copy.data() + i, g);
        }
      }
    });
    if (r.n.add && wants_dx) store_summands(r.n, row, dx_copy.data());
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
      if constexpr (std::is_same_v<typename Lanes<T>::acc_t, acc_t>) {
        acc_t rounded[kColumns];
        for (int64_t j = 0; j < width; ++j) rounded[j] = static_cast<acc_t>(sums[j]);
        for_columns<Lanes<T>::kLanes>(0, width, [&](int64_t i, auto access) {
          access.store(static_cast<T*>(out) + from + i, access.load(rounded + i));
        });
      }
    });
  }
}

// ---- one function per instruction set -----------------------------------------------------------------------------

template <class x_t, class y_t>
void fwd_rows_base(const FwdRows<typename Lanes<x_t>::acc_t>& r) {
  fwd_rows<x_t, y_t>(r);
}
template <class x_t, class dy_t>
void bwd_rows_base(const BwdRows<typename Lanes<x_t>::acc_t>& r) {
  bwd_rows<x_t, dy_t>(r);
}
#ifdef FUSEDOPS_TARGET_AVX2
template <class x_t, class y_t>
FUSEDOPS_TARGET_AVX2 void fwd_rows_avx2(const FwdRows<typename Lanes<x_t>::acc_t>& r) {
  fwd_rows<x_t, y_t>(r);
}
template <class x_t, class dy_t>
FUSEDOPS_TARGET_AVX2 void bwd_rows_avx2(const BwdRows<typename Lanes<x_t>::acc_t>& r) {
  bwd_rows<x_t, dy_t>(r);
}
template <class x_t, class y_t>
FUSEDOPS_TARGET_AVX512 void fwd_rows_avx512(const FwdRows<typename Lanes<x_t>::acc_t>& r) {
  fwd_rows<x_t, y_t>(r);
}
template <class x_t, class dy_t>
FUSEDOPS_TARGET_AVX512 void bwd_rows_avx512(const BwdRows<typename Lanes<x_t>::acc_t>& r) {
  bwd_rows<x_t, dy_t>(r);
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
template <class x_t, class dy_t>
auto pick_bwd() {
#ifdef FUSEDOPS_TARGET_AVX2
  if (active_isa() == Isa::avx512) return &bwd_rows_avx512<x_t, dy_t>;
  if (active_isa() == Isa::avx2) return &bwd_rows_avx2<x_t, dy_t>;
#endif
  return &bwd_rows_base<x_t, dy_t>;
}

template <class x_t, class y_t>
void run_fwd(const NormFwd& n) {
  using acc_t = typename Lanes<x_t>::acc_t;
  const Param<acc_t> weight(n.weight, n.weight_dtype, n.weight_offset, n.hidden);
  const Param<acc_t> bias(n.bias, n.bias_dtype, 0, n.hidden);
  const auto rows = pick_fwd<x_t, y_t>();
  at::parallel_for(0, n.rows, std::max<int64_t>(1, kGrain / n.hidden),
                   [&](int64_t begin, int64_t end) { rows({n, weight.data, bias.data, begin, end}); });
}

template <class x_t, class dy_t>
void run_bwd(const NormBwd& n) {
  using acc_t = typename Lanes<x_t>::acc_t;
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

// f(x element, y element): any two of fp32, fp16 and bf16, or fp64 twice.
template <class F>
void with_pair(DType x, DType y, const F& f) {
  with_dtype(x, [&](auto x_element) {
    with_dtype(y, [&](auto y_element) {
      using A = typename Lanes<decltype(x_element)>::acc_t;
      using B = typename Lanes<decltype(y_element)>::acc_t;
      if constexpr (std::is_same_v<A, B>) f(x_element, y_element);
    });
  });
}

}  // namespace

void norm_fwd(const NormFwd& n) {
  const DType sum = n.x_dtype == DType::f64 ? DType::f64 : DType::f32;
  with_pair(n.residual ? sum : n.x_dtype, n.y_dtype, [&](auto x, auto y) { run_fwd<decltype(x), decltype(y)>(n); });
}

void norm_bwd(const NormBwd& n) {
  with_pair(n.x_dtype, n.dy_dtype, [&](auto x, auto dy) { run_bwd<decltype(x), decltype(dy)>(n); });
}

}  // namespace fusedops::cpu
