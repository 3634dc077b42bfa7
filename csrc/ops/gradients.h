// Gradients of parameters as Python holds them, without a Python object a gradient.
#pragma once

#include <optional>
#include <vector>

#include <pybind11/pybind11.h>

#include "adam.h"

namespace fusedops {

// Gradients of one device; to Python a sequence of tensors, which a list of them becomes by itself.
class GradientList {
 public:
  GradientList() = default;
  explicit GradientList(const std::vector<at::Tensor>& tensors);

  void add(const at::Tensor& grad);
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  int64_t largest() const { return largest_; }
  int64_t dtypes() const { return dtypes_; }
  Gradients pointers() const;

 private:
  std::vector<at::Tensor> tensors_;
  int64_t largest_ = 0;  // elements of it
  int64_t dtypes_ = 0;   // bit s is set where one is of c10::ScalarType s
};

// The gradients there are, a list a device in the order of their first ones. nullopt where a parameter or a gradient is
// no plain tensor, or a gradient not dense, of a dtype no kernel takes, or written to one element twice.
std::optional<std::vector<GradientList>> gradients_of(const pybind11::list& params);

}  // namespace fusedops
