// Autograd of add_layer_norm and add_rms_norm. Forward saves the sum, weight, the statistics and the seed, and only
// where a gradient is wanted. Backward is one call of the backward op where the norm has a gradient; without one, and
// under create_graph, it is the same formula in differentiable torch ops.
//
//   dtotal = dnorm(dy) + dresidual_out, or dnorm(dy + dresidual_out) in post-norm mode
//   dresidual = dtotal,  dinput = dtotal · (what forward multiplied the input with)
//
// In post-norm mode the sum is a third output, which nobody sees: second derivatives find their way back through it.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "add_norm.h"
#include "norm_autograd.h"

namespace fusedops {

namespace {

// A call's seed: given, or drawn where it drops elements, or none. Each draw has an argument of its own, or the
// compiler would take two seeds for one: it knows only torch's own ops for random. (An empty tensor is not found twice
// either.)
OptTensor seed_for(const OptTensor& seed, double dropout_p, const Tensor& input) {
  if (given(seed) || !(dropout_p > 0)) return seed;
  return dropout_seed(at::empty({0}, input.options().dtype(at::kLong).memory_format(std::nullopt)));
}

// What forward multiplied the input with: ones, dropped and added to zeros.
Tensor dropout_factor(const Tensor& total, at::SymIntArrayRef normalized_shape, const Tensor& seed, double p) {
  const auto options = total.options().dtype(stats_dtype(total.scalar_type())).memory_format(std::nullopt);
  const Tensor ones = at::ones_symint(total.sym_sizes(), options), zeros = at::zeros_symint(total.sym_sizes(), options);
  return std::get<1>(add_rms_norm_fwd(ones, zeros, normalized_shape, {}, 1.0, 0.0, seed, p, false, false, {}, {}));
}

// What forward leaves for backward, whichever the norm.
struct Saved {
  Tensor total, weight, mean, rstd, seed;
  std::vector<c10::SymInt> shape;
  double eps, weight_offset, dropout_p;
  bool post_norm;
  at::ScalarType input_dtype, residual_dtype;
  OptDtype bias_dtype;
  std::array<bool, 4> mask;  // input, residual, weight, bias

  static void save(AutogradContext* ctx, const Tensor& input, const Tensor& residual, const OptTensor& weight,
                   const OptTensor& bias, const Tensor& residual_out, const Tensor& total, const Tensor& mean,
                   const Tensor& rstd, const OptTensor& seed, size_t row_dims, double eps, double weight_offset,
                   double dropout_p, bool post_norm) {
    ctx->set_materialize_grads(false);
    const Tensor& kept = post_norm ? total : residual_out;
    ctx->save_for_backward({kept, weight.value_or(Tensor()), mean, rstd, seed.value_or(Tensor())});
    ctx->saved_data["row_dims"] = static_cast<int64_t>(row_dims);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["weight_offset"] = weight_offset;
    ctx->saved_data["dropout_p"] = dropout_p;
    ctx->saved_data["post_norm"] = post_norm;
    ctx->saved_data["input_dtype"] = input.scalar_type();
    ctx->saved_data["residual_dtype"] = residual.scalar_type();
    ctx->saved_data["bias_dtype"] = given(bias) ? OptDtype(bias->scalar_type()) : OptDtype();
    if (!input.requires_grad() && !residual.requires_grad()) ctx->mark_non_differentiable({kept});
  }

  explicit Saved(AutogradContext* ctx) {
    const auto tensors = ctx->get_saved_variables();
    total = tensors[0], weight = tensors[1], mean = tensors[2], rstd = tensors[3], seed = tensors[4];
    shape = row_shape(total, ctx->saved_data["row_dims"].toInt());
    eps = ctx->saved_data["eps"].toDouble();
    weight_offset = ctx->saved_data["weight_offset"].toDouble();
    dropout_p = ctx->saved_data["dropout_p"].toDouble();
    post_norm = ctx->saved_data["post_norm"].toBool();
    input_dtype = ctx->saved_data["input_dtype"].toScalarType();
    residual_dtype = ctx->saved_data["residual_dtype"].toScalarType();
    bias_dtype = ctx->saved_data["bias_dtype"].toOptional<at::ScalarType>();
    // Edges are counted over the tensors that forward was given.
    const size_t bias_edge = weight.defined() ? 3 : 2;
    mask = {ctx->needs_input_grad(0), ctx->needs_input_grad(1), weight.defined() && ctx->needs_input_grad(2),
            bias_dtype && ctx->needs_input_grad(bias_edge)};
  }
};

// The gradients that backward is given, any of them undefined.
struct Incoming {
  Tensor dy, dresidual_out, dtotal;  // the last only of a sum that is an output of its own

