// What the autograd of the norms and of the add + norms share.
#pragma once

#include <array>
#include <vector>

#include "autograd.h"
#include "norm_args.h"

namespace fusedops {

inline std::vector<c10::SymInt> row_shape(const Tensor& input, int64_t row_dims) {
  const auto sizes = input.sym_sizes();
  return sizes.slice(sizes.size() - row_dims).vec();
}

// dx (not rounded), dweight, dbias as differentiable functions of dy, x and weight: the statistics are computed anew,
// because the saved ones are constants to autograd and would drop their part of the second derivative.
variable_list differentiable_bwd(bool rms, const Tensor& dy, const Tensor& x, const OptTensor& weight, size_t row_dims,
                                 double eps, double weight_offset, std::array<bool, 3> mask, OptDtype bias_dtype);

}  // namespace fusedops
