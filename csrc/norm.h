// What the norm kernels are given, on every device: raw pointers, no framework type. A row is `hidden` contiguous
// elements; rows of x, residual, dy and dsum are a stride apart, all other tensors are contiguous.
//
// An add + norm is a norm of the rows x = residual + dropout(input), each sum rounded to its dtype first: backward
// reads those numbers, so it is the derivative of what forward computed. In post-norm mode the residual stream goes on
// as the norm, stored twice, in place of the sum.
#pragma once

#include <cstdint>

#include "dropout.h"
#include "dtype.h"

typedef struct CUstream_st* cudaStream_t;  // as in the CUDA headers, which only .cu files include

namespace fusedops {

struct NormFwd {
  bool rms;  // RMSNorm: no mean is subtracted
  int64_t rows;
  int64_t hidden;
  const void* x;     // [rows, hidden]
  int64_t x_stride;  // elements from one row to the next
  DType x_dtype;
  const void* weight;  // [hidden] or null
  DType weight_dtype;
  const void* bias;  // [hidden] or null
  DType bias_dtype;
  double eps;
  double weight_offset;  // RMSNorm only: added to the weight
  void* y;               // [rows, hidden]
  DType y_dtype;
  void* mean;  // [rows] or null; fp32, fp64 where x is
  void* rstd;  // [rows] or null
  // Of an add + norm, whose input is x above:
  const void* residual;  // [rows, hidden]; null: a plain norm
  int64_t residual_stride;
  DType residual_dtype;
  Dropout dropout;
  void* sum;  // [rows, hidden]; where a post-norm call has no use for it, residual_out's memory
  DType sum_dtype;
  void* residual_out;  // [rows, hidden] of sum_dtype: the second y of a post-norm call; or null
};

struct NormBwd {
  bool rms;
  int64_t rows;
  int64_t hidden;
  const void* x;  // [rows, hidden]
  int64_t x_stride;
  DType x_dtype;
  const void* dy;  // [rows, hidden]
  int64_t dy_stride;
  DType dy_dtype;
  const void* weight;  // [hidden] or null
  DType weight_dtype;
  double weight_offset;  // RMSNorm only: added to the weight
  const void* mean;      // [rows], null for RMSNorm
  const void* rstd;      // [rows]
  void* dx;              // [rows, hidden] or null where not wanted
  DType dx_dtype;
  void* dweight;      // [hidden] or null
  void* dbias;        // [hidden] or null
  DType dbias_dtype;  // dweight has the dtype of weight
  void* workspace;    // norm_bwd_workspace() bytes, or null where that is 0
  // Of an add + norm, where x is the sum that forward stored and dx the gradient of the residual:
  bool add;
  const void* dsum;  // [rows, hidden] of x_dtype: a gradient of x from elsewhere, or null
  int64_t dsum_stride;
  bool post_norm;  // dsum is another gradient of y instead
  void* dinput;    // [rows, hidden] or null where not wanted: dx times what forward multiplied the input with
  DType dinput_dtype;
  Dropout dropout;
};

namespace cpu {
void norm_fwd(const NormFwd& args);
void norm_bwd(const NormBwd& args);
}  // namespace cpu

namespace cuda {
// Launchers on the current device. They return null, or what CUDA said of the launch.
const char* norm_fwd(const NormFwd& args, cudaStream_t stream);
const char* norm_bwd(const NormBwd& args, cudaStream_t stream);
int64_t norm_bwd_workspace(const NormBwd& args);
}  // namespace cuda

}  // namespace fusedops
