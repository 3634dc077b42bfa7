// The norm ops as C++ functions: each is one call into the dispatcher, so devices, autograd and tracing are
// decided there. Formulas and limits: norm.cpp.
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace fusedops {

at::Tensor layer_norm(const at::Tensor& input, at::SymIntArrayRef normalized_shape,
                      const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
                      std::optional<at::ScalarType> out_dtype);

at::Tensor rms_norm(const at::Tensor& input, at::SymIntArrayRef normalized_shape,
                    const std::optional<at::Tensor>& weight, double eps, double weight_offset,
                    std::optional<at::ScalarType> out_dtype);

// (y, mean, rstd)
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_fwd(const at::Tensor& input,
                                                              at::SymIntArrayRef normalized_shape,
                                                              const std::optional<at::Tensor>& weight,
                                                              const std::optional<at::Tensor>& bias, double eps,
                                                              std::optional<at::ScalarType> out_dtype);

// (dx, dweight, dbias), undefined where output_mask is false
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_bwd(const at::Tensor& dy, const at::Tensor& input,
                                                              at::SymIntArrayRef normalized_shape,
                                                              const std::optional<at::Tensor>& weight,
                                                              const at::Tensor& mean, const at::Tensor& rstd,
                                                              std::array<bool, 3> output_mask,
                                                              std::optional<at::ScalarType> bias_dtype);

// (y, rstd)
std::tuple<at::Tensor, at::Tensor> rms_norm_fwd(const at::Tensor& input, at::SymIntArrayRef normalized_shape,
                                                const std::optional<at::Tensor>& weight, double eps,
                                                double weight_offset, std::optional<at::ScalarType> out_dtype);

// (dx, dweight), undefined where output_mask is false
std::tuple<at::Tensor, at::Tensor> rms_norm_bwd(const at::Tensor& dy, const at::Tensor& input,
                                                at::SymIntArrayRef normalized_shape,
                                                const std::optional<at::Tensor>& weight, const at::Tensor& rstd,
                                                double weight_offset, std::array<bool, 2> output_mask);

}  // namespace fusedops
