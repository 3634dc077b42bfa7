// Launchers of the norm backward kernels.
#include "norm_bwd.cuh"

#include <algorithm>
#include <type_traits>

#include "dispatch.h"
#include "launch.h"

namespace fusedops::cuda {

namespace {

// How rows are laid over a block: elements a thread holds, and rows a group takes between two barriers (they trade
// registers). The first shape that fits is taken.
struct Shape {
  int elems;
  int rows;
};
constexpr Shape kShapes[] = {{8, 2}, {16, 1}, {24, 1}, {32, 1}};
// Rows of fp32 are never faster in the first (5120 columns: 145 us, 137 in the second; H200).
template <class x_t>
constexpr int kFirstShape = sizeof(x_t) == 4 ? 1 : 0;
constexpr int kMaxGroups = 15;    // a block has 15 barriers beside the one of __syncthreads()
constexpr int kBlocksPerSm = 1;   // at once: more blocks are more partial rows
constexpr int kColumnBlocks = 4;  // blocks an SM of the column sums of wide rows

// Numbers that a thread adds up one after another. Where all gradients are alike, so are the rounding errors: those of
// n additions come to as much as n/4 units, of 13 and more that a sum of so many rows may be off by.
constexpr int kMostAdditions = 56;
constexpr int kSumRows = 24;  // rows to a sum where a group has more than that, and adds up such sums in turn

// The staged kernel counts rows, with a round of blocks beyond them, in 32 bits.
constexpr int64_t kMostRows = 1 << 29;

int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

template <class x_t, class dy_t>
bool is_aligned(const NormBwd& n) {
  constexpr int kVec = vec_width<x_t, dy_t>;
  const auto fits = [&](const void* p, DType dtype) {
    return reinterpret_cast<uintptr_t>(p) % std::min(16, kVec * size_of(dtype)) == 0;
  };
  const auto strided = [&](int64_t stride) { return n.rows == 1 || stride % kVec == 0; };
  return n.hidden % kVec == 0 && strided(n.x_stride) && strided(n.dy_stride) && strided(n.dsum_stride) &&
         fits(n.x, n.x_dtype) && fits(n.dy, n.dy_dtype) && fits(n.dsum, n.x_dtype) && fits(n.dx, n.dx_dtype) &&
         fits(n.dinput, n.dinput_dtype) && fits(n.weight, n.weight_dtype);
}

// What a launch will look like; the workspace is sized by the same plan.
struct Plan {
  int elems;                // of the shape; 0: the wide kernels
  bool shifted;             // the kernel of shifted rows
  int blocks;               // of a row
  dim3 grid, block;         // of the kernel that makes the partial rows
  int stages, tiles_a_sum;  // as the kernel's
  int smem;
  int partial_rows;
};

// The mixes that an add + norm has a staged kernel for: x and dy of one dtype, or an fp32 residual stream.
template <class x_t, class dy_t>
constexpr bool kStagedAdd = sizeof(x_t) != 8 && (std::is_same_v<x_t, dy_t> || sizeof(x_t) == 4);

template <class x_t, class dy_t, bool kRms, bool kAdd>
Plan make_plan(const NormBwd& n, const Device& device) {
  using acc_t = acc_of<x_t>;
  const int hidden = static_cast<int>(n.hidden);
  Plan plan{};
  const auto fits = [&](auto index, auto shifted) {
    constexpr Shape kShape = kShapes[decltype(index)::value];
    constexpr bool kShifted = decltype(shifted)::value;
    const auto kernel = norm_bwd_kernel<x_t, dy_t, kRms, kAdd, kShape.elems, kShape.rows, kShifted>;
    const int most_threads = bwd_max_threads<x_t, dy_t, kAdd, kShape.elems>(device.major);
    const auto threads_for = [&](int blocks) {
      return round_up((hidden + kShape.elems * blocks - 1) / (kShape.elems * blocks), kWarp);
    };
    int blocks = 1;
    if (kHasClusters<kShape.elems, kShifted>) {
      while (blocks < kMostBlocks && threads_for(blocks) > most_threads) blocks *= 2;
    }
    const int threads = threads_for(blocks);
    if (threads > most_threads) return false;
    int groups = blocks > 1 ? 1 : most_threads / threads;
    if (threads > kWarp) groups = std::min(groups, kMaxGroups);
    const int64_t tiles = (n.rows + kShape.rows - 1) / kShape.rows;
    groups = static_cast<int>(std::min<int64_t>(groups, (tiles + device.sms - 1) / device.sms));  // all SMs first
    const BwdSmem<x_t, dy_t, kRms, kAdd, kShape.elems, kShape.rows, kShifted> layout(threads);
    const auto room = [&](int stages, bool sums) { return layout.bytes(groups, stages, sums) <= device.dynamic_smem; };
    int stages = kBwdStages;
    while (stages > kBwdLeastStages<kShape.elems> && !room(stages, false)) --stages;
    while (groups > 1 && !room(stages, false)) --groups;
    if (!room(stages, false)) return false;
    int64_t at_once = device.sms * kBlocksPerSm;
    if (blocks > 1) {
      at_once = clusters_at_once(kernel, threads, layout.bytes(groups, stages, false), blocks);
      if (at_once == 0) return false;
    }
    plan.elems = kShape.elems;
    plan.shifted = kShifted;
    plan.blocks = blocks;
    const int64_t rows_at_once = at_once * groups;
    const bool sums = n.rows > rows_at_once * kMostAdditions && room(stages, true);
    const int64_t round =
        rows_at_once * (sums ? kSumRows * (kMostAdditions - kSumRows) : kMostAdditions);  // rows of it
    plan.tiles_a_sum = sums ? kSumRows / kShape.rows : 0;
    plan.partial_rows =
        static_cast<int>(std::min((tiles + groups - 1) / groups, (n.rows + round - 1) / round * at_once));
    plan.grid = dim3(plan.partial_rows * blocks);
    plan.block = dim3(threads, groups);
    plan.stages = stages;
    plan.smem = layout.bytes(groups, stages, sums);
    return true;
  };
  const bool aligned = is_aligned<x_t, dy_t>(n);
  if constexpr (!kAdd || kStagedAdd<x_t, dy_t>) {
    if (aligned && n.rows < kMostRows) {
      if constexpr (kFirstShape<x_t> == 0) {
        // Rows of 16 bits that fill four groups and more just so are faster in the second: LayerNorm of 2048 columns
        // 107 us, not 112; add + LayerNorm 138, not 143 (H200).
        const bool fours = hidden == 512 || hidden == 1024 || hidden == 2048;
        if (!(sizeof(x_t) == 2 && fours) && fits(Int<0>(), Bool<false>())) return plan;
      }
      if constexpr (sizeof(x_t) != 8) {
        if (fits(Int<1>(), Bool<false>()) || fits(Int<2>(), Bool<false>())) return plan;
        if constexpr (!kAdd) {  // its sums would spill
          if (fits(Int<3>(), Bool<false>())) return plan;
        }
      }
    }
  }
  if constexpr (!kAdd && sizeof(x_t) != 8) {
    if (!aligned && n.rows < kMostRows && fits(Int<1>(), Bool<true>())) return plan;
  }

  const int columns = kWarp * vec_width<x_t, dy_t>;
  const int across = (hidden + columns - 1) / columns;
  const int64_t down = (n.rows + kColumnRows - 1) / kColumnRows;
  plan.partial_rows =
      static_cast<int>(std::min<int64_t>(down, std::max(1, (device.sms * kColumnBlocks + across - 1) / across)));
  plan.grid = dim3(across, plan.partial_rows);
  plan.block = dim3(kWarp, kColumnRows);
  return plan;
}

template <class x_t, class dy_t, bool kRms, bool kAdd>
auto staged_kernel(const Plan& plan) {
  constexpr Shape kFirst = kShapes[kFirstShape<x_t>];
  auto kernel = norm_bwd_kernel<x_t, dy_t, kRms, kAdd, kFirst.elems, kFirst.rows>;
  if constexpr (sizeof(x_t) != 8) {
    const auto take = [&](auto index) {
      constexpr Shape kShape = kShapes[decltype(index)::value];
      if (plan.elems == kShape.elems) kernel = norm_bwd_kernel<x_t, dy_t, kRms, kAdd, kShape.elems, kShape.rows>;
    };
    take(Int<1>()), take(Int<2>());
    if constexpr (!kAdd) {
      take(Int<3>());
      if (plan.shifted) kernel = norm_bwd_kernel<x_t, dy_t, kRms, false, kShapes[1].elems, kShapes[1].rows, true>;
    }
  }
  return kernel;
}

template <class x_t, class dy_t, bool kRms>
cudaError_t launch_bwd(const NormBwd& n, cudaStream_t stream) {
  using acc_t = acc_of<x_t>;
  const Device device = current_device();
  const Plan plan = n.add ? make_plan<x_t, dy_t, kRms, true>(n, device) : make_plan<x_t, dy_t, kRms, false>(n, device);
  const int hidden = static_cast<int>(n.hidden);
  const auto row_bytes = [&](int64_t stride, DType dtype) {
    return static_cast<uint64_t>(n.rows > 1 ? stride * size_of(dtype) : 0);  // a lone row's stride may be anything
  };
  const BwdParams p{n,
                    hidden,
                    1.0f / hidden,
                    is_aligned<x_t, dy_t>(n),
                    plan.partial_rows,
                    row_bytes(n.x_stride, n.x_dtype),
                    row_bytes(n.dy_stride, n.dy_dtype),
                    row_bytes(n.dsum_stride, n.x_dtype),
                    plan.blocks,
                    plan.stages,
                    plan.tiles_a_sum};
  const int sums = (n.dweight != nullptr) + (n.dbias != nullptr);
  cudaError_t status = cudaSuccess;
  if (plan.elems) {
    auto kernel = staged_kernel<x_t, dy_t, kRms, false>(plan);
    if constexpr (kStagedAdd<x_t, dy_t>) {
      if (n.add) kernel = staged_kernel<x_t, dy_t, kRms, true>(plan);
    }
    status = launch(kernel, p, plan.grid, plan.block, plan.smem, stream, false, plan.blocks);
  } else {
    if (n.dx || n.dinput) {
      const int vecs = (p.hidden + vec_width<x_t, dy_t> - 1) / vec_width<x_t, dy_t>;
      const int threads = std::min(kBwdWideThreads, round_up(vecs, kWarp));
      const int resident = device.sms * (2 * kBwdWideThreads / threads);
      const dim3 grid(static_cast<unsigned>(std::min<int64_t>(n.rows, resident)));
      status = launch(norm_bwd_wide_kernel<x_t, dy_t, kRms>, p, grid, dim3(threads), 0, stream);
    }
    if (status == cudaSuccess && sums) {
      status = launch(norm_bwd_columns_kernel<x_t, dy_t, kRms>, p, plan.grid, plan.block, 0, stream);
    }
  }
  if (status != cudaSuccess || sums == 0) return status;
  const auto finish = [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    const dim3 grid((p.hidden + kWarp - 1) / kWarp, sums), block(kWarp / kVec, kFinishThreads * kVec / kWarp);
    return launch(norm_bwd_finish_kernel<acc_t, kVec>, p, grid, block, 0, stream, /*overlap=*/true);
  };
  constexpr int kWhole = 16 / sizeof(acc_t);
  return n.hidden % kWhole == 0 ? finish(Int<kWhole>()) : finish(Int<1>());
}

}  // namespace

int64_t norm_bwd_workspace(const NormBwd& n) {
  const int sums = (n.dweight != nullptr) + (n.dbias != nullptr);
  if (sums == 0) return 0;
  return with_float_pair(n.x_dtype, n.dy_dtype, [&](auto x, auto dy) {
    return with_bool(n.rms, [&](auto rms) -> int64_t {
      using x_t = typename decltype(x)::type;
      using dy_t = typename decltype(dy)::type;
      constexpr bool kRms = decltype(rms)::value;
      const Device device = current_device();
      const Plan plan =
          n.add ? make_plan<x_t, dy_t, kRms, true>(n, device) : make_plan<x_t, dy_t, kRms, false>(n, device);
      return sums * plan.partial_rows * n.hidden * static_cast<int64_t>(sizeof(acc_of<x_t>));
    });
  });
}

const char* norm_bwd(const NormBwd& n, cudaStream_t stream) {
  return describe(with_float_pair(n.x_dtype, n.dy_dtype, [&](auto x, auto dy) {
    return with_bool(n.rms, [&](auto rms) {
      return launch_bwd<typename decltype(x)::type, typename decltype(dy)::type, decltype(rms)::value>(n, stream);
    });
  }));
}

}  // namespace fusedops::cuda
