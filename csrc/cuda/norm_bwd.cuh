// Backward of LayerNorm and RMSNorm:
//   x̂ = (x - mean)·rstd,  g = dy·w,  dx = rstd·(g - mean(g) - x̂·mean(g·x̂))   (RMSNorm: without mean(g))
//   dweight = Σ_rows dy·x̂,  dbias = Σ_rows dy
//
// Persistent blocks. Groups of threads take tiles of kRows rows; x and dy of the next tiles are copied to shared memory
// while a tile is worked on, and each thread reads back only what it copied itself, so no barrier guards them. All sums
// of a tile go through one exchange and one barrier. dweight and dbias stay in registers for all rows of a block, or,
// of many rows, move to shared memory every few of them, so that no thread adds up too many numbers one after another.
// A block then writes one partial row; a second kernel adds the partial rows up in a fixed order. Where shared memory
// has no room for the sums, or rows are very many, several rounds of blocks share them. Bytes per element: x + dy + dx
// (+ dsum, + dinput). Rows that begin anywhere are shifted as they are
// read back (shifted.cuh); rows too wide for a block have a cluster of blocks, which add up their sums of a row. What
// is too wide for that as well, an add + norm that is not aligned, too many rows to count in 32 bits and a mix of
// dtypes that is compiled for no stage are read twice by kernels of their own.
//
// In an add + norm x is the sum that forward stored. A gradient dsum that it has from elsewhere is staged beside x and
// dy and added to dx, which is then the residual's gradient; the input's is the same times what forward multiplied the
// input with, and is written only where dropout or another dtype makes it another tensor. In post-norm mode that
// gradient is one of y, and is added to dy before all else.
#pragma once

#include "../norm.h"
#include "dispatch.h"
#include "launch.h"
#include "reduce.cuh"
#include "shifted.cuh"
#include "vec.cuh"

namespace fusedops::cuda {

struct BwdParams {
  NormBwd n;
  int hidden;
  float inverse_hidden;
  bool aligned;      // every access of a whole vector is an aligned one; the wide kernels do without
  int partial_rows;  // rows of each of dweight's and dbias' partial sums
  // Not of the wide kernels:
  uint64_t x_bytes, dy_bytes, dsum_bytes;  // from a row to the next
  int blocks;                              // of a row, a cluster; then there is one group
  int stages;                              // tiles in shared memory a group
  int tiles_a_sum;                         // that join in registers before they join those in shared memory; 0: all
};

// Threads of a block, hence registers of a thread: what holds the sums of kElems elements without a spill. From compute
// capability 10 on the compiler keeps more in registers.
template <class x_t, class dy_t, bool kAdd, int kElems>
__host__ __device__ constexpr int bwd_max_threads(int major) {
  if (sizeof(x_t) == 8 || kElems > 8) return 512;
  return kAdd || sizeof(x_t) < sizeof(dy_t) || major >= 10 ? 768 : 1024;
}
#ifdef __CUDA_ARCH__
constexpr int kCompiledMajor = __CUDA_ARCH__ / 100;
#else
constexpr int kCompiledMajor = 0;
#endif

// Tiles in shared memory a group; more bytes under way are slower (bf16 8192 63 % of the copy with four, 68 with two;
// H200). Of the widest rows one has to do where there is no room for two.
constexpr int kBwdStages = 2;
template <int kElems>
constexpr int kBwdLeastStages = kElems > 16 ? 1 : kBwdStages;
// Whether rows may have several blocks: those of the widest shape, and shifted ones.
template <int kElems, bool kShifted>
constexpr bool kHasClusters = kShifted || kElems > 24;

// Shared memory of the main kernel, for the kernel and its launcher:
//   weight      acc_t [cols], in the order in which a warp's threads read it: [warp][vector][part of 16 bytes][thread]
//   x, dy, dsum [group][stage][warp][tensor][row][vector][thread]; dsum: in an add + norm; a row of shifted ones, which
//               is kept as memory has it, is a vector longer
//   after the last row, in place of the latter: acc_t [group][cols], the groups' sums
//   dweight, dbias acc_t [group][sum][cols], as the weight, where there are more tiles than registers may add up
template <class x_t, class dy_t, bool kRms, bool kAdd, int kElems, int kRows, bool kShifted = false>
struct BwdSmem {
  using acc_t = acc_of<x_t>;
  // Of a warp's part of a stage: bytes of a row of x and of dy, where dy and dsum begin, and where it ends.
  static constexpr int kXRow = kElems * kWarp * static_cast<int>(sizeof(x_t)) + (kShifted ? 16 : 0);
  static constexpr int kDyRow = kElems * kWarp * static_cast<int>(sizeof(dy_t)) + (kShifted ? 16 : 0);
  static constexpr int kDy = kRows * kXRow;
  static constexpr int kDsum = kDy + kRows * kDyRow;
  static constexpr int kWarpBytes = kDsum + (kAdd ? kDy : 0);
  int cols;  // of a row, padded to what its threads hold

