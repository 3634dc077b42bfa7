// Rows that begin anywhere. Memory is read and written in whole, aligned vectors, as it has them; a row's columns lie
// `shift` elements past them, the same for all threads of a warp. Two neighbouring vectors make one of columns, and a
// warp's vectors of columns, passed on by one thread, make those of memory. Loads and stores of single elements are
// left at the ends of a row, and where a warp's columns end.
#pragma once

#include "reduce.cuh"
#include "vec.cuh"

namespace fusedops::cuda {

// Elements that `p` lies past the last address where a vector can be.
template <class V, class T>
__device__ inline int shift_of(const T* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) % sizeof(V) / sizeof(T));
}

// The kN elements from the one numbered `shift`, below kN, of two neighbouring vectors.
template <class T, int kN>
__device__ inline Vec<T, kN> join_vectors(const Vec<T, kN>& low, const Vec<T, kN>& high, int shift) {
  constexpr int kWords = sizeof(low.words) / 4;
  const int bits = shift * static_cast<int>(8 * sizeof(T));
  unsigned words[2 * kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = low.words[i];
    words[kWords + i] = high.words[i];
  }
#pragma unroll
  for (int step = kWords / 2; step > 0; step /= 2) {
    if (bits & 32 * step) {
#pragma unroll
      for (int i = 0; i < kWords + step; ++i) words[i] = words[i + step];
    }
  }
  Vec<T, kN> joined;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    joined.words[i] = sizeof(T) < 4 ? __funnelshift_r(words[i], words[i + 1], bits) : words[i];  // by bits % 32
  }
  return joined;
}

// Of an aligned vector the first `left` elements, zeros for the others. Nothing past them is touched.
template <class T, int kN>
__device__ inline Vec<T, kN> load_part(const T* p, int left) {
  return load_row<T, kN>(p, 0, left, left >= kN);
}

// The vector of columns from `col` on, in two steps, so that many loads can be under way; zero past the row's end.
template <class T, int kN>
struct ShiftedLoad {
  Vec<T, kN> low, high;

  __device__ void start(const T* row, int shift, int col, int left) {
    low = load_part<T, kN>(row + col - shift, left + shift);
    high = load_part<T, kN>(row + col - shift + kN, shift > 0 ? left + shift - kN : 0);
  }
  __device__ Vec<T, kN> take(int shift) const { return join_vectors(low, high, shift); }
};

// What a warp stores of a row: vectors of columns [first, last), all threads together, in ascending order.
template <class T, int kN>
class ShiftedStore {
 public:
  using V = Vec<T, kN>;

  __device__ ShiftedStore(T* row, int first, int last)
      : row_(row), first_(first), last_(last), shift_(shift_of<V>(row)), passed_on_{} {}

  // Each thread's vector; `col` is its first column, those of neighbouring threads kN apart.
  __device__ void operator()(int col, const V& v) {
    V stored = v;
    if (shift_ > 0) {
      const int lane = threadIdx.x % kWarp;
      V left;
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(v.words) / 4); ++i) {
        const unsigned from_left = __shfl_sync(kFullWarp, v.words[i], (lane + kWarp - 1) % kWarp);
        left.words[i] = lane == 0 ? passed_on_.words[i] : from_left;
        passed_on_.words[i] = from_left;  // the first thread's is what the last thread has left over
      }
      stored = join_vectors(left, v, kN - shift_);
    }
    put(col - shift_, stored);
  }
  // After the last vector of columns, those of `col` and so on being the first not stored.
  __device__ void finish(int col) {
    if (shift_ > 0 && threadIdx.x % kWarp == 0) put(col - shift_, join_vectors(passed_on_, V{}, kN - shift_));
  }

 private:
  __device__ void put(int col, const V& v) {
    if (col >= first_ && col + kN <= last_) {
      store_whole(row_ + col, bit_cast<typename V::Raw>(v));
      return;
    }
    T elements[kN];
    memcpy(elements, &v, sizeof v);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (col + j >= first_ && col + j < last_) row_[col + j] = elements[j];
    }
  }

  T* row_;
  int first_, last_, shift_;
  V passed_on_;
};

}  // namespace fusedops::cuda
