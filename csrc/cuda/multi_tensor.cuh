// Kernels that write the device tables of a list of tensors.
#pragma once

#include "../multi_tensor.h"

namespace fusedops::cuda {

struct UploadArgs {
  static constexpr int kWords = 1000;
  uint32_t* target;
  int32_t count;
  uint32_t words[kWords];
};
static_assert(sizeof(UploadArgs) <= 4096);

__global__ void upload_kernel(const UploadArgs args) {
  for (int i = threadIdx.x; i < args.count; i += blockDim.x) args.target[i] = args.words[i];
}

__global__ void expand_chunks_kernel(const ChunkList list) {
  const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= list.chunk_count) return;
  int64_t low = 0, high = list.tensor_count;  // the last tensor whose first chunk is at most c
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (list.first[middle] <= c ? low : high) = middle;
  }
  list.chunks[c] = {uint32_t(low), uint32_t(c - list.first[low])};
}

}  // namespace fusedops::cuda