  __host__ __device__ explicit BwdSmem(int threads) : cols(threads * kElems) {}
  __host__ __device__ int weight_bytes() const { return cols * static_cast<int>(sizeof(acc_t)); }
  __host__ __device__ int stage_bytes() const { return cols / (kElems * kWarp) * kWarpBytes; }
  __host__ __device__ int ring_bytes(int groups, int stages) const {
    const int ring = stages * stage_bytes(), sums = weight_bytes();
    return groups * (ring > sums ? ring : sums);
  }
  __host__ __device__ int sums_bytes() const { return (kRms ? 1 : 2) * weight_bytes(); }
  __host__ __device__ int bytes(int groups, int stages, bool sums) const {
    return weight_bytes() + ring_bytes(groups, stages) + sums * groups * sums_bytes();
  }
};

// Elements of an access of 16 bytes, or of a thread's kN where those are fewer.
template <class acc_t, int kN>
constexpr int kPartOf = 16 / sizeof(acc_t) < kN ? 16 / sizeof(acc_t) : kN;

// A thread's kN elements, as parts of 16 bytes which lie kApart parts apart: 1, or a warp's width as the weight's do.
template <int kApart, int kN, class acc_t>
__device__ inline void store_parts(acc_t* p, const acc_t (&x)[kN]) {
  constexpr int kPart = kPartOf<acc_t, kN>;
#pragma unroll
  for (int part = 0; part < kN / kPart; ++part) {
    Vec<acc_t, kPart> v;
    memcpy(&v, x + part * kPart, sizeof v);
    store(p + part * kPart * kApart, v);
  }
}

template <int kN, class acc_t>
__device__ inline void load_parts(const acc_t* p, acc_t (&out)[kN]) {
  constexpr int kPart = kPartOf<acc_t, kN>;
#pragma unroll
  for (int part = 0; part < kN / kPart; ++part) {
    const auto v = load<Vec<acc_t, kPart>>(p + part * kPart * kWarp);
    memcpy(out + part * kPart, &v, sizeof v);
  }
}

template <int kN, class acc_t>
__device__ inline void add_parts(const acc_t* p, acc_t (&x)[kN]) {
  acc_t there[kN];
  load_parts(p, there);
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] += there[j];
}

// Moves a sum there, to what is there already.
template <int kN, class acc_t>
__device__ inline void move_parts(acc_t* p, acc_t (&x)[kN]) {
  add_parts(p, x);
  store_parts<kWarp>(p, x);
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] = 0;
}

// Adds up kN sums of a cluster's blocks, in their order; every thread gets all of them.
template <int kN, class acc_t>
__device__ inline void sum_blocks(acc_t (&sums)[kN], acc_t (*exchange)[kN], int blocks) {
  if (threadIdx.x < blocks) {
#pragma unroll
    for (int k = 0; k < kN; ++k) store_to_block(&exchange[cluster_rank()][k], threadIdx.x, sums[k]);
  }
  sync_cluster();
#pragma unroll
  for (int k = 0; k < kN; ++k) {
    sums[k] = 0;
    for (int block = 0; block < blocks; ++block) sums[k] += exchange[block][k];
  }
}

// Stores the gradients of both summands of a row of an add + norm; `dx` is that of the sum.
template <int kN, class acc_t>
__device__ inline void store_summands(const BwdParams& p, int64_t row, int col, bool aligned, acc_t (&dx)[kN]) {
  const int64_t at = row * p.hidden + col;
  const int left = p.hidden - col;
  acc_t dinput[kN];
#pragma unroll
  for (int j = 0; j < kN; ++j) dinput[j] = dx[j];
  if (p.n.dx) store_rounded(p.n.dx, p.n.dx_dtype, at, left, aligned, dx);
  if (!p.n.dinput) return;
  if (p.n.dropout.seed) {
    acc_t factor[kN];
    dropout_factors(p.n.dropout, row, col, factor);
#pragma unroll
    for (int j = 0; j < kN; ++j) dinput[j] *= factor[j];
  }
  store_rounded(p.n.dinput, p.n.dinput_dtype, at, left, aligned, dinput);
}

