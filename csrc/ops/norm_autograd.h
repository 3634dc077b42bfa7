// What the autograd of the norms and of the add + norms share.
#pragma once

#include <array>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>

#include "norm_args.h"

namespace fusedops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline bool wants_grad(const OptTensor& t) { return given(t) && t->requires_grad(); }

inline bool is_dual(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }

// Python takes plain torch for dual tensors; whoever gets here otherwise (an exported program) must not get tangents
// of zero.
template <class... Parameters>
void refuse_forward_mode(const char* op, const Tensor& input, const Parameters&... parameters) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_dual(input) && !(is_dual(parameters.value_or(Tensor())) || ...), op,
      ": forward-mode derivatives: expected none in a graph of the native op, got dual tensors");
}

inline std::vector<c10::SymInt> row_shape(const Tensor& input, int64_t row_dims) {
  const auto sizes = input.sym_sizes();
  return sizes.slice(sizes.size() - row_dims).vec();
}

// dx (not rounded), dweight, dbias as differentiable functions of dy, x and weight: the statistics are computed anew,
// because the saved ones are constants to autograd and would drop their part of the second derivative.
variable_list differentiable_bwd(bool rms, const Tensor& dy, const Tensor& x, const OptTensor& weight, size_t row_dims,
                                 double eps, double weight_offset, std::array<bool, 3> mask, OptDtype bias_dtype);

}  // namespace fusedops
