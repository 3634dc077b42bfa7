// Autograd of layer_norm and rms_norm. Forward saves input, weight and the statistics, and only where a gradient is
// wanted; backward is one call of the backward op, or, under create_graph, the same formula in differentiable torch
// ops.
//
//   x̂ = (x - mean)·rstd,  g = dy·w   (RMSNorm: no mean; w + weight_offset)
//   dx = rstd·(g - mean(g) - x̂·mean(g·x̂)),  dweight = Σ_rows dy·x̂,  dbias = Σ_rows dy
#include "norm_autograd.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "norm.h"

namespace fusedops {

variable_list differentiable_bwd(bool rms, const Tensor& dy, const Tensor& x, const OptTensor& weight, size_t row_dims,
                                 double eps, double weight_offset, std::array<bool, 3> mask, OptDtype bias_dtype) {
  const auto acc = stats_dtype(x.scalar_type());
  std::vector<int64_t> inner, lead;
  for (int64_t d = 0; d < x.dim(); ++d) (d + static_cast<int64_t>(row_dims) < x.dim() ? lead : inner).push_back(d);
  const auto sum_rows = [&](const Tensor& t) { return lead.empty() ? t : t.sum(lead); };

  const Tensor xf = x.to(acc), dyf = dy.to(acc);
  const Tensor centred = rms ? xf : xf - xf.mean(inner, /*keepdim=*/true);
  const Tensor rstd = (centred.square().mean(inner, /*keepdim=*/true) + eps).rsqrt();
  const Tensor xhat = centred * rstd;
  variable_list grads(3);
  if (mask[0]) {
    const Tensor g = given(weight) ? dyf * (weight->to(acc) + weight_offset) : dyf;
    Tensor inside = g - xhat * (g * xhat).mean(inner, /*keepdim=*/true);
    if (!rms) inside = inside - g.mean(inner, /*keepdim=*/true);
    grads[0] = rstd * inside;
  }
  if (mask[1]) grads[1] = sum_rows(dyf * xhat).to(weight->scalar_type());
  if (mask[2]) grads[2] = sum_rows(dyf).to(bias_dtype.value_or(acc));
  return grads;
}

namespace {

Tensor rounded(const Tensor& dx, const Tensor& input) { return dx.defined() ? dx.to(input.scalar_type()) : dx; }

struct LayerNorm : torch::autograd::Function<LayerNorm> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, at::SymIntArrayRef normalized_shape,
                        const OptTensor& weight, const OptTensor& bias, double eps, OptDtype out_dtype) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, mean, rstd] = layer_norm_fwd(input, normalized_shape, weight, bias, eps, out_dtype);
    ctx->save_for_backward({input, weight.value_or(Tensor()), mean, rstd});
    ctx->saved_data["row_dims"] = static_cast<int64_t>(normalized_shape.size());
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["bias_dtype"] = given(bias) ? OptDtype(bias->scalar_type()) : OptDtype();
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1];
    const int64_t row_dims = ctx->saved_data["row_dims"].toInt();
    const auto bias_dtype = ctx->saved_data["bias_dtype"].toOptional<at::ScalarType>();
    // Edges are counted over the tensors that forward was given.
    const size_t bias_edge = weight.defined() ? 2 : 1;
    const std::array<bool, 3> mask{ctx->needs_input_grad(0), weight.defined() && ctx->needs_input_grad(1),
                                   bias_dtype && ctx->needs_input_grad(bias_edge)};
    if (at::GradMode::is_enabled()) {
      auto d = differentiable_bwd(false, grads[0], input, weight, row_dims, ctx->saved_data["eps"].toDouble(), 0.0,
                                  mask, bias_dtype);
      return {rounded(d[0], input), Tensor(), d[1], d[2], Tensor(), Tensor()};
    }
    const BelowAutograd guard;
    auto [dx, dweight, dbias] =
        layer_norm_bwd(grads[0], input, row_shape(input, row_dims), weight, saved[2], saved[3], mask, bias_dtype);
    return {dx, Tensor(), dweight, dbias, Tensor(), Tensor()};
  }
};

struct RMSNorm : torch::autograd::Function<RMSNorm> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, at::SymIntArrayRef normalized_shape,
                        const OptTensor& weight, double eps, double weight_offset, OptDtype out_dtype) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, rstd] = rms_norm_fwd(input, normalized_shape, weight, eps, weight_offset, out_dtype);
    ctx->save_for_backward({input, weight.value_or(Tensor()), rstd});
    ctx->saved_data["row_dims"] = static_cast<int64_t>(normalized_shape.size());
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["weight_offset"] = weight_offset;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1];
    const int64_t row_dims = ctx->saved_data["row_dims"].toInt();
    const double weight_offset = ctx->saved_data["weight_offset"].toDouble();
    const std::array<bool, 2> mask{ctx->needs_input_grad(0), weight.defined() && ctx->needs_input_grad(1)};
    if (at::GradMode::is_enabled()) {
      auto d = differentiable_bwd(true, grads[0], input, weight, row_dims, ctx->saved_data["eps"].toDouble(),
                                  weight_offset, {mask[0], mask[1], false}, {});
      return {rounded(d[0], input), Tensor(), d[1], Tensor(), Tensor(), Tensor()};
    }
    const BelowAutograd guard;
    auto [dx, dweight] =
        rms_norm_bwd(grads[0], input, row_shape(input, row_dims), weight, saved[2], weight_offset, mask);
    return {dx, Tensor(), dweight, Tensor(), Tensor(), Tensor()};
  }
};

Tensor layer_norm_autograd(const Tensor& input, at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                           const OptTensor& bias, double eps, OptDtype out_dtype) {
  if (at::GradMode::is_enabled() && (input.requires_grad() || wants_grad(weight) || wants_grad(bias))) {
    return LayerNorm::apply(input, normalized_shape, weight, bias, eps, out_dtype);
  }
  refuse_forward_mode("layer_norm", input, weight, bias);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return layer_norm(input, normalized_shape, weight, bias, eps, out_dtype);
}

Tensor rms_norm_autograd(const Tensor& input, at::SymIntArrayRef normalized_shape, const OptTensor& weight, double eps,
                         double weight_offset, OptDtype out_dtype) {
  if (at::GradMode::is_enabled() && (input.requires_grad() || wants_grad(weight))) {
    return RMSNorm::apply(input, normalized_shape, weight, eps, weight_offset, out_dtype);
  }
  refuse_forward_mode("rms_norm", input, weight);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return rms_norm(input, normalized_shape, weight, eps, weight_offset, out_dtype);
}

}  // namespace

}  // namespace fusedops

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) {
  m.impl("layer_norm", &fusedops::layer_norm_autograd);
  m.impl("rms_norm", &fusedops::rms_norm_autograd);
}
