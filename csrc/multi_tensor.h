// Lists of tensors as device tables: what is uploaded, and how a list is cut into chunks of work.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

typedef struct CUstream_st* cudaStream_t;  // as in the CUDA headers, which only .cu files include

namespace fusedops {

// A tensor walked in memory order by the passes over gradients.
struct TensorSpan {
  void* data;
  uint64_t numel : 56;
  uint64_t dtype : 8;
};
static_assert(sizeof(TensorSpan) == 16);

namespace cpu {
// Sum of (factor * x)^2 over n elements; sets nonfinite when an x is inf or NaN.
double sum_squares(const void* data, DType dtype, int64_t n, double factor, bool& nonfinite);
void scale(void* data, DType dtype, int64_t n, double factor);
}  // namespace cpu

namespace cuda {

// One block's share of a tensor: elements [index * chunk_size, (index + 1) * chunk_size).
struct Chunk {
  uint32_t tensor;
  uint32_t index;
};

// Copies host bytes to the device as kernel parameters, 4000 a launch: no staging buffer that a later step could
// overwrite, and a graph capture records the values. Both sizes are multiples of 4.
const char* upload(void* device, const void* host, size_t bytes, cudaStream_t stream);

struct ChunkList {
  Chunk* chunks;          // [chunk_count]
  const uint32_t* first;  // [tensor_count + 1]: first chunk of each tensor, then chunk_count
  int64_t tensor_count;
  int64_t chunk_count;
};

// Writes chunks[first[t] + i] = {t, i} for every tensor t.
const char* expand_chunks(const ChunkList& list, cudaStream_t stream);

bool is_capturing(cudaStream_t stream);

struct GradNormArgs {
  const TensorSpan* spans;  // [tensors]
  const Chunk* chunks;      // [chunk_count]
  int64_t chunk_count;
  int64_t chunk_size;
  const float* grad_scale;  // or null
  float* found_inf;         // or null
  double* partials;         // [chunk_count]
  void* norm;               // one element of norm_dtype
  DType norm_dtype;
};

// Two launches: squares summed per chunk, then one block adds the partial sums in a fixed order.
const char* grad_norm(const GradNormArgs& args, cudaStream_t stream);

struct GradScaleArgs {
  const TensorSpan* spans;  // [tensors]
  const Chunk* chunks;      // [chunk_count]
  int64_t chunk_count;
  int64_t chunk_size;
  const void* coef;  // one element of coef_dtype
  DType coef_dtype;
};

// data *= coef in one launch; leaves memory alone where coef is 1.
const char* grad_scale(const GradScaleArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace fusedops
