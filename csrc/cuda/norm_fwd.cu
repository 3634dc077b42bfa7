// Launchers of the norm forward kernels.
#include "norm_fwd.cuh"

#include <algorithm>
#include <climits>

#include "dispatch.h"
#include "launch.h"

namespace fusedops::cuda {

namespace {

constexpr int kNarrowRows = 4;  // rows a block where a warp does a row
constexpr int kWideThreads = 1024;

int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

template <class x_t, class y_t>
bool is_aligned(const NormFwd& n) {
  constexpr int kVec = vec_width<x_t, y_t>;
  const auto fits = [&](const void* p, int size) {
    return reinterpret_cast<uintptr_t>(p) % std::min(16, kVec * size) == 0;
  };
  return n.hidden % kVec == 0 && (n.rows == 1 || n.x_stride % kVec == 0) && fits(n.x, sizeof(x_t)) &&
         fits(n.y, sizeof(y_t)) && fits(n.weight, size_of(n.weight_dtype)) && fits(n.bias, size_of(n.bias_dtype));
}

// Vectors a thread holds: as few as let a warp do the row, else four; three where that leaves no thread idle; six where
// two rows fit an SM with six but not with four (fp32 12288: 86 % of the copy, 76 % with four; H200).
int vectors_a_thread(int vecs, int most) {
  const int whole_warps = (vecs + kWarp - 1) / kWarp;
  if (whole_warps <= 4) return whole_warps;
  if (vecs > 4 * 512 && vecs <= most * 512) return most;
  return vecs % (3 * kWarp) == 0 && vecs % (4 * kWarp) != 0 ? 3 : 4;
}

template <class x_t, class y_t, bool kRms>
cudaError_t launch_fwd(const NormFwd& n, cudaStream_t stream) {
  const int hidden = static_cast<int>(n.hidden);
  FwdParams p{n, hidden, 1.0f / hidden, is_aligned<x_t, y_t>(n), false};
  const auto grid_for = [&](int rows) { return (n.rows + rows - 1) / rows; };
  const int vecs = (hidden + vec_width<x_t, y_t> - 1) / vec_width<x_t, y_t>;
  const int held = vectors_a_thread(vecs, kFwdVecs<x_t, y_t>);
  const int threads = round_up((vecs + held - 1) / held, kWarp);
  const int rows = threads == kWarp ? kNarrowRows : 1;
  const bool one_dtype = !n.bias || (n.weight && n.bias_dtype == n.weight_dtype);
  if (p.aligned && one_dtype && threads <= kFwdThreads<x_t> && grid_for(rows) <= INT_MAX) {
    const auto kernel = held == 1   ? norm_fwd_kernel<x_t, y_t, kRms, 1>
                        : held == 2 ? norm_fwd_kernel<x_t, y_t, kRms, 2>
                        : held == 3 ? norm_fwd_kernel<x_t, y_t, kRms, 3>
                        : held == 4 ? norm_fwd_kernel<x_t, y_t, kRms, 4>
                                    : norm_fwd_kernel<x_t, y_t, kRms, kFwdVecs<x_t, y_t>>;
    return launch(kernel, p, dim3(static_cast<unsigned>(grid_for(rows))), dim3(threads, rows), 0, stream);
  }
  const int reserve = 1 << 10;  // static shared memory and the driver's own
  const int64_t row_bytes = vecs * static_cast<int64_t>(vec_width<x_t, y_t> * sizeof(x_t));
  p.staged = row_bytes + reserve <= current_device().block_smem;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(n.rows, INT_MAX)));
  return launch(norm_fwd_wide_kernel<x_t, y_t, kRms>, p, grid, dim3(std::min(kWideThreads, round_up(vecs, kWarp))),
                p.staged ? row_bytes : 0, stream);
}

}  // namespace

const char* norm_fwd(const NormFwd& n, cudaStream_t stream) {
  return describe(with_float_pair(n.x_dtype, n.y_dtype, [&](auto x, auto y) {
    return with_bool(n.rms, [&](auto rms) {
      return launch_fwd<typename decltype(x)::type, typename decltype(y)::type, decltype(rms)::value>(n, stream);
    });
  }));
}

}  // namespace fusedops::cuda
