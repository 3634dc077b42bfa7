// Launchers of the norm forward kernels.
#include "norm_fwd.cuh"

#include <algorithm>
#include <climits>
#include <type_traits>

#include "dispatch.h"
#include "launch.h"

namespace fusedops::cuda {

namespace {

constexpr int kNarrowRows = 4;  // rows a block where a warp does a row
constexpr int kWideThreads = 1024;
constexpr int kBlocksVecs = 4;
constexpr int kBlocksThreads = 256;  // of a block, beyond which a row rather has several

int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

template <int kVec>
bool fits(const void* p, DType dtype) {
  return reinterpret_cast<uintptr_t>(p) % std::min(16, kVec * size_of(dtype)) == 0;
}

template <int kVec>
bool has_aligned_params(const NormFwd& n) {
  return fits<kVec>(n.weight, n.weight_dtype) && fits<kVec>(n.bias, n.bias_dtype);
}

template <int kVec>
bool is_aligned(const NormFwd& n) {
  const auto strided = [&](int64_t stride) { return n.rows == 1 || stride % kVec == 0; };
  return n.hidden % kVec == 0 && strided(n.x_stride) && fits<kVec>(n.x, n.x_dtype) && fits<kVec>(n.y, n.y_dtype) &&
         has_aligned_params<kVec>(n) && strided(n.residual_stride) && fits<kVec>(n.residual, n.residual_dtype) &&
         fits<kVec>(n.sum, n.sum_dtype) && fits<kVec>(n.residual_out, n.sum_dtype);
}

// So few rows that each has an SM of its own.
bool is_few(int64_t rows) { return rows <= current_device().sms; }

// Vectors a thread holds: as few as let a warp do the row, else four; three where that leaves no thread idle; six where
// two rows fit an SM with six but not with four (fp32 12288: 86 % of the copy, 76 % with four). Sums, of two vectors
// each, rather two (bf16 2048: 96 %, 93 with four). H200.
int vectors_a_thread(int vecs, int most, int threads, bool sums) {
  const int whole_warps = (vecs + kWarp - 1) / kWarp;
  if (sums && whole_warps > 3 && vecs <= 2 * threads) return 2;
  if (whole_warps <= 4) return whole_warps;
  if (vecs > 4 * 512 && vecs <= most * 512) return most;
  return vecs % (3 * kWarp) == 0 && vecs % (4 * kWarp) != 0 && vecs / 3 <= threads ? 3 : 4;
}

// One read of rows in registers, where they fit; false: they do not.
template <class Row, bool kRms>
bool launch_rows(const NormFwd& n, cudaStream_t stream, cudaError_t& status) {
  const int hidden = static_cast<int>(n.hidden);
  const auto grid_for = [&](int rows) { return (n.rows + rows - 1) / rows; };
  const int vecs = (hidden + Row::kVec - 1) / Row::kVec;
  const int held = vectors_a_thread(vecs, kFwdVecs<Row>, kFwdThreads<Row>, Row::kStores);
  const int threads = round_up((vecs + held - 1) / held, kWarp);
  const int rows = threads == kWarp ? kNarrowRows : 1;
  const bool one_dtype = !n.bias || (n.weight && n.bias_dtype == n.weight_dtype);
  if (!is_aligned<Row::kVec>(n) || !one_dtype || threads > kFwdThreads<Row> || grid_for(rows) > INT_MAX) return false;
  const auto kernel = held == 1   ? norm_fwd_kernel<Row, kRms, 1>
                      : held == 2 ? norm_fwd_kernel<Row, kRms, 2>
                      : held == 3 ? norm_fwd_kernel<Row, kRms, 3>
                      : held == 4 ? norm_fwd_kernel<Row, kRms, 4>
                                  : norm_fwd_kernel<Row, kRms, kFwdVecs<Row>>;
  const FwdParams p{n, hidden, 1.0f / hidden, true, false, 1, is_few(n.rows)};
  status = launch(kernel, p, dim3(static_cast<unsigned>(grid_for(rows))), dim3(threads, rows), 0, stream);
  return true;
}

// Rows in registers that are too wide for one block, or begin anywhere.
template <class Row, bool kRms>
bool launch_blocks(const NormFwd& n, cudaStream_t stream, cudaError_t& status) {
  const int hidden = static_cast<int>(n.hidden);
  const int vecs = (hidden + Row::kVec - 1) / Row::kVec;
  int held = kBlocksVecs;
  auto kernel = norm_fwd_kernel<Row, kRms, kBlocksVecs>;
  if constexpr (Row::kShifted) {
    if (vecs <= kWarp) held = 1, kernel = norm_fwd_kernel<Row, kRms, 1>;
  }
  const auto threads_for = [&](int blocks) { return round_up((vecs + held * blocks - 1) / (held * blocks), kWarp); };
  int blocks = 1;
  while (blocks < kMostBlocks && threads_for(blocks) > kBlocksThreads) blocks *= 2;
  if (blocks > 1 && clusters_at_once(kernel, threads_for(blocks), 0, blocks) == 0) blocks = 1;
  const int threads = threads_for(blocks), rows = threads == kWarp ? kNarrowRows : 1;
  const int64_t grid = (n.rows + rows - 1) / rows * blocks;
  const bool one_dtype = !n.bias || (n.weight && n.bias_dtype == n.weight_dtype);
  if (!one_dtype || threads > kFwdThreads<Row> || grid > INT_MAX) return false;
  const FwdParams p{n, hidden, 1.0f / hidden, has_aligned_params<Row::kVec>(n), false, blocks, is_few(n.rows)};
  status = launch(kernel, p, dim3(static_cast<unsigned>(grid)), dim3(threads, rows), 0, stream, false, blocks);
  return true;
}

template <class Row, bool kRms>
cudaError_t launch_wide(const NormFwd& n, cudaStream_t stream) {
  const int hidden = static_cast<int>(n.hidden);
  FwdParams p{n, hidden, 1.0f / hidden, is_aligned<Row::kVec>(n), false, 1, false};
  const int vecs = (hidden + Row::kVec - 1) / Row::kVec;
  const int64_t row_bytes = vecs * static_cast<int64_t>(sizeof(typename Row::Kept));
  p.staged = row_bytes <= current_device().dynamic_smem;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(n.rows, INT_MAX)));
  return launch(norm_fwd_wide_kernel<Row, kRms>, p, grid, dim3(std::min(kWideThreads, round_up(vecs, kWarp))),
                p.staged ? row_bytes : 0, stream);
}

