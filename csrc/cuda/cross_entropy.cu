// Launchers of the cross-entropy kernels.
#include "cross_entropy.cuh"

#include <algorithm>
#include <climits>

#include "dispatch.h"
#include "launch.h"

namespace fusedops::cuda {

namespace {

constexpr int kNarrowRows = 4;  // rows a block where a warp does a row

// f(x's type, has it extras?)
template <class F>
cudaError_t with_kernel(const CrossEntropy& c, F&& f) {
  return with_bool(c.smoothing != 0 || c.softcap != 0, [&](auto extras) {
    const auto with_type = [&](auto x) { return f(x, extras); };
    return c.x_dtype == DType::f64 ? with_type(Type<double>()) : with_float(c.x_dtype, with_type);
  });
}

template <class Args>
cudaError_t launch_rows(void (*kernel)(LossParams<Args>), const Args& a, cudaStream_t stream) {
  const int64_t vecs = (a.c.classes * size_of(a.c.x_dtype) + 15) / 16;
  // Rounds of kUnroll vectors a thread, and as few threads as get by with them: 50257 classes of 16 bits are four
  // rounds of 512 threads, the last for 35 of them alone, but all of 416.
  constexpr int kRound = kUnroll<false> * kLossThreads;
  const int64_t held = (vecs + kRound - 1) / kRound * kUnroll<false>;
  const int threads = static_cast<int>((vecs + held * kWarp - 1) / (held * kWarp)) * kWarp;
  const int rows = threads == kWarp ? kNarrowRows : 1;
  const int64_t blocks = (a.c.rows + rows - 1) / rows;
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  const LossParams<Args> p{a, static_cast<int>(a.c.classes)};
  return launch(kernel, p, dim3(static_cast<unsigned>(blocks)), dim3(threads, rows), 0, stream);
}

int sum_blocks(int64_t rows) {
  return static_cast<int>(std::min<int64_t>((rows + kSumRows - 1) / kSumRows, kSumBlocks));
}

template <class acc_t>
cudaError_t launch_sums(const CrossEntropyFwd& f, cudaStream_t stream) {
  const LossSums p{f, static_cast<double*>(f.workspace), sum_blocks(f.c.rows)};
  const cudaError_t status =
      launch(sum_losses_kernel<acc_t>, p, dim3(static_cast<unsigned>(p.blocks)), dim3(kSumThreads), 0, stream);
  if (status != cudaSuccess || p.partial == nullptr) return status;
  return launch(finish_loss_kernel<acc_t>, p, dim3(1), dim3(kSumThreads), 0, stream);
}

}  // namespace

int64_t cross_entropy_workspace(int64_t rows, Reduction reduction) {
  const int blocks = reduction == Reduction::none ? 1 : sum_blocks(rows);
  return blocks == 1 ? 0 : blocks * 2 * static_cast<int64_t>(sizeof(double));
}

const char* cross_entropy_fwd(const CrossEntropyFwd& f, cudaStream_t stream) {
  const cudaError_t status = with_kernel(f.c, [&](auto x, auto extras) {
    return launch_rows(cross_entropy_fwd_kernel<typename decltype(x)::type, decltype(extras)::value>, f, stream);
  });
  if (status != cudaSuccess || f.loss == nullptr) return describe(status);
  return describe(f.c.x_dtype == DType::f64 ? launch_sums<double>(f, stream) : launch_sums<float>(f, stream));
}

const char* cross_entropy_bwd(const CrossEntropyBwd& b, cudaStream_t stream) {
  return describe(with_kernel(b.c, [&](auto x, auto extras) {
    return launch_rows(cross_entropy_bwd_kernel<typename decltype(x)::type, decltype(extras)::value>, b, stream);
  }));
}

}  // namespace fusedops::cuda
