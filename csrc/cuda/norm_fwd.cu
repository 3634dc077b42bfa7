// Launchers of the norm forward kernels.
#include "norm_fwd.cuh"

#include <algorithm>
#include <climits>

#include "dispatch.h"
#include "launch.h"

namespace fusedops::cuda {

namespace {

// Elements a thread holds, and the widest row for that: the first row that is wide enough is taken. Up to 1,024 columns
// a warp does a row alone, without a barrier; above, 64 bytes a thread keep enough loads under way. 32 elements are
// more than the registers hold in fp64, 16 more than needed in fp32 until a block has no more threads.
struct Shape {
  int elems;
  int max_hidden;
};
constexpr Shape kShapes16Bit[] = {{8, 256}, {16, 512}, {32, 16384}};
constexpr Shape kShapes32Bit[] = {{8, 256}, {16, 512}, {32, 1024}, {16, 8192}, {32, 16384}};
constexpr Shape kShapes64Bit[] = {{8, 256}, {16, 8192}};
template <class x_t>
constexpr auto& shapes() {
  if constexpr (sizeof(x_t) == 8) {
    return kShapes64Bit;
  } else if constexpr (sizeof(x_t) == 4) {
    return kShapes32Bit;
  } else {
    return kShapes16Bit;
  }
}
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

template <class x_t, class y_t, bool kRms>
cudaError_t launch_fwd(const NormFwd& n, cudaStream_t stream) {
  constexpr int kMaxElems = sizeof(x_t) == 8 ? 16 : 32;
  FwdParams p{n, static_cast<int>(n.hidden), is_aligned<x_t, y_t>(n), false};
  const auto grid_for = [&](int rows_per_block) {
    return dim3(std::min<int64_t>((n.rows + rows_per_block - 1) / rows_per_block, INT_MAX));
  };
  for (const Shape& shape : shapes<x_t>()) {
    if (p.hidden > shape.max_hidden) continue;
    const int threads = round_up((p.hidden + shape.elems - 1) / shape.elems, kWarp);
    const int rows = threads == kWarp ? kNarrowRows : 1;
    const auto kernel = shape.elems == 8    ? norm_fwd_kernel<x_t, y_t, kRms, 8>
                        : shape.elems == 16 ? norm_fwd_kernel<x_t, y_t, kRms, 16>
                                            : norm_fwd_kernel<x_t, y_t, kRms, kMaxElems>;
    return launch(kernel, p, grid_for(rows), dim3(threads, rows), 0, stream);
  }
  const int reserve = 1 << 10;  // static shared memory and the driver's own
  const int64_t row_bytes = round_up(p.hidden, vec_width<x_t, y_t>) * static_cast<int64_t>(sizeof(x_t));
  p.staged = row_bytes + reserve <= current_device().block_smem;
  return launch(norm_fwd_wide_kernel<x_t, y_t, kRms>, p, grid_for(1), dim3(kWideThreads), p.staged ? row_bytes : 0,
                stream);
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
