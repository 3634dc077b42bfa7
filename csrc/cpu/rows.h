// What kernels over rows share on the CPU: rows read and written a vector at a time in any dtype, and their sums.
//
// Sums along a row are fp32 vectors over blocks of columns and double from block to block. Blocks depend on the shape
// and the instruction set, so results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace fusedops::cpu {

constexpr int64_t kGrain = 16384;   // elements that are worth a thread
constexpr int64_t kSumLength = 32;  // terms a lane adds up before its sum goes on in double

// Accesses of whole vectors.
template <class V>
struct Whole {
  template <class T>
  FUSEDOPS_ISA_INLINE V load(const T* p) const {
    return cpu::load<V>(p);
  }
  template <class T>
  FUSEDOPS_ISA_INLINE void store(T* p, const V& x) const {
    cpu::store(p, x);
  }
  FUSEDOPS_ISA_INLINE V only_valid(const V& x) const { return x; }
  FUSEDOPS_ISA_INLINE V valid_or(const V& x, const V&) const { return x; }
};
// Accesses of the first n lanes.
template <class V>
struct Part {
  int64_t n;
  template <class T>
  FUSEDOPS_ISA_INLINE V load(const T* p) const {
    return load_part<V>(p, n);
  }
  template <class T>
  FUSEDOPS_ISA_INLINE void store(T* p, const V& x) const {
    store_part(p, n, x);
  }
  FUSEDOPS_ISA_INLINE V only_valid(const V& x) const { return valid_or(x, V{}); }
  FUSEDOPS_ISA_INLINE V valid_or(const V& x, const V& other) const {
    using Lane = std::conditional_t<sizeof(Element<V>) == 8, int64_t, int32_t>;
    Vec<Lane, kLanesOf<V>> lane;
    for (int i = 0; i < kLanesOf<V>; ++i) lane[i] = i;
    return lane < static_cast<Lane>(n) ? x : other;
  }
};
// Calls f(column, access) for all columns of [begin, end), a vector at a time; the last one's access may be to a part
// of a vector, whose other lanes read as zero.
template <class V, class F>
FUSEDOPS_ISA_INLINE void for_columns(int64_t begin, int64_t end, const F& f) {
  constexpr int kLanes = kLanesOf<V>;
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) f(i, Whole<V>());
  if (i < end) f(i, Part<V>{end - i});
}

// A row as acc_t: itself, or a copy that spares 16-bit elements a conversion in each pass.
template <class V, class T>
FUSEDOPS_ISA_INLINE const Acc<T>* widen_row(const T* row, int64_t hidden, std::vector<Acc<T>>& copy) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return row;
  } else {
    copy.resize(hidden);
    auto* out = copy.data();
    for_columns<V>(0, hidden, [&](int64_t i, auto access) { access.store(out + i, access.load(row + i)); });
    return out;
  }
}

// f(p as a pointer to its elements) where those are computed with in acc_t, as all of a call are.
template <class acc_t, class F>
FUSEDOPS_ISA_INLINE void with_elements(const void* p, DType dtype, const F& f) {
  with_dtype(dtype, [&](auto element) FUSEDOPS_ISA_LAMBDA {
    using T = decltype(element);
    if constexpr (std::is_same_v<Acc<T>, acc_t>) f(static_cast<T*>(const_cast<void*>(p)));
  });
}

// Rounds a row of acc_t to a dtype.
template <class V, class acc_t>
FUSEDOPS_ISA_INLINE void store_as(void* out, DType dtype, int64_t row, int64_t hidden, const acc_t* from) {
  with_elements<acc_t>(out, dtype, [&](auto* to) FUSEDOPS_ISA_LAMBDA {
    to += row * hidden;
    for_columns<V>(0, hidden,
                   [&](int64_t i, auto access) FUSEDOPS_ISA_LAMBDA { access.store(to + i, access.load(from + i)); });
  });
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
template <class V, class F>
FUSEDOPS_ISA_INLINE void sum_row(int64_t hidden, double& a, double& b, const F& f) {
  constexpr int kLanes = kLanesOf<V>;
  constexpr int kSums = 4;  // of each: they hide the adder's latency
  constexpr int64_t kBlock = kSumLength * kSums * kLanes;
  Sum total_a, total_b;
  for (int64_t begin = 0; begin < hidden; begin += kBlock) {
    const int64_t end = std::min(hidden, begin + kBlock);
    V sums_a[kSums] = {}, sums_b[kSums] = {};
    int64_t i = begin;
    for (; i + kSums * kLanes <= end; i += kSums * kLanes) {
#pragma GCC unroll 4
      for (int k = 0; k < kSums; ++k) f(i + k * kLanes, Whole<V>(), sums_a[k], sums_b[k]);
    }
    for_columns<V>(i, end, [&](int64_t col, auto access) { f(col, access, sums_a[0], sums_b[0]); });
    total_a.add(sum_lanes((sums_a[0] + sums_a[1]) + (sums_a[2] + sums_a[3])));
    total_b.add(sum_lanes((sums_b[0] + sums_b[1]) + (sums_b[2] + sums_b[3])));
  }
  a = total_a.value();
  b = total_b.value();
}

// A vector for code of the base instruction set.
template <class acc_t>
using Base = Vec<acc_t, kBaseBytes / sizeof(acc_t)>;

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
      if constexpr (std::is_same_v<Acc<T>, acc_t>) {
        for_columns<Base<acc_t>>(0, hidden, [&](int64_t i, auto access) {
          access.store(copy.data() + i, access.load(static_cast<const T*>(p) + i) + static_cast<acc_t>(offset));
        });
      }
    });
    data = copy.data();
  }
};

// f(x element, y element): any two of fp32, fp16 and bf16, or fp64 twice.
template <class F>
void with_pair(DType x, DType y, const F& f) {
  with_dtype(x, [&](auto x_element) {
    with_dtype(y, [&](auto y_element) {
      using A = Acc<decltype(x_element)>;
      using B = Acc<decltype(y_element)>;
      if constexpr (std::is_same_v<A, B>) f(x_element, y_element);
    });
  });
}

}  // namespace fusedops::cpu