template <class x_t, class y_t, bool kRms>
cudaError_t launch_norm(const NormFwd& n, cudaStream_t stream) {
  using Row = InputRow<x_t, y_t>;
  cudaError_t status;
  const bool served = launch_rows<Row, kRms>(n, stream, status) ||
                      (is_aligned<Row::kVec>(n) ? launch_blocks<WideRow<x_t, y_t>, kRms>(n, stream, status)
                                                : launch_blocks<ShiftedRow<x_t, y_t>, kRms>(n, stream, status));
  return served ? status : launch_wide<Row, kRms>(n, stream);
}

// Rows in registers are compiled for what models use: 16-bit input, output and parameters of a 16-bit or an fp32
// residual stream, or fp32 throughout. Any other mix takes the wide kernel.
template <class x_t, class y_t, bool kRms>
cudaError_t launch_sum(const NormFwd& n, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  if constexpr (std::is_same_v<x_t, y_t> && sizeof(x_t) != 8) {
    const bool served = with_bool(n.dropout.seed != nullptr, [&](auto dropout) {
      constexpr bool kDropout = decltype(dropout)::value;
      if (n.residual_dtype != n.sum_dtype) return false;
      if (n.sum_dtype == n.x_dtype) return launch_rows<SumRow<x_t, x_t, y_t, kDropout>, kRms>(n, stream, status);
      if constexpr (sizeof(x_t) == 2) {
        if (n.sum_dtype == DType::f32) return launch_rows<SumRow<x_t, float, y_t, kDropout>, kRms>(n, stream, status);
      }
      return false;
    });
    if (served) return status;
  }
  return launch_wide<MixedSumRow<acc_of<x_t>, y_t>, kRms>(n, stream);
}

}  // namespace

const char* norm_fwd(const NormFwd& n, cudaStream_t stream) {
  return describe(with_float_pair(n.x_dtype, n.y_dtype, [&](auto x, auto y) {
    return with_bool(n.rms, [&](auto rms) {
      using x_t = typename decltype(x)::type;
      using y_t = typename decltype(y)::type;
      constexpr bool kRms = decltype(rms)::value;
      return n.residual ? launch_sum<x_t, y_t, kRms>(n, stream) : launch_norm<x_t, y_t, kRms>(n, stream);
    });
  }));
}

}  // namespace fusedops::cuda
