// Autograd of cross_entropy. Forward saves the logits, the targets, two numbers a row and what a mean divides by, and
// only where a gradient is wanted; backward is one call of the backward op, or, under create_graph, the formula of
// csrc/cross_entropy.h in differentiable torch ops.
#include "cross_entropy.h"

#include <array>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "../cross_entropy.h"
#include "autograd.h"

namespace fusedops {

namespace {

constexpr std::array kReductions{"none", "mean", "sum"};  // by code

int64_t code_of(std::string_view reduction) {
  int64_t code = 0;
  while (code < 2 && reduction != kReductions[code]) ++code;
  return code;
}

// What saved_data holds of a call, in types that a compiled backward can be keyed by.
struct Options {
  int64_t ignore_index, reduction;
  double smoothing, z_loss, softcap;  // softcap 0: none
  bool in_place;

  void save(AutogradContext* ctx) const {
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["reduction"] = reduction;
    ctx->saved_data["smoothing"] = smoothing;
    ctx->saved_data["z_loss"] = z_loss;
    ctx->saved_data["softcap"] = softcap;
    ctx->saved_data["in_place"] = in_place;
  }
  static Options load(AutogradContext* ctx) {
    auto& saved = ctx->saved_data;
    return {saved["ignore_index"].toInt(), saved["reduction"].toInt(),  saved["smoothing"].toDouble(),
            saved["z_loss"].toDouble(),    saved["softcap"].toDouble(), saved["in_place"].toBool()};
  }
  std::string_view name() const { return kReductions[reduction]; }
  std::optional<double> cap() const { return softcap == 0 ? std::nullopt : std::optional<double>(softcap); }
};

// The gradient as a differentiable function of dloss and input: lse is computed anew, because what is saved of it
// is constant to autograd and would drop its part of the second derivative.
Tensor differentiable_bwd(const Tensor& dloss, const Tensor& input, const Tensor& target, const Tensor& weight,
                          const Tensor& total_weight, const Options& o) {
  const auto acc = stats_dtype(input.scalar_type());
  const int64_t dim = input.dim() > 1 ? 1 : 0;
  const Tensor kept = target.ne(o.ignore_index);
  const Tensor logits = at::where(kept.unsqueeze(dim), input.to(acc), at::zeros({}, input.options().dtype(acc)));
  const Tensor z = o.softcap == 0 ? logits : (logits / o.softcap).tanh() * o.softcap;
  const Tensor lse = at::logsumexp(z, dim, /*keepdim=*/true);
  const double classes = static_cast<double>(input.size(dim));
  const Tensor at = at::where(kept, target, at::zeros_like(target)).unsqueeze(dim);
  std::vector<int64_t> shape(input.dim(), 1);
  shape[dim] = -1;
  const Tensor w = (weight.defined() ? weight.to(acc) : at::ones({input.size(dim)}, z.options())).view(shape);
  const Tensor own = w.expand_as(z).gather(dim, at) * (1 - o.smoothing);
  Tensor g = at::where(kept, dloss, at::zeros({}, dloss.options())).unsqueeze(dim);
  if (kReductions[o.reduction] == std::string_view("mean")) g = g / total_weight;
  const Tensor even = w * (o.smoothing / classes);
  const Tensor of_exp = own + even.sum() + lse * (2 * o.z_loss);
  Tensor dz = of_exp * (z - lse).exp() - even - at::zeros_like(z).scatter(dim, at, own);
  if (o.softcap != 0) dz = dz * (1 - (z / o.softcap).square());
  return (g * dz).to(input.scalar_type());
}

struct CrossEntropyGrad : torch::autograd::Function<CrossEntropyGrad> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& target, const OptTensor& weight,
                        const Options& o) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, stats, total_weight] =
        cross_entropy_fwd(input, target, weight, o.ignore_index, o.name(), o.smoothing, o.z_loss, o.cap());
    ctx->save_for_backward({input, target, weight.value_or(Tensor()), stats, total_weight});
    o.save(ctx);
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &input = saved[0], &target = saved[1], &weight = saved[2], &stats = saved[3], &total_weight = saved[4];
    const Options o = Options::load(ctx);
    const auto result = [](const Tensor& dx) { return variable_list{dx, Tensor(), Tensor(), Tensor()}; };
    if (at::GradMode::is_enabled()) {
      return result(differentiable_bwd(grads[0], input, target, weight, total_weight, o));
    }
    // A compiler, which sees tensors of its own kind, plans memory itself.
    if (!o.in_place || input.unsafeGetTensorImpl()->is_python_dispatch()) {
      const BelowAutograd guard;
      return result(cross_entropy_bwd(grads[0], input, target, weight, stats, total_weight, o.ignore_index, o.name(),
                                      o.smoothing, o.z_loss, o.cap()));
    }
    const Tensor dx = input.detach();
    cross_entropy_bwd_(dx, grads[0], target, weight, stats, total_weight, o.ignore_index, o.name(), o.smoothing,
                       o.z_loss, o.cap());
    dx.unsafeGetTensorImpl()->bump_version();  // it shares the logits': whoever saved them is told
    return result(dx);
  }
};

Tensor cross_entropy_autograd(const Tensor& input, const Tensor& target, const OptTensor& weight, int64_t ignore_index,
                              std::string_view reduction, double label_smoothing, double z_loss,
                              std::optional<double> softcap, bool inplace_backward) {
  if (at::GradMode::is_enabled() && input.requires_grad()) {
    const Options o{ignore_index, code_of(reduction), label_smoothing, z_loss, softcap.value_or(0), inplace_backward};
    return CrossEntropyGrad::apply(input, target, weight, o);
  }
  refuse_forward_mode("cross_entropy", input, weight);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap,
                       inplace_backward);
}

}  // namespace

}  // namespace fusedops

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) { m.impl("cross_entropy", &fusedops::cross_entropy_autograd); }
