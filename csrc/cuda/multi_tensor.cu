// Launchers of the device tables (multi_tensor.h).
#include <algorithm>
#include <cstring>

#include "launch.h"
#include "multi_tensor.cuh"

namespace fusedops::cuda {

namespace {

constexpr unsigned kThreads = 256;

}  // namespace

const char* upload(void* device, const void* host, size_t bytes, cudaStream_t stream) {
  UploadArgs args;
  for (size_t done = 0; done < bytes; done += sizeof(args.words)) {
    const size_t part = std::min(bytes - done, sizeof(args.words));
    args.target = reinterpret_cast<uint32_t*>(static_cast<char*>(device) + done);
    args.count = static_cast<int32_t>(part / sizeof(uint32_t));
    std::memcpy(args.words, static_cast<const char*>(host) + done, part);
    const cudaError_t status = launch(upload_kernel, args, dim3(1), dim3(kThreads), 0, stream);
    if (status != cudaSuccess) return describe(status);
  }
  return nullptr;
}

const char* expand_chunks(const ChunkList& list, cudaStream_t stream) {
  if (list.chunk_count == 0) return nullptr;
  const auto blocks = static_cast<unsigned>((list.chunk_count + kThreads - 1) / kThreads);
  return describe(launch(expand_chunks_kernel, list, dim3(blocks), dim3(kThreads), 0, stream));
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();  // the launch that follows reports what is wrong with the stream
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace fusedops::cuda
