// Launchers of the gradient norm (4 bytes read an fp32 element) and of gradient scaling (4 read, 4 written).
#include "grad_norm.cuh"
#include "launch.h"

namespace fusedops::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // 16-byte vectors in flight a thread
constexpr int kFinishThreads = 1024;

}  // namespace

const char* grad_norm(const GradNormArgs& args, cudaStream_t stream) {
  if (args.chunk_count > 0) {
    const cudaError_t status = launch(sum_squares_kernel<kThreads, kUnroll>, args,
                                      dim3(static_cast<unsigned>(args.chunk_count)), dim3(kThreads), 0, stream);
    if (status != cudaSuccess) return describe(status);
  }
  return describe(launch(finish_norm_kernel<kFinishThreads>, args, dim3(1), dim3(kFinishThreads), 0, stream));
}

const char* grad_scale(const GradScaleArgs& args, cudaStream_t stream) {
  if (args.chunk_count == 0) return nullptr;
  return describe(launch(grad_scale_kernel<kThreads, kUnroll>, args, dim3(static_cast<unsigned>(args.chunk_count)),
                         dim3(kThreads), 0, stream));
}

}  // namespace fusedops::cuda
