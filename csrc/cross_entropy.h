// What the cross-entropy kernels are given, on every device: raw pointers, no framework type. A row of logits is
// `classes` contiguous elements; rows of x and of dx are a stride apart, all other tensors are contiguous.
//
//   z = softcap·tanh(x / softcap), or x;  m = max z;  s = Σ exp(z - m);  lse = m + ln s
//   loss = (1 - smoothing)·w_t·(lse - z_t) + smoothing/classes·Σ_c w_c·(lse - z_c) + z_loss·lse²
//   dz_c = g·(a·exp(z_c - m - ln s) - smoothing/classes·w_c - [c = t]·(1 - smoothing)·w_t)
//   a = (1 - smoothing)·w_t + smoothing/classes·Σ_c w_c + 2·z_loss·lse,  dx = dz·(1 - (z / softcap)²)
//
// A row whose target is ignore_index has no loss and a gradient of zero. Backward is given m and ln s, not their sum:
// of large logits that would have lost the digits of ln s, which are those of all exponentials.
#pragma once

#include <cstdint>

#include "dtype.h"

typedef struct CUstream_st* cudaStream_t;  // as in the CUDA headers, which only .cu files include

namespace fusedops {

enum class Reduction : int64_t { none, mean, sum };

struct CrossEntropy {
  int64_t rows;
  int64_t classes;  // at least one
  const void* x;    // [rows, classes]
  int64_t x_stride;
  DType x_dtype;
  const int64_t* target;  // [rows]
  const void* weight;     // [classes] or null, fp32 (fp64 where x is), as all that has no dtype here
  const void* weights;    // the sum of weight: one element; null where there is no weight or no smoothing
  int64_t ignore_index;
  Reduction reduction;
  double smoothing;
  double z_loss;
  double softcap;  // 0: none
};

struct CrossEntropyFwd {
  CrossEntropy c;
  void* stats;         // [rows, 2]: m and ln s; or null
  void* losses;        // [rows]
  void* loss;          // one element: their sum or mean; null where the reduction is none
  void* total_weight;  // one element: the sum of w_t over the rows that count, where the reduction is mean
  void* workspace;     // cross_entropy_workspace() bytes, or null where that is 0
};

struct CrossEntropyBwd {
  CrossEntropy c;
  const void* stats;         // as forward left them
  const void* dloss;         // [rows], or one element where there is a reduction
  const void* total_weight;  // as forward left it
  void* dx;                  // [rows, classes] of x_dtype; may be x
  int64_t dx_stride;
};

namespace cpu {
// The first row whose target is no class and not to be ignored, or -1.
int64_t find_wrong_target(const CrossEntropy& args);
void cross_entropy_fwd(const CrossEntropyFwd& args);
void cross_entropy_bwd(const CrossEntropyBwd& args);
}  // namespace cpu

namespace cuda {
// Launchers on the current device. They return null, or what CUDA said of the launch. A wrong target stops the kernel.
const char* cross_entropy_fwd(const CrossEntropyFwd& args, cudaStream_t stream);
const char* cross_entropy_bwd(const CrossEntropyBwd& args, cudaStream_t stream);
int64_t cross_entropy_workspace(int64_t rows, Reduction reduction);
}  // namespace cuda

}  // namespace fusedops