  Incoming(bool post_norm, const variable_list& grads) : dy(grads[0]), dresidual_out(grads[1]) {
    if (post_norm) dtotal = grads[2];
    if (post_norm && !dy.defined()) std::swap(dy, dresidual_out);  // one gradient of the norm is as good as the other
  }
  bool takes_torch() const { return !dy.defined() || dtotal.defined() || at::GradMode::is_enabled(); }
};

// dinput, dresidual, dweight, dbias in torch ops, of whichever gradients there are.
variable_list bwd_in_torch(bool rms, const Saved& s, const Incoming& in) {
  variable_list grads(4);
  const auto widened = [&](const Tensor& t) { return t.defined() ? t.to(stats_dtype(s.total.scalar_type())) : t; };
  Tensor dy = widened(in.dy), dtotal = widened(s.post_norm ? in.dtotal : in.dresidual_out);
  if (s.post_norm && in.dresidual_out.defined()) dy = dy + widened(in.dresidual_out);
  if (dy.defined()) {
    auto d = differentiable_bwd(rms, dy, s.total, s.weight, s.shape.size(), s.eps, s.weight_offset,
                                {s.mask[0] || s.mask[1], s.mask[2], s.mask[3]}, s.bias_dtype);
    if (d[0].defined()) dtotal = dtotal.defined() ? dtotal + d[0] : d[0];
    grads[2] = d[1];
    grads[3] = d[2];
  }
  if (!dtotal.defined()) return grads;
  if (s.mask[1]) grads[1] = dtotal.to(s.residual_dtype);
  if (s.mask[0]) {
    if (s.seed.defined()) dtotal = dtotal * dropout_factor(s.total, s.shape, s.seed, s.dropout_p);
    grads[0] = dtotal.to(s.input_dtype);
  }
  return grads;
}

OptTensor optional(const Tensor& t) { return t.defined() ? OptTensor(t) : OptTensor(); }

struct AddLayerNorm : torch::autograd::Function<AddLayerNorm> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& residual,
                               at::SymIntArrayRef normalized_shape, const OptTensor& weight, const OptTensor& bias,
                               double eps, double dropout_p, bool post_norm, OptDtype out_dtype,
                               OptDtype residual_dtype, const OptTensor& given_seed) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const OptTensor seed = seed_for(given_seed, dropout_p, input);
    auto [y, residual_out, total, mean, rstd] =
        add_layer_norm_fwd(input, residual, normalized_shape, weight, bias, eps, seed, dropout_p, post_norm,
                           /*keep_total=*/true, out_dtype, residual_dtype);
    Saved::save(ctx, input, residual, weight, bias, residual_out, total, mean, rstd, seed, normalized_shape.size(), eps,
                0.0, dropout_p, post_norm);
    if (!post_norm) return {y, residual_out};
    return {y, residual_out, total};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved s(ctx);
    const Incoming in(s.post_norm, grads);
    variable_list d;
    if (in.takes_torch()) {
      d = bwd_in_torch(false, s, in);
    } else {
      const BelowAutograd guard;
      auto [dinput, dresidual, dweight, dbias] = add_layer_norm_bwd(
          in.dy, optional(in.dresidual_out), s.total, s.shape, s.weight, s.mean, s.rstd, optional(s.seed), s.dropout_p,
          s.post_norm, s.mask, s.input_dtype, s.residual_dtype, s.bias_dtype);
      d = {s.mask[0] && !dinput.defined() ? dresidual : dinput, dresidual, dweight, dbias};
    }
    return {d[0], d[1], Tensor(), d[2], d[3], Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

struct AddRMSNorm : torch::autograd::Function<AddRMSNorm> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& residual,
                               at::SymIntArrayRef normalized_shape, const OptTensor& weight, double eps,
                               double weight_offset, double dropout_p, bool post_norm, OptDtype out_dtype,
                               OptDtype residual_dtype, const OptTensor& given_seed) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const OptTensor seed = seed_for(given_seed, dropout_p, input);
    auto [y, residual_out, total, rstd] =
        add_rms_norm_fwd(input, residual, normalized_shape, weight, eps, weight_offset, seed, dropout_p, post_norm,
                         /*keep_total=*/true, out_dtype, residual_dtype);
    Saved::save(ctx, input, residual, weight, {}, residual_out, total, {}, rstd, seed, normalized_shape.size(), eps,
                weight_offset, dropout_p, post_norm);
    if (!post_norm) return {y, residual_out};
    return {y, residual_out, total};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved s(ctx);
    const Incoming in(s.post_norm, grads);
    variable_list d;
    if (in.takes_torch()) {
      d = bwd_in_torch(true, s, in);
    } else {
      const BelowAutograd guard;
      auto [dinput, dresidual, dweight] = add_rms_norm_bwd(
          in.dy, optional(in.dresidual_out), s.total, s.shape, s.weight, s.rstd, s.weight_offset, optional(s.seed),
          s.dropout_p, s.post_norm, {s.mask[0], s.mask[1], s.mask[2]}, s.input_dtype, s.residual_dtype);
      d = {s.mask[0] && !dinput.defined() ? dresidual : dinput, dresidual, dweight};
    }
    return {d[0], d[1], Tensor(), d[2], Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> add_layer_norm_autograd(const Tensor& input, const Tensor& residual,
                                                   at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                                                   const OptTensor& bias, double eps, double dropout_p, bool post_norm,
                                                   OptDtype out_dtype, OptDtype residual_dtype, const OptTensor& seed) {
  if (at::GradMode::is_enabled() &&
      (input.requires_grad() || residual.requires_grad() || wants_grad(weight) || wants_grad(bias))) {
    auto out = AddLayerNorm::apply(input, residual, normalized_shape, weight, bias, eps, dropout_p, post_norm,
                                   out_dtype, residual_dtype, seed);
    return {out[0], out[1]};
  }
  refuse_forward_mode("add_layer_norm", input, OptTensor(residual), weight, bias);
  const at::AutoDispatchBelowADInplaceOrView guard;
  // The seed comes from outside the op: a graph merges equal calls, and one traced without gradients may be run with
  // them, for which the op has to be whole.
  return add_layer_norm(input, residual, normalized_shape, weight, bias, eps, dropout_p, post_norm, out_dtype,
                        residual_dtype, seed_for(seed, dropout_p, input));
}

std::tuple<Tensor, Tensor> add_rms_norm_autograd(const Tensor& input, const Tensor& residual,
                                                 at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                                                 double eps, double weight_offset, double dropout_p, bool post_norm,
                                                 OptDtype out_dtype, OptDtype residual_dtype, const OptTensor& seed) {
  if (at::GradMode::is_enabled() && (input.requires_grad() || residual.requires_grad() || wants_grad(weight))) {
    auto out = AddRMSNorm::apply(input, residual, normalized_shape, weight, eps, weight_offset, dropout_p, post_norm,
                                 out_dtype, residual_dtype, seed);
    return {out[0], out[1]};
  }
  refuse_forward_mode("add_rms_norm", input, OptTensor(residual), weight);
  const at::AutoDispatchBelowADInplaceOrView guard;
  // The seed comes from outside the op: a graph merges equal calls, and one traced without gradients may be run with
  // them, for which the op has to be whole.
  return add_rms_norm(input, residual, normalized_shape, weight, eps, weight_offset, dropout_p, post_norm, out_dtype,
                      residual_dtype, seed_for(seed, dropout_p, input));
}

}  // namespace

}  // namespace fusedops

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) {
  m.impl("add_layer_norm", &fusedops::add_layer_norm_autograd);
  m.impl("add_rms_norm", &fusedops::add_rms_norm_autograd);
}