// blockDim.x threads a row, each with kElems of its elements; blockDim.y groups, each with its own rows and barrier.
// Every access is of a whole, aligned vector. Shifted rows may begin anywhere: threads read what others of their warp
// copied.
template <class x_t, class dy_t, bool kRms, bool kAdd, int kElems, int kRows, bool kShifted = false>
__global__ void __launch_bounds__(bwd_max_threads<x_t, dy_t, kAdd, kElems>(kCompiledMajor), 1)
    norm_bwd_kernel(const BwdParams p) {
  using acc_t = acc_of<x_t>;
  constexpr int kVec = vec_width<x_t, dy_t>;
  constexpr int kVecs = kElems / kVec;
  constexpr int kSums = kRms ? kRows : 2 * kRows;  // a tile's Σ g·x̂, then its Σ g
  using XVec = Vec<x_t, kVec>;
  using DyVec = Vec<dy_t, kVec>;
  using Smem = BwdSmem<x_t, dy_t, kRms, kAdd, kElems, kRows, kShifted>;
  static_assert(!kShifted || (!kAdd && kRows == 1));
  unsigned char* smem = dynamic_smem();
  __shared__ Exchange<acc_t, kSums> exchange[2];
  __shared__ acc_t of_blocks[2][kMostBlocks][kSums];
  static_assert(sizeof exchange + sizeof of_blocks <= kStaticSmem);

  const Smem layout(blockDim.x);
  constexpr bool kClusters = kHasClusters<kElems, kShifted>;
  const int begin = kClusters && p.blocks > 1 ? cluster_rank() * layout.cols : 0;  // of the block's columns
  const unsigned block = kClusters ? blockIdx.x / p.blocks : blockIdx.x;
  const unsigned blocks = kClusters ? gridDim.x / p.blocks : gridDim.x;
  if constexpr (kClusters) {
    if (p.blocks > 1) start_in_cluster();
  }
  const int stages = kBwdLeastStages<kElems> < kBwdStages ? p.stages : kBwdStages;
  const int group = threadIdx.y, warps = blockDim.x / kWarp;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  // A warp's columns lie together: a thread's vectors are a constant apart.
  const int warp_first = begin + warp * kElems * kWarp, first_col = warp_first + lane * kVec;
  const auto column = [&](int i) { return first_col + i * kWarp * kVec; };
  const auto inside = [&](int i) { return column(i) < p.hidden; };

  acc_t* weight = reinterpret_cast<acc_t*>(smem);
  constexpr int kPart = kPartOf<acc_t, kVec>;
  const int my_parts = warp * kVecs * kWarp * kVec + lane * kPart;
  const acc_t* my_weight = weight + my_parts;
  unsigned char* ring = smem + layout.weight_bytes() + group * stages * layout.stage_bytes() + warp * Smem::kWarpBytes;
  // Slots of this thread; `stage` is an offset in bytes.
  const auto x_slot = [&](int stage, int q, int i) {
    return ring + stage + q * Smem::kXRow + (lane + i * kWarp) * static_cast<int>(sizeof(XVec));
  };
  const auto dy_slot = [&](int stage, int q, int i) {
    return ring + stage + Smem::kDy + q * Smem::kDyRow + (lane + i * kWarp) * static_cast<int>(sizeof(DyVec));
  };
  const auto dsum_slot = [&](int stage, int q, int i) { return x_slot(stage, q, i) + Smem::kDsum; };
  // Row numbers of 32 bits, so that an address takes few instructions.
  const int rows = static_cast<int>(p.n.rows);
  const int step = blocks * blockDim.y * kRows;
  // Neighbouring tiles go to different blocks, so that those of the last, incomplete round load all SMs alike.
  const int first = (group * blocks + block) * kRows;
  const auto my_row = [&](const void* tensor, int element_bytes) {
    return static_cast<const unsigned char*>(tensor) + first_col * element_bytes;
  };
  const unsigned char* const x_rows = my_row(p.n.x, sizeof(x_t));
  const unsigned char* const dy_rows = my_row(p.n.dy, sizeof(dy_t));
  const auto row_of = [](const unsigned char* rows, int row, uint64_t bytes) {
    return rows + static_cast<unsigned>(row) * bytes;
  };
  // Of row number `row`, in a stage: a vector of x, and the elements of one of dy by index, which are converted where
  // they are used, or registers spill.
  const auto x_at = [&](int stage, int row, int q, int i) {
    const unsigned char* slot = x_slot(stage, q, i);
    if constexpr (kShifted) {
      const auto* at = reinterpret_cast<const x_t*>(row_of(x_rows, row + q, p.x_bytes));
      return join_vectors(load<XVec>(slot), load<XVec>(slot + sizeof(XVec)), shift_of<XVec>(at));
    } else {
      return load<XVec>(slot);
    }
  };
  const auto dy_at = [&](int stage, int row, int q, int i) {
    const unsigned char* slot = dy_slot(stage, q, i);
    auto dy = load<DyVec>(slot);
    if constexpr (kShifted) {
      const auto* at = reinterpret_cast<const dy_t*>(row_of(dy_rows, row + q, p.dy_bytes));
      dy = join_vectors(dy, load<DyVec>(slot + sizeof(DyVec)), shift_of<DyVec>(at));
    }
    if constexpr (kAdd) {
      acc_t d[kVec];
      widen(dy, d);
      if (p.n.post_norm) add_widened(load<XVec>(dsum_slot(stage, q, i)), d);
      return [d](int j) { return d[j]; };
    } else {
      return [dy](int j) { return element(dy, j); };
    }
  };

  // What lies past the last row or a row's end is zero.
  const auto fetch_tile = [&](int row, int stage) {
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      const unsigned char* x_row = row_of(x_rows, row + q, p.x_bytes);
      const unsigned char* dy_row = row_of(dy_rows, row + q, p.dy_bytes);
      if constexpr (kShifted) {
        const bool valid = row + q < rows;
        const auto fetch = [&](auto example, unsigned char* slot, const unsigned char* from) {
          using T = typename decltype(example)::type;
          using V = Vec<T, kVec>;
          const int shift = shift_of<V>(reinterpret_cast<const T*>(from));
          const int left = valid ? p.hidden - first_col + shift : 0;
          // The first thread brings what the last needs beyond its own.
#pragma unroll
          for (int i = 0; i <= kVecs; ++i) {
            if (i == kVecs && lane > 0) break;
            const int bytes = min(max(left - i * kWarp * kVec, 0), kVec) * static_cast<int>(sizeof(T));
            start_copy_of<sizeof(V)>(slot + i * kWarp * sizeof(V), from - shift * sizeof(T) + i * kWarp * sizeof(V),
                                     bytes);
          }
        };
        fetch(Type<x_t>(), x_slot(stage, q, 0), x_row);
        fetch(Type<dy_t>(), dy_slot(stage, q, 0), dy_row);
      } else {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          const bool valid = row + q < rows && inside(i);
          start_copy<sizeof(XVec)>(x_slot(stage, q, i), x_row + i * kWarp * sizeof(XVec), valid);
          start_copy<sizeof(DyVec)>(dy_slot(stage, q, i), dy_row + i * kWarp * sizeof(DyVec), valid);
          if (kAdd && p.n.dsum) {
            const unsigned char* dsum_row = row_of(my_row(p.n.dsum, sizeof(x_t)), row + q, p.dsum_bytes);
            start_copy<sizeof(XVec)>(dsum_slot(stage, q, i), dsum_row + i * kWarp * sizeof(XVec), valid);
          }
        }
      }
    }
    commit_copies();
  };
  const auto wait_ahead = [&] { stages == 1 ? wait_copies<0>() : wait_copies<1>(); };
  const auto load_stats = [&](int row, acc_t(&mean)[kRows], acc_t(&rstd)[kRows]) {
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      const bool valid = row + q < rows;
      mean[q] = !kRms && valid ? (static_cast<const acc_t*>(p.n.mean) + row)[q] : acc_t(0);
      rstd[q] = valid ? (static_cast<const acc_t*>(p.n.rstd) + row)[q] : acc_t(0);
    }
  };

  // The weight comes as it is, by way of the stage that is filled last: read one by one, its elements took 2 us at 8192
  // bf16 columns and 5 at fp32's, and whole vectors of it in registers spilled.
  const int last_stage = (stages - 1) * layout.stage_bytes();
  unsigned char* raw_weight = smem + layout.weight_bytes() + last_stage;
  constexpr int kWeightBytes = 8;  // what is aligned to that in every mix of dtypes
  const bool copies_weight = !kShifted || reinterpret_cast<uintptr_t>(p.n.weight) % kWeightBytes == 0;
  const int here = kClusters ? min(p.hidden - begin, layout.cols) : p.hidden;  // columns of the block
  const unsigned char* weight_at = static_cast<const unsigned char*>(p.n.weight) + begin * size_of(p.n.weight_dtype);
  if (p.n.weight && copies_weight) {
    const int bytes = here * size_of(p.n.weight_dtype);
#pragma unroll 1
    for (int at = (group * blockDim.x + threadIdx.x) * kWeightBytes; at < bytes;
         at += blockDim.x * blockDim.y * kWeightBytes) {
      const unsigned char* from = weight_at + at;
      if constexpr (kShifted) {
        start_copy_of<kWeightBytes>(raw_weight + at, from, min(bytes - at, kWeightBytes));
      } else {
        start_copy<kWeightBytes>(raw_weight + at, from);
      }
    }
  }
  commit_copies();
  if (stages > 1) fetch_tile(first, 0);
  wait_ahead();
  __syncthreads();
  for (int col = group * blockDim.x + threadIdx.x; col < layout.cols; col += blockDim.x * blockDim.y) {
    acc_t w = 0;
    if (col < here) {
      const void* from = copies_weight ? raw_weight : weight_at;
      w = p.n.weight ? load_element(from, p.n.weight_dtype, col, acc_t(0)) + static_cast<acc_t>(p.n.weight_offset)
                     : acc_t(1);
    }
    const int part = col % kVec / kPart, thread = col / kVec % kWarp, vector = col / (kVec * kWarp);
    weight[((vector * (kVec / kPart) + part) * kWarp + thread) * kPart + col % kPart] = w;
  }
  acc_t mean[kRows], rstd[kRows];
  load_stats(first, mean, rstd);
  acc_t dweight[kVecs][kVec] = {}, dbias[kVecs][kVec] = {};
  const acc_t inverse_hidden = sizeof(acc_t) == 8 ? acc_t(1) / p.hidden : acc_t(p.inverse_hidden);
  __syncthreads();

  // Of many tiles, dweight's and dbias' vectors number i, of those that are no longer in registers.
  const auto kept = [&](int i, bool second) {
    unsigned char* sums = smem + layout.weight_bytes() + layout.ring_bytes(blockDim.y, stages);
    return reinterpret_cast<acc_t*>(sums + group * layout.sums_bytes()) + second * layout.cols + my_parts +
           i * kWarp * kVec;
  };
  if (p.tiles_a_sum) {
#pragma unroll 1
    for (int i = 0; i < (kRms ? 1 : 2) * kVecs; ++i) store_parts<kWarp>(kept(i % kVecs, i >= kVecs), dweight[0]);
  }

  if constexpr (kClusters) {
    if (p.blocks > 1) wait_for_cluster();
  }
  int stage = 0, turn = 0, tiles_left = p.tiles_a_sum;
  for (int row = first; row < rows; row += step) {
    const int refill = last_stage - stage;
    if constexpr (kShifted) __syncwarp();  // before others' copies overwrite what this thread has yet to read
    fetch_tile(stages > 1 ? row + step : row, refill);
    acc_t next_mean[kRows], next_rstd[kRows];
    load_stats(row + step, next_mean, next_rstd);
    wait_ahead();
    if constexpr (kShifted) __syncwarp();  // what others copied is there too

    acc_t sums[kSums] = {};
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      acc_t w[kVec];
      load_parts(my_weight + i * kWarp * kVec, w);
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
        const auto x = x_at(stage, row, q, i);
        const auto dy = dy_at(stage, row, q, i);
        const acc_t scale = inside(i) ? rstd[q] : acc_t(0);  // 0 - mean may be too much for it: inf * 0 is NaN
        const int left = p.hidden - column(i);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const acc_t xhat = (element(x, j) - mean[q]) * (!kShifted || j < left ? scale : acc_t(0));
          const acc_t d = dy(j), g = d * w[j];
          dweight[i][j] += d * xhat;
          if constexpr (!kRms) dbias[i][j] += d;
          sums[q] += g * xhat;
          if constexpr (!kRms) sums[kRows + q] += g;
        }
      }
    }
    row_sum_each(sums, exchange[turn], group * warps, warps, group + 1);
    if constexpr (kClusters) {
      if (p.blocks > 1) sum_blocks(sums, of_blocks[turn], p.blocks);
    }
    turn ^= 1;

    if (p.n.dx || (kAdd && p.n.dinput)) {
      acc_t slope[kRows], mean_g[kRows];  // slope: of dx in x, over -rstd
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
        slope[q] = sums[q] * inverse_hidden * rstd[q];
        mean_g[q] = kRms ? acc_t(0) : sums[kSums - kRows + q] * inverse_hidden;
      }
      x_t* dx_first = static_cast<x_t*>(p.n.dx) + static_cast<int64_t>(row) * p.hidden;
      ShiftedStore<x_t, kVec> shifted(dx_first, warp_first, min(warp_first + kElems * kWarp, p.hidden));
