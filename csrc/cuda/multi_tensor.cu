// Launchers of the device tables (multi_tensor.h).
#include <algorithm>
#include <cstring>

#include "multi_tensor.cuh"

namespace fusedops::cuda {

namespace {

const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* upload(void* device, const void* host, size_t bytes, cudaStream_t stream) {
  UploadArgs args;
  for (size_t done = 0; done < bytes; done += sizeof(args.words)) {
    const size_t part = std::min(bytes - done, sizeof(args.words));
    args.target = reinterpret_cast<uint32_t*>(static_cast<char*>(device) + done);
    args.count = static_cast<int32_t>(part / sizeof(uint32_t));
    std::memcpy(args.words, static_cast<const char*>(host) + done, part);
    upload_kernel<<<1, 256, 0, stream>>>(args);
  }
  return last_error();
}

const char* expand_chunks(Chunk* chunks, const uint32_t* first, int64_t tensor_count, int64_t chunk_count, cudaStream_t stream) {
  if (chunk_count == 0) return nullptr;
  expand_chunks_kernel<<<static_cast<unsigned>((chunk_count + 255) / 256), 256, 0, stream>>>(chunks, first, tensor_count, chunk_count);
  return last_error();
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
