// What the autograd of every op shares.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "rows.h"

namespace fusedops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// In force where a backward that records no graph calls its op: autograd has nothing to add there, and PyTorch's
// fallback for ops without a derivative passes arguments on in boxes (0.4 us a call).
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

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

}  // namespace fusedops