#pragma unroll(kAdd ? 1 : kVecs)
      for (int i = 0; i < kVecs; ++i) {
        if (!kShifted && !inside(i)) continue;
        acc_t w[kVec];
        load_parts(my_weight + i * kWarp * kVec, w);
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
          if (row + q >= rows) continue;
          const auto x = x_at(stage, row, q, i);
          const auto dy = dy_at(stage, row, q, i);
          acc_t dx[kVec];
#pragma unroll
          for (int j = 0; j < kVec; ++j) {
            dx[j] = rstd[q] * (dy(j) * w[j] - mean_g[q] - (element(x, j) - mean[q]) * slope[q]);
          }
          if constexpr (kAdd) {
            if (p.n.dsum && !p.n.post_norm) add_widened(load<XVec>(dsum_slot(stage, q, i)), dx);
            store_summands(p, row + q, column(i), true, dx);
          } else {
            XVec out;
            narrow(dx, out);
            if constexpr (kShifted) {
              shifted(column(i), out);
            } else {
              unsigned char* dx_row = static_cast<unsigned char*>(p.n.dx) + first_col * sizeof(x_t) +
                                      static_cast<int64_t>(row + q) * (p.hidden * static_cast<int>(sizeof(x_t)));
              store(dx_row + i * kWarp * sizeof(XVec), out);
            }
          }
        }
      }
      if constexpr (kShifted) shifted.finish(warp_first + kElems * kWarp);
    }
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      mean[q] = next_mean[q];
      rstd[q] = next_rstd[q];
    }
    stage = refill;
    if (--tiles_left == 0) {
      tiles_left = p.tiles_a_sum;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        move_parts(kept(i, false), dweight[i]);
        if constexpr (!kRms) move_parts(kept(i, true), dbias[i]);
      }
    }
  }
  allow_next_kernel();

  wait_copies<0>();
  if (p.tiles_a_sum) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      add_parts(kept(i, false), dweight[i]);
      if constexpr (!kRms) add_parts(kept(i, true), dbias[i]);
    }
  }
  acc_t* sums = reinterpret_cast<acc_t*>(smem + layout.weight_bytes());  // [group][cols]
  acc_t* partial = static_cast<acc_t*>(p.n.workspace);                   // [dweight, dbias][partial_rows][hidden]
  const auto write_partial = [&](const acc_t(&mine)[kVecs][kVec]) {
    acc_t* row = partial + static_cast<int64_t>(block) * p.hidden;
    partial += static_cast<int64_t>(p.partial_rows) * p.hidden;
    if (blockDim.y == 1) {
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        if constexpr (kShifted) {
#pragma unroll
          for (int j = 0; j < kVec; ++j) {
            if (column(i) + j < p.hidden) row[column(i) + j] = mine[i][j];
          }
        } else if (inside(i)) {
          store_parts<1>(row + column(i), mine[i]);
        }
      }
      return;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVecs; ++i) store_parts<1>(sums + group * layout.cols + column(i), mine[i]);
    __syncthreads();
    for (int col = group * blockDim.x + threadIdx.x; col < p.hidden; col += blockDim.x * blockDim.y) {
      ExactSum<acc_t> sum;
      for (int g = 0; g < blockDim.y; ++g) sum.add(sums[g * layout.cols + col]);
      row[col] = sum.total();
    }
  };
  if (p.n.dweight) write_partial(dweight);
  if (p.n.dbias) write_partial(dbias);
}

