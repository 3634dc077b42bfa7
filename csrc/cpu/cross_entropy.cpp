// Cross-entropy on the CPU. Formulas: csrc/cross_entropy.h. A row is read twice forward, for its largest logit and for
// the sum of exponentials; the second time it lies in a cache.
#include "../cross_entropy.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "exp.h"
#include "rows.h"

namespace fusedops::cpu {

namespace {

template <class acc_t>
acc_t at_or(const void* p, int64_t i, acc_t other) {
  return p ? static_cast<const acc_t*>(p)[i] : other;
}

// A row's logits, capped where they are, in acc_t: themselves, or a copy.
template <class V, class x_t>
FUSEDOPS_ISA_INLINE const Acc<x_t>* logits_of(const CrossEntropy& c, int64_t row, std::vector<Acc<x_t>>& copy) {
  using acc_t = Acc<x_t>;
  const x_t* x = static_cast<const x_t*>(c.x) + row * c.x_stride;
  const acc_t* z = widen_row<V>(x, c.classes, copy);
  if (c.softcap == 0) return z;
  copy.resize(c.classes);
  const acc_t cap = static_cast<acc_t>(c.softcap);
  for (int64_t i = 0; i < c.classes; ++i) copy[i] = cap * std::tanh(z[i] / cap);
  return copy.data();
}

template <class V, class acc_t>
FUSEDOPS_ISA_INLINE acc_t largest(const acc_t* z, int64_t classes) {
  V best = V{} + std::numeric_limits<acc_t>::lowest();  // not -inf: of a row of those, z - m would be NaN too early
  for_columns<V>(0, classes, [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA {
    const V v = access.valid_or(access.load(z + i), best);
    best = v > best ? v : best;
  });
  acc_t found = best[0];
  for (int k = 1; k < kLanesOf<V>; ++k) found = best[k] > found ? best[k] : found;
  return found;
}

struct Range {
  int64_t begin, end;  // of rows
};

template <class x_t, int kBytes>
FUSEDOPS_ISA_INLINE void run_rows(const CrossEntropyFwd& f, const Range& range) {
  using acc_t = Acc<x_t>;
  using V = Vec<acc_t, kBytes / sizeof(acc_t)>;
  const CrossEntropy& c = f.c;
  const auto* weight = static_cast<const acc_t*>(c.weight);
  const double all_weights = at_or<acc_t>(c.weights, 0, static_cast<acc_t>(c.classes));
  auto *losses = static_cast<acc_t*>(f.losses), *stats = static_cast<acc_t*>(f.stats);
  std::vector<acc_t> copy;
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t target = c.target[row];
    if (target == c.ignore_index) {
      losses[row] = 0;
      if (stats) stats[2 * row] = stats[2 * row + 1] = 0;
      continue;
    }
    const acc_t* z = logits_of<V, x_t>(c, row, copy);
    const acc_t m = largest<V>(z, c.classes);
    double exps = 0, logits = 0;
    sum_row<V>(c.classes, exps, logits, [&](int64_t i, auto access, V& s, V& t) FUSEDOPS_ISA_LAMBDA {
      const V v = access.load(z + i);
      s += access.only_valid(cpu::exp<V>(v - m));
      if (c.smoothing != 0) t += weight ? v * access.load(weight + i) : v;
    });
    const double log_sum = std::log(exps), lse = m + log_sum;
    double loss =
        (1 - c.smoothing) * at_or<acc_t>(weight, target, 1) * (log_sum + (static_cast<double>(m) - z[target]));
    if (c.smoothing != 0) loss += c.smoothing / c.classes * (all_weights * lse - logits);
    if (c.z_loss != 0) loss += c.z_loss * lse * lse;
    losses[row] = static_cast<acc_t>(loss);
    if (stats) {
      stats[2 * row] = m;
      stats[2 * row + 1] = static_cast<acc_t>(log_sum);
    }
  }
}

template <class x_t, int kBytes>
FUSEDOPS_ISA_INLINE void run_rows(const CrossEntropyBwd& b, const Range& range) {
  using acc_t = Acc<x_t>;
  using V = Vec<acc_t, kBytes / sizeof(acc_t)>;
  const CrossEntropy& c = b.c;
  const auto* weight = static_cast<const acc_t*>(c.weight);
  const double all_weights = at_or<acc_t>(c.weights, 0, static_cast<acc_t>(c.classes));
  const double share = c.smoothing / c.classes;
  const auto* dloss = static_cast<const acc_t*>(b.dloss);
  std::vector<acc_t> copy;
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t target = c.target[row];
    x_t* dx = static_cast<x_t*>(b.dx) + row * b.dx_stride;
    if (target == c.ignore_index) {
      std::fill_n(dx, c.classes, x_t{});
      continue;
    }
    const acc_t* z = logits_of<V, x_t>(c, row, copy);
    const acc_t m = static_cast<const acc_t*>(b.stats)[2 * row],
                log_sum = static_cast<const acc_t*>(b.stats)[2 * row + 1];
    const double own = (1 - c.smoothing) * at_or<acc_t>(weight, target, 1);
    const double a = own + share * all_weights + 2 * c.z_loss * (static_cast<double>(m) + log_sum);
    double g = dloss[c.reduction == Reduction::none ? row : 0];
    if (c.reduction == Reduction::mean) g /= *static_cast<const acc_t*>(b.total_weight);
    const auto slope = [&](auto v) FUSEDOPS_ISA_LAMBDA {
      const auto y = v / static_cast<acc_t>(c.softcap);
      return 1 - y * y;
    };
    double at_target =
        a * std::exp(static_cast<double>(z[target]) - m - log_sum) - share * at_or<acc_t>(weight, target, 1) - own;
    if (c.softcap != 0) at_target *= slope(z[target]);
    const acc_t scale = static_cast<acc_t>(g), of_exp = static_cast<acc_t>(a), even = static_cast<acc_t>(share);
    for_columns<V>(0, c.classes, [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA {
      const V v = access.load(z + i);
      V d = of_exp * cpu::exp<V>((v - m) - log_sum);
      if (c.smoothing != 0) d -= weight ? even * access.load(weight + i) : V{} + even;
      d *= scale;
      if (c.softcap != 0) d *= slope(v);
      access.store(dx + i, d);
    });
    store_part(dx + target, 1, V{} + static_cast<acc_t>(g * at_target));
  }
}

// The mean or the sum of the losses, one after another: no number of threads changes it.
template <class acc_t>
void reduce(const CrossEntropyFwd& f) {
  const CrossEntropy& c = f.c;
  Sum losses, weights;
  for (int64_t row = 0; row < c.rows; ++row) {
    losses.add(static_cast<const acc_t*>(f.losses)[row]);
    if (c.target[row] != c.ignore_index) weights.add(at_or<acc_t>(c.weight, c.target[row], 1));
  }
  const bool mean = c.reduction == Reduction::mean;
  *static_cast<acc_t*>(f.loss) = static_cast<acc_t>(losses.value() / (mean ? weights.value() : 1));
  if (mean) *static_cast<acc_t*>(f.total_weight) = static_cast<acc_t>(weights.value());
}

template <class x_t, class Args>
void rows_base(const Args& args, const Range& range) {
  run_rows<x_t, kBaseBytes>(args, range);
}
#ifdef FUSEDOPS_TARGET_AVX2
template <class x_t, class Args>
FUSEDOPS_TARGET_AVX2 void rows_avx2(const Args& args, const Range& range) {
  run_rows<x_t, kAvx2Bytes>(args, range);
}
template <class x_t, class Args>
FUSEDOPS_TARGET_AVX512 void rows_avx512(const Args& args, const Range& range) {
  run_rows<x_t, kAvx512Bytes>(args, range);
}
#endif

template <class x_t, class Args>
auto pick_rows() {
#ifdef FUSEDOPS_TARGET_AVX2
  if (active_isa() == Isa::avx512) return &rows_avx512<x_t, Args>;
  if (active_isa() == Isa::avx2) return &rows_avx2<x_t, Args>;
#endif
  return &rows_base<x_t, Args>;
}

template <class Args>
void run_all_rows(const Args& args) {
  with_dtype(args.c.x_dtype, [&](auto x) {
    const auto rows = pick_rows<decltype(x), Args>();
    at::parallel_for(0, args.c.rows, std::max<int64_t>(1, kGrain / args.c.classes),
                     [&](int64_t begin, int64_t end) { rows(args, {begin, end}); });
  });
}

}  // namespace

int64_t find_wrong_target(const CrossEntropy& c) {
  for (int64_t row = 0; row < c.rows; ++row) {
    const int64_t target = c.target[row];
    if (target != c.ignore_index && (target < 0 || target >= c.classes)) return row;
  }
  return -1;
}

void cross_entropy_fwd(const CrossEntropyFwd& f) {
  run_all_rows(f);
  if (f.loss) f.c.x_dtype == DType::f64 ? reduce<double>(f) : reduce<float>(f);
}

void cross_entropy_bwd(const CrossEntropyBwd& b) { run_all_rows(b); }

}  // namespace fusedops::cpu
