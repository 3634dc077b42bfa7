// The add + norm ops as C++ functions: each is one call into the dispatcher, so devices, autograd and tracing are
// decided there. Formulas and limits: add_norm.cpp.
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace fusedops {

// (y, residual_out): the sum, or the same norm in residual_dtype where post_norm. Without a seed a call that drops
// elements draws one.
std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& input, const at::Tensor& residual,
                                                  at::SymIntArrayRef normalized_shape,
                                                  const std::optional<at::Tensor>& weight,
                                                  const std::optional<at::Tensor>& bias, double eps, double dropout_p,
                                                  bool post_norm, std::optional<at::ScalarType> out_dtype,
                                                  std::optional<at::ScalarType> residual_dtype,
                                                  const std::optional<at::Tensor>& seed);

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                                                at::SymIntArrayRef normalized_shape,
                                                const std::optional<at::Tensor>& weight, double eps,
                                                double weight_offset, double dropout_p, bool post_norm,
                                                std::optional<at::ScalarType> out_dtype,
                                                std::optional<at::ScalarType> residual_dtype,
                                                const std::optional<at::Tensor>& seed);

// (y, residual_out, total, mean, rstd); without a seed nothing is dropped. total is the sum where residual_out is not
// and keep_total asks for it, else undefined.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_fwd(
    const at::Tensor& input, const at::Tensor& residual, at::SymIntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
    const std::optional<at::Tensor>& seed, double dropout_p, bool post_norm, bool keep_total,
    std::optional<at::ScalarType> out_dtype, std::optional<at::ScalarType> residual_dtype);

// (dinput, dresidual, dweight, dbias), undefined where output_mask is false. dinput is undefined also where it would be
// dresidual's copy: both were asked for, and neither dropout nor a dtype tells them apart.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_bwd(
    const at::Tensor& dy, const std::optional<at::Tensor>& dresidual_out, const at::Tensor& total,
    at::SymIntArrayRef normalized_shape, const std::optional<at::Tensor>& weight, const at::Tensor& mean,
    const at::Tensor& rstd, const std::optional<at::Tensor>& seed, double dropout_p, bool post_norm,
    std::array<bool, 4> output_mask, at::ScalarType input_dtype, at::ScalarType residual_dtype,
    std::optional<at::ScalarType> bias_dtype);

// (y, residual_out, total, rstd), as above
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_rms_norm_fwd(
    const at::Tensor& input, const at::Tensor& residual, at::SymIntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight, double eps, double weight_offset, const std::optional<at::Tensor>& seed,
    double dropout_p, bool post_norm, bool keep_total, std::optional<at::ScalarType> out_dtype,
    std::optional<at::ScalarType> residual_dtype);

// (dinput, dresidual, dweight), as above
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_bwd(
    const at::Tensor& dy, const std::optional<at::Tensor>& dresidual_out, const at::Tensor& total,
    at::SymIntArrayRef normalized_shape, const std::optional<at::Tensor>& weight, const at::Tensor& rstd,
    double weight_offset, const std::optional<at::Tensor>& seed, double dropout_p, bool post_norm,
    std::array<bool, 3> output_mask, at::ScalarType input_dtype, at::ScalarType residual_dtype);

// A seed from the generator of the device of `like`, whose values do not matter: int64 [2]. While a CUDA graph is
// captured the generator's state is on the device, so that each replay draws anew.
at::Tensor dropout_seed(const at::Tensor& like);

}  // namespace fusedops