// Adds the partial rows up, 32 columns a block: blockDim = (kVec columns a thread, kRows strides of rows), blockIdx.y =
// which of dweight and dbias. All loads are under way at once, one trip to memory, if all blocks are too: many of them
// have to be small.
constexpr int kFinishThreads = 256;
template <class acc_t, int kVec>
__global__ void __launch_bounds__(kFinishThreads, 1) norm_bwd_finish_kernel(const BwdParams p) {
  constexpr int kColumns = kWarp, kRows = kFinishThreads * kVec / kColumns;
  __shared__ acc_t sums[kRows][kColumns];
  const int first = blockIdx.x * kColumns, at = threadIdx.x * kVec;
  const bool second = blockIdx.y > 0;
  const acc_t* partial =
      static_cast<const acc_t*>(p.n.workspace) + (second ? static_cast<int64_t>(p.partial_rows) * p.hidden : 0);
  wait_for_previous_kernel();
  ExactSum<acc_t> mine[kVec];
  if (first + at < p.hidden) {
    constexpr int kAtOnce = 132;  // an H200's blocks, a partial row each; more of them are a second trip
    constexpr int kFlight = kAtOnce / kRows + 1;
    for (int row = threadIdx.y; row < p.partial_rows; row += kFlight * kRows) {
      Vec<acc_t, kVec> loaded[kFlight] = {};
#pragma unroll
      for (int k = 0; k < kFlight; ++k) {
        const int64_t from = row + k * kRows;
        if (from < p.partial_rows) loaded[k] = load<Vec<acc_t, kVec>>(partial + from * p.hidden + first + at);
      }
#pragma unroll
      for (int k = 0; k < kFlight; ++k) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) mine[j].add(element(loaded[k], j));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) sums[threadIdx.y][at + j] = mine[j].total();
  __syncthreads();
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, col = first + thread;
  if (thread >= kColumns || col >= p.hidden) return;
  ExactSum<acc_t> all;
#pragma unroll
  for (int y = 0; y < kRows; ++y) all.add(sums[y][thread]);
  if (p.n.dweight && !second) {
    store_element(p.n.dweight, p.n.weight_dtype, col, all.total());
  } else {
    store_element(p.n.dbias, p.n.dbias_dtype, col, all.total());
  }
}

