// layer_norm, rms_norm and their forward and backward halves: tensors to pointers, checks, device guard, stream.
// One function serves CPU, CUDA and Meta, so shapes, strides and messages cannot differ between them. Autograd:
// norm_autograd.cpp. Of a sum: add_norm.cpp.
#include "norm.h"

#include <torch/library.h>

#include "norm_args.h"

namespace fusedops {

namespace {

// ---- the two halves -------------------------------------------------------------------------------------------

enum class Stats { drop, keep };

std::tuple<Tensor, Tensor, Tensor> forward(Norm norm, const Tensor& input, at::SymIntArrayRef normalized_shape,
                                           const OptTensor& weight, const OptTensor& bias, double eps,
                                           double weight_offset, OptDtype out_dtype, Stats stats) {
  const char* const op = name_of(norm == Norm::rms, /*add=*/false);
  check_shape(op, input, normalized_shape);
  check_param({op, "weight"}, weight, input, normalized_shape);
  check_param({op, "bias"}, bias, input, normalized_shape);
  const auto y_dtype = out_dtype.value_or(input.scalar_type());
  check_double({op, "out_dtype"}, y_dtype, input);
  const auto x_code = dtype_code({op, "input"}, input.scalar_type());
  const auto y_code = dtype_code({op, "out_dtype"}, y_dtype);

  const auto options = input.options().memory_format(std::nullopt);
  Tensor y = at::empty_symint(input.sym_sizes(), options.dtype(y_dtype));
  Tensor mean, rstd;
  if (stats == Stats::keep) {
    const auto rows = row_count(input, normalized_shape);
    const auto stats_options = options.dtype(stats_dtype(input.scalar_type()));
    if (norm == Norm::layer) mean = at::empty_symint({rows}, stats_options);
    rstd = at::empty_symint({rows}, stats_options);
  }
  if (input.is_meta()) return {y, mean, rstd};
  if (input.numel() == 0) {  // rows without elements have no statistics
    if (mean.defined()) mean.zero_();
    if (rstd.defined()) rstd.zero_();
    return {y, mean, rstd};
  }

  const Rows x({op, "input"}, input, normalized_shape.size());
  const Param w({op, "weight"}, weight), b({op, "bias"}, bias);
  NormFwd args{};
  args.rms = norm == Norm::rms;
  args.hidden = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(normalized_shape));
  args.rows = input.numel() / args.hidden;
  args.x = x.tensor.const_data_ptr();
  args.x_stride = x.stride;
  args.x_dtype = x_code;
  args.weight = w.data();
  args.weight_dtype = w.dtype;
  args.bias = b.data();
  args.bias_dtype = b.dtype;
  args.eps = eps;
  args.weight_offset = weight_offset;
  args.y = y.mutable_data_ptr();
  args.y_dtype = y_code;
  args.mean = data_or_null(mean);
  args.rstd = data_or_null(rstd);
  launch(args, input.device());
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> backward(Norm norm, const Tensor& dy, const Tensor& input,
                                            at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                                            const OptTensor& mean, const Tensor& rstd, double weight_offset,
                                            std::array<bool, 3> output_mask, OptDtype bias_dtype) {
  const char* const op = name_of(norm == Norm::rms, /*add=*/false);
  check_shape(op, input, normalized_shape);
  check_param({op, "weight"}, weight, input, normalized_shape);
  check_like_input({op, "dy"}, dy, input);
  if (mean) check_stats({op, "mean"}, *mean, input, normalized_shape);
  check_stats({op, "rstd"}, rstd, input, normalized_shape);
  const bool has_weight = weight && weight->defined();
  TORCH_CHECK_VALUE(!output_mask[1] || has_weight, op, ": output_mask: dweight was asked for, but weight is None");
  const auto x_code = dtype_code({op, "input"}, input.scalar_type());
  const auto dy_code = dtype_code({op, "dy"}, dy.scalar_type());
  const auto dbias_dtype = bias_dtype.value_or(has_weight ? weight->scalar_type() : stats_dtype(input.scalar_type()));
  const auto dbias_code = dtype_code({op, "bias_dtype"}, dbias_dtype);

  const auto options = input.options().memory_format(std::nullopt);
  Tensor dx, dweight, dbias;
  if (output_mask[0]) dx = at::empty_symint(input.sym_sizes(), options);
  if (output_mask[1]) dweight = at::empty_symint(normalized_shape, options.dtype(weight->scalar_type()));
  if (output_mask[2]) dbias = at::empty_symint(normalized_shape, options.dtype(dbias_dtype));
  if (input.is_meta()) return {dx, dweight, dbias};
  if (input.numel() == 0) {  // sums over no rows
    if (dweight.defined()) dweight.zero_();
    if (dbias.defined()) dbias.zero_();
    return {dx, dweight, dbias};
  }

  const Rows x({op, "input"}, input, normalized_shape.size()), g({op, "dy"}, dy, normalized_shape.size());
  const Param w({op, "weight"}, weight);
  const Tensor mean_data = mean ? mean->contiguous() : Tensor();
  const Tensor rstd_data = rstd.contiguous();
  NormBwd args{};
  args.rms = norm == Norm::rms;
  args.hidden = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(normalized_shape));
  args.rows = input.numel() / args.hidden;
  args.x = x.tensor.const_data_ptr();
  args.x_stride = x.stride;
  args.x_dtype = x_code;
  args.dy = g.tensor.const_data_ptr();
  args.dy_stride = g.stride;
  args.dy_dtype = dy_code;
  args.weight = w.data();
  args.weight_dtype = w.dtype;
  args.weight_offset = weight_offset;
  args.mean = mean_data.defined() ? mean_data.const_data_ptr() : nullptr;
  args.rstd = rstd_data.const_data_ptr();
  args.dx = data_or_null(dx);
  args.dx_dtype = x_code;
  args.dweight = data_or_null(dweight);
  args.dbias = data_or_null(dbias);
  args.dbias_dtype = dbias_code;
  launch(args, input.device());
  return {dx, dweight, dbias};
}

// ---- kernels of the schemas -----------------------------------------------------------------------------------

Tensor layer_norm_kernel(const Tensor& input, at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                         const OptTensor& bias, double eps, OptDtype out_dtype) {
  return std::get<0>(forward(Norm::layer, input, normalized_shape, weight, bias, eps, 0.0, out_dtype, Stats::drop));
}

Tensor rms_norm_kernel(const Tensor& input, at::SymIntArrayRef normalized_shape, const OptTensor& weight, double eps,
                       double weight_offset, OptDtype out_dtype) {
  return std::get<0>(
      forward(Norm::rms, input, normalized_shape, weight, {}, eps, weight_offset, out_dtype, Stats::drop));
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd_kernel(const Tensor& input, at::SymIntArrayRef normalized_shape,
                                                         const OptTensor& weight, const OptTensor& bias, double eps,
                                                         OptDtype out_dtype) {
  return forward(Norm::layer, input, normalized_shape, weight, bias, eps, 0.0, out_dtype, Stats::keep);
}

std::tuple<Tensor, Tensor> rms_norm_fwd_kernel(const Tensor& input, at::SymIntArrayRef normalized_shape,
                                               const OptTensor& weight, double eps, double weight_offset,
                                               OptDtype out_dtype) {
  auto [y, mean, rstd] =
      forward(Norm::rms, input, normalized_shape, weight, {}, eps, weight_offset, out_dtype, Stats::keep);
  return {y, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd_kernel(const Tensor& dy, const Tensor& input,
                                                         at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                                                         const Tensor& mean, const Tensor& rstd,
                                                         std::array<bool, 3> output_mask, OptDtype bias_dtype) {
  return backward(Norm::layer, dy, input, normalized_shape, weight, mean, rstd, 0.0, output_mask, bias_dtype);
}

std::tuple<Tensor, Tensor> rms_norm_bwd_kernel(const Tensor& dy, const Tensor& input,
                                               at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                                               const Tensor& rstd, double weight_offset,
                                               std::array<bool, 2> output_mask) {
  auto [dx, dweight, dbias] = backward(Norm::rms, dy, input, normalized_shape, weight, {}, rstd, weight_offset,
                                       {output_mask[0], output_mask[1], false}, {});
  return {dx, dweight};
}

void register_norms(torch::Library& m) {
  m.impl("layer_norm", &layer_norm_kernel);
  m.impl("layer_norm_fwd", &layer_norm_fwd_kernel);
  m.impl("layer_norm_bwd", &layer_norm_bwd_kernel);
  m.impl("rms_norm", &rms_norm_kernel);
  m.impl("rms_norm_fwd", &rms_norm_fwd_kernel);
  m.impl("rms_norm_bwd", &rms_norm_bwd_kernel);
}

}  // namespace

// ---- into the dispatcher --------------------------------------------------------------------------------------

Tensor layer_norm(const Tensor& input, at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                  const OptTensor& bias, double eps, OptDtype out_dtype) {
  static const auto op = find_op<decltype(layer_norm)>("fusedops::layer_norm");
  return op.call(input, normalized_shape, weight, bias, eps, out_dtype);
}

Tensor rms_norm(const Tensor& input, at::SymIntArrayRef normalized_shape, const OptTensor& weight, double eps,
                double weight_offset, OptDtype out_dtype) {
  static const auto op = find_op<decltype(rms_norm)>("fusedops::rms_norm");
  return op.call(input, normalized_shape, weight, eps, weight_offset, out_dtype);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& input, at::SymIntArrayRef normalized_shape,
                                                  const OptTensor& weight, const OptTensor& bias, double eps,
                                                  OptDtype out_dtype) {
  static const auto op = find_op<decltype(layer_norm_fwd)>("fusedops::layer_norm_fwd");
  return op.call(input, normalized_shape, weight, bias, eps, out_dtype);
}

std::tuple<Tensor, Tensor> rms_norm_fwd(const Tensor& input, at::SymIntArrayRef normalized_shape,
                                        const OptTensor& weight, double eps, double weight_offset, OptDtype out_dtype) {
  static const auto op = find_op<decltype(rms_norm_fwd)>("fusedops::rms_norm_fwd");
  return op.call(input, normalized_shape, weight, eps, weight_offset, out_dtype);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& dy, const Tensor& input,
                                                  at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                                                  const Tensor& mean, const Tensor& rstd,
                                                  std::array<bool, 3> output_mask, OptDtype bias_dtype) {
  static const auto op = find_op<decltype(layer_norm_bwd)>("fusedops::layer_norm_bwd");
  return op.call(dy, input, normalized_shape, weight, mean, rstd, output_mask, bias_dtype);
}

std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& dy, const Tensor& input, at::SymIntArrayRef normalized_shape,
                                        const OptTensor& weight, const Tensor& rstd, double weight_offset,
                                        std::array<bool, 2> output_mask) {
  static const auto op = find_op<decltype(rms_norm_bwd)>("fusedops::rms_norm_bwd");
  return op.call(dy, input, normalized_shape, weight, rstd, weight_offset, output_mask);
}

}  // namespace fusedops

TORCH_LIBRARY_IMPL(fusedops, CPU, m) { fusedops::register_norms(m); }
TORCH_LIBRARY_IMPL(fusedops, Meta, m) { fusedops::register_norms(m); }
#ifdef FUSEDOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fusedops, CUDA, m) { fusedops::register_norms(m); }
#endif
