// Launchers of the gradient norm (4 bytes read an fp32 element) and of gradient scaling (4 read, 4 written).
#include "grad_norm.cuh"

namespace fusedops::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // 16-byte vectors in flight a thread
constexpr int kFinishThreads = 1024;

const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* grad_norm(const GradNormArgs& args, cudaStream_t stream) {
  if (args.chunk_count > 0) sum_squares_kernel<kThreads, kUnroll><<<static_cast<unsigned>(args.chunk_count), kThreads, 0, stream>>>(args);
  finish_norm_kernel<kFinishThreads><<<1, kFinishThreads, 0, stream>>>(args.partials, args.chunk_count, args.norm, args.norm_dtype);
  return last_error();
}

const char* grad_scale(const TensorSpan* spans, const Chunk* chunks, int64_t chunk_count, int64_t chunk_size, const void* coef, DType coef_dtype,
                       cudaStream_t stream) {
  if (chunk_count == 0) return nullptr;
  grad_scale_kernel<kThreads, kUnroll><<<static_cast<unsigned>(chunk_count), kThreads, 0, stream>>>(spans, chunks, chunk_size, coef, coef_dtype);
  return last_error();
}

}  // namespace fusedops::cuda