// kN elements of a row wherever it begins; zero past its end.
template <class T, int kN>
__device__ inline Vec<T, kN> load_columns(const T* row, int col, int left, bool aligned) {
  if (aligned) return load_row<T, kN>(row, col, left, true);
  ShiftedLoad<T, kN> loaded;
  const int shift = shift_of<Vec<T, kN>>(row);
  loaded.start(row, shift, col, left);
  return loaded.take(shift);
}

// kN elements of a row's dy, with what post-norm mode adds; zero past the row's end.
template <class x_t, class dy_t, int kN, class acc_t>
__device__ inline void load_dy(const BwdParams& p, int64_t row, int col, int left, acc_t (&d)[kN]) {
  widen(load_columns<dy_t, kN>(static_cast<const dy_t*>(p.n.dy) + row * p.n.dy_stride, col, left, p.aligned), d);
  if (!p.n.post_norm) return;
  const x_t* dsum_row = static_cast<const x_t*>(p.n.dsum) + row * p.n.dsum_stride;  // [hidden]
  add_widened(load_columns<x_t, kN>(dsum_row, col, left, p.aligned), d);
}

// dx of rows that are wider than the registers of a block, or not aligned: one block a row, which it reads twice.
constexpr int kBwdWideThreads = 512;
template <class x_t, class dy_t, bool kRms>
__global__ void __launch_bounds__(kBwdWideThreads, 1) norm_bwd_wide_kernel(const BwdParams p) {
  using acc_t = acc_of<x_t>;
  constexpr int kVec = vec_width<x_t, dy_t>;
  constexpr int kSums = kRms ? 1 : 2;
  __shared__ Exchange<acc_t, kSums> exchange[2];
  const int vecs = (p.hidden + kVec - 1) / kVec;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.n.rows; row += gridDim.x) {
    const x_t* x_row = static_cast<const x_t*>(p.n.x) + row * p.n.x_stride;  // [hidden]
    x_t* dx_row = static_cast<x_t*>(p.n.dx) + row * p.hidden;                // [hidden]
    const acc_t mean = kRms ? acc_t(0) : static_cast<const acc_t*>(p.n.mean)[row];
    const acc_t rstd = static_cast<const acc_t*>(p.n.rstd)[row];
    const auto read = [&](int i, acc_t(&xhat)[kVec], acc_t(&g)[kVec]) {
      const int col = i * kVec, left = p.hidden - col;
      widen(load_columns<x_t, kVec>(x_row, col, left, p.aligned), xhat);
      load_dy<x_t, dy_t>(p, row, col, left, g);
      acc_t w[kVec];
      if (p.n.weight) load_param(p.n.weight, p.n.weight_dtype, col, left, p.aligned, w);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        xhat[j] = j < left ? (xhat[j] - mean) * rstd : acc_t(0);  // 0 - mean may be too much: inf * 0 is NaN
        if (p.n.weight) g[j] *= w[j] + static_cast<acc_t>(p.n.weight_offset);
      }
    };
    ExactSum<acc_t> exact[kSums];
#pragma unroll 2
    for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
      acc_t xhat[kVec], g[kVec];
      read(i, xhat, g);
      acc_t part[kSums] = {};
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        part[0] += g[j] * xhat[j];
        if constexpr (!kRms) part[1] += g[j];
      }
#pragma unroll
      for (int k = 0; k < kSums; ++k) exact[k].add(part[k]);
    }
    acc_t sums[kSums];
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] = exact[k].total();
    row_sum_each(sums, exchange[turn], 0, blockDim.x / kWarp, 1);
    turn ^= 1;
    const acc_t mean_gx = sums[0] / p.hidden, mean_g = kRms ? acc_t(0) : sums[kSums - 1] / p.hidden;
#pragma unroll 2
    for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
      acc_t xhat[kVec], g[kVec];
      read(i, xhat, g);
#pragma unroll
      for (int j = 0; j < kVec; ++j) g[j] = rstd * (g[j] - mean_g - xhat[j] * mean_gx);
      const int col = i * kVec, left = p.hidden - col;
      if (!p.n.add) {
        store_row<x_t, kVec>(dx_row, col, left, p.aligned, g);
        continue;
      }
      if (p.n.dsum && !p.n.post_norm) {
        const x_t* dsum_row = static_cast<const x_t*>(p.n.dsum) + row * p.n.dsum_stride;  // [hidden]
        add_widened(load_columns<x_t, kVec>(dsum_row, col, left, p.aligned), g);
      }
      store_summands(p, row, col, p.aligned, g);
    }
  }
}

// Partial sums of dweight and dbias for such rows: blockDim = (32 vectors of columns, 8 strides of rows), blockIdx.y =
// partial row.
constexpr int kColumnRows = 8;
template <class x_t, class dy_t, bool kRms>
__global__ void __launch_bounds__(kWarp* kColumnRows, 1) norm_bwd_columns_kernel(const BwdParams p) {
  using acc_t = acc_of<x_t>;
  constexpr int kVec = vec_width<x_t, dy_t>;
  __shared__ acc_t sums[kColumnRows][kWarp * kVec];
  const int col = (blockIdx.x * kWarp + threadIdx.x) * kVec, left = p.hidden - col;
  ExactSum<acc_t> dweight[kVec], dbias[kVec];
#pragma unroll 2
  for (int64_t row = blockIdx.y * kColumnRows + threadIdx.y; row < p.n.rows; row += gridDim.y * kColumnRows) {
    acc_t x[kVec], dy[kVec];
    widen(load_columns<x_t, kVec>(static_cast<const x_t*>(p.n.x) + row * p.n.x_stride, col, left, p.aligned), x);
    load_dy<x_t, dy_t>(p, row, col, left, dy);
    const acc_t mean = kRms ? acc_t(0) : static_cast<const acc_t*>(p.n.mean)[row];
    const acc_t rstd = static_cast<const acc_t*>(p.n.rstd)[row];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      dweight[j].add(dy[j] * ((x[j] - mean) * rstd));
      if constexpr (!kRms) dbias[j].add(dy[j]);
    }
  }
  acc_t* partial = static_cast<acc_t*>(p.n.workspace);  // [dweight, dbias][partial_rows][hidden]
  const auto write_partial = [&](const ExactSum<acc_t>(&mine)[kVec]) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVec; ++j) sums[threadIdx.y][threadIdx.x * kVec + j] = mine[j].total();
    __syncthreads();
    for (int c = threadIdx.y * kWarp + threadIdx.x; c < kWarp * kVec; c += kWarp * kColumnRows) {
      acc_t sum = 0;
      for (int y = 0; y < kColumnRows; ++y) sum += sums[y][c];
      const int64_t to = static_cast<int64_t>(blockIdx.x) * kWarp * kVec + c;
      if (to < p.hidden) partial[static_cast<int64_t>(blockIdx.y) * p.hidden + to] = sum;
    }
    partial += static_cast<int64_t>(p.partial_rows) * p.hidden;
  };
  if (p.n.dweight) write_partial(dweight);
  if (p.n.dbias) write_partial(dbias);
}

}  // namespace fusedops::cuda
