// add_layer_norm, add_rms_norm and their halves: tensors to pointers, checks, device guard, stream; one function for
// CPU, CUDA and Meta. Autograd: add_norm_autograd.cpp.
//
//   total = residual + dropout(input), rounded once;  y = norm(total), of the rounded numbers
//   residual_out = total, or y in total's dtype (post_norm)
#include "add_norm.h"

#include <torch/library.h>

#include "norm_args.h"

namespace fusedops {

namespace {

enum class Stats { drop, keep };

// The seed of a call that drops elements, with its tensor kept alive; no seed where nothing is dropped.
struct Drops {
  Tensor seed;
  Dropout dropout{};

  Drops(const char* op, const OptTensor& given_seed, double p, const Tensor& input) {
    TORCH_CHECK_VALUE(p >= 0 && p <= 1, op, ": dropout_p: expected a probability from 0 to 1, got ", p);
    if (!given(given_seed)) return;
    TORCH_CHECK_VALUE(given_seed->scalar_type() == at::kLong && given_seed->dim() == 1 &&
                          given_seed->sym_size(0) == 2 && given_seed->device() == input.device(),
                      op, ": seed: expected two int64 numbers on ", input.device(), ", got ", given_seed->scalar_type(),
                      " ", given_seed->sym_sizes(), " on ", given_seed->device());
    if (input.is_meta()) return;
    seed = given_seed->contiguous();
    dropout = make_dropout(seed.const_data_ptr<int64_t>(), p);
  }
};

struct Forward {
  Tensor y, residual_out, total, mean, rstd;  // total: the sum beside another residual_out, where it is kept
};

Forward forward(Norm norm, const Tensor& input, const Tensor& residual, at::SymIntArrayRef normalized_shape,
                const OptTensor& weight, const OptTensor& bias, double eps, double weight_offset, const OptTensor& seed,
                double dropout_p, bool post_norm, bool keep_total, OptDtype out_dtype, OptDtype residual_dtype,
                Stats stats) {
  const char* const op = name_of(norm == Norm::rms, /*add=*/true);
  check_shape(op, input, normalized_shape);
  check_like_input({op, "residual"}, residual, input);
  check_param({op, "weight"}, weight, input, normalized_shape);
  check_param({op, "bias"}, bias, input, normalized_shape);
  const auto y_dtype = out_dtype.value_or(input.scalar_type());
  const auto sum_dtype = residual_dtype.value_or(residual.scalar_type());
  check_double({op, "out_dtype"}, y_dtype, input);
  check_double({op, "residual_dtype"}, sum_dtype, input);
  const Drops drops(op, seed, dropout_p, input);
  NormFwd args{};
  args.x_dtype = dtype_code({op, "input"}, input.scalar_type());
  args.residual_dtype = dtype_code({op, "residual"}, residual.scalar_type());
  args.y_dtype = dtype_code({op, "out_dtype"}, y_dtype);
  args.sum_dtype = dtype_code({op, "residual_dtype"}, sum_dtype);

  const auto options = input.options().memory_format(std::nullopt);
  Forward out;
  out.y = at::empty_symint(input.sym_sizes(), options.dtype(y_dtype));
  out.residual_out = at::empty_symint(input.sym_sizes(), options.dtype(sum_dtype));
  if (post_norm && keep_total) out.total = at::empty_symint(input.sym_sizes(), options.dtype(sum_dtype));
  if (stats == Stats::keep) {
    const auto rows = row_count(input, normalized_shape);
    const auto stats_options = options.dtype(stats_dtype(input.scalar_type()));
    if (norm == Norm::layer) out.mean = at::empty_symint({rows}, stats_options);
    out.rstd = at::empty_symint({rows}, stats_options);
  }
  if (input.is_meta()) return out;
  if (input.numel() == 0) {  // rows without elements have no statistics
    if (out.mean.defined()) out.mean.zero_();
    if (out.rstd.defined()) out.rstd.zero_();
    return out;
  }

  const size_t row_dims = normalized_shape.size();
  const Rows x({op, "input"}, input, row_dims), r({op, "residual"}, residual, row_dims);
  const Param w({op, "weight"}, weight), b({op, "bias"}, bias);
  args.rms = norm == Norm::rms;
  args.hidden = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(normalized_shape));
  args.rows = input.numel() / args.hidden;
  args.x = x.tensor.const_data_ptr();
  args.x_stride = x.stride;
  args.weight = w.data();
  args.weight_dtype = w.dtype;
  args.bias = b.data();
  args.bias_dtype = b.dtype;
  args.eps = eps;
  args.weight_offset = weight_offset;
  args.y = out.y.mutable_data_ptr();
  args.mean = data_or_null(out.mean);
  args.rstd = data_or_null(out.rstd);
  args.residual = r.tensor.const_data_ptr();
  args.residual_stride = r.stride;
  args.dropout = drops.dropout;
  args.sum = (out.total.defined() ? out.total : out.residual_out).mutable_data_ptr();
  args.residual_out = post_norm ? out.residual_out.mutable_data_ptr() : nullptr;
  launch(args, input.device());
  return out;
}

struct Backward {
  Tensor dinput, dresidual, dweight, dbias;
};

Backward backward(Norm norm, const Tensor& dy, const OptTensor& dsum, const Tensor& total,
                  at::SymIntArrayRef normalized_shape, const OptTensor& weight, const OptTensor& mean,
                  const Tensor& rstd, double weight_offset, const OptTensor& seed, double dropout_p, bool post_norm,
                  std::array<bool, 4> output_mask, at::ScalarType input_dtype, at::ScalarType residual_dtype,
                  OptDtype bias_dtype) {
  const char* const op = name_of(norm == Norm::rms, /*add=*/true);
  check_shape(op, total, normalized_shape);
  check_like_input({op, "dy"}, dy, total);
  if (given(dsum)) {
    check_like_input({op, "dresidual_out"}, *dsum, total);
    TORCH_CHECK_VALUE(dsum->scalar_type() == total.scalar_type(), op, ": dresidual_out: expected the dtype of total ",
                      total.scalar_type(), ", got ", dsum->scalar_type());
  }
  check_param({op, "weight"}, weight, total, normalized_shape);
  if (mean) check_stats({op, "mean"}, *mean, total, normalized_shape);
  check_stats({op, "rstd"}, rstd, total, normalized_shape);
  check_double({op, "input_dtype"}, input_dtype, total);
  check_double({op, "residual_dtype"}, residual_dtype, total);
  TORCH_CHECK_VALUE(!output_mask[2] || given(weight), op, ": output_mask: dweight was asked for, but weight is None");
  const Drops drops(op, seed, dropout_p, total);
  const auto dbias_dtype =
      bias_dtype.value_or(given(weight) ? weight->scalar_type() : stats_dtype(total.scalar_type()));
  NormBwd args{};
  args.x_dtype = dtype_code({op, "total"}, total.scalar_type());
  args.dy_dtype = dtype_code({op, "dy"}, dy.scalar_type());
  args.dinput_dtype = dtype_code({op, "input_dtype"}, input_dtype);
  args.dx_dtype = dtype_code({op, "residual_dtype"}, residual_dtype);
  args.dbias_dtype = dtype_code({op, "bias_dtype"}, dbias_dtype);

  const auto options = total.options().memory_format(std::nullopt);
  const bool one_gradient = output_mask[1] && !given(seed) && input_dtype == residual_dtype;
  Backward out;
  if (output_mask[0] && !one_gradient) out.dinput = at::empty_symint(total.sym_sizes(), options.dtype(input_dtype));
  if (output_mask[1]) out.dresidual = at::empty_symint(total.sym_sizes(), options.dtype(residual_dtype));
  if (output_mask[2]) out.dweight = at::empty_symint(normalized_shape, options.dtype(weight->scalar_type()));
  if (output_mask[3]) out.dbias = at::empty_symint(normalized_shape, options.dtype(dbias_dtype));
  if (total.is_meta()) return out;
  if (total.numel() == 0) {  // sums over no rows
    if (out.dweight.defined()) out.dweight.zero_();
    if (out.dbias.defined()) out.dbias.zero_();
    return out;
  }

  const size_t row_dims = normalized_shape.size();
  const Rows x({op, "total"}, total, row_dims), g({op, "dy"}, dy, row_dims);
  std::optional<Rows> elsewhere;
  if (given(dsum)) elsewhere.emplace(Arg{op, "dresidual_out"}, *dsum, row_dims);
  const Param w({op, "weight"}, weight);
  const Tensor mean_data = mean ? mean->contiguous() : Tensor();
  const Tensor rstd_data = rstd.contiguous();
  args.rms = norm == Norm::rms;
  args.hidden = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(normalized_shape));
  args.rows = total.numel() / args.hidden;
  args.x = x.tensor.const_data_ptr();
  args.x_stride = x.stride;
  args.dy = g.tensor.const_data_ptr();
  args.dy_stride = g.stride;
  args.weight = w.data();
  args.weight_dtype = w.dtype;
  args.weight_offset = weight_offset;
  args.mean = mean_data.defined() ? mean_data.const_data_ptr() : nullptr;
  args.rstd = rstd_data.const_data_ptr();
  args.dx = data_or_null(out.dresidual);
  args.dweight = data_or_null(out.dweight);
  args.dbias = data_or_null(out.dbias);
  args.add = true;
  if (elsewhere) {
    args.dsum = elsewhere->tensor.const_data_ptr();
    args.dsum_stride = elsewhere->stride;
    args.post_norm = post_norm;
  }
  args.dinput = data_or_null(out.dinput);
  args.dropout = drops.dropout;
  launch(args, total.device());
  return out;
}

// ---- kernels of the schemas -----------------------------------------------------------------------------------

Tensor dropout_seed_kernel(const Tensor& like) {
  Tensor seed = at::empty({2}, like.options().dtype(at::kLong).memory_format(std::nullopt));
  return like.is_meta() ? seed : seed.random_(0, INT64_MAX);  // the numbers that torch.randint draws
}

OptTensor seed_for(const OptTensor& seed, double dropout_p, const Tensor& input) {
  return given(seed) || !(dropout_p > 0) ? seed : OptTensor(dropout_seed_kernel(input));
}

std::tuple<Tensor, Tensor> add_layer_norm_kernel(const Tensor& input, const Tensor& residual,
                                                 at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                                                 const OptTensor& bias, double eps, double dropout_p, bool post_norm,
                                                 OptDtype out_dtype, OptDtype residual_dtype, const OptTensor& seed) {
  auto out =
      forward(Norm::layer, input, residual, normalized_shape, weight, bias, eps, 0.0, seed_for(seed, dropout_p, input),
              dropout_p, post_norm, /*keep_total=*/false, out_dtype, residual_dtype, Stats::drop);
  return {out.y, out.residual_out};
}

std::tuple<Tensor, Tensor> add_rms_norm_kernel(const Tensor& input, const Tensor& residual,
                                               at::SymIntArrayRef normalized_shape, const OptTensor& weight, double eps,
                                               double weight_offset, double dropout_p, bool post_norm,
                                               OptDtype out_dtype, OptDtype residual_dtype, const OptTensor& seed) {
  auto out = forward(Norm::rms, input, residual, normalized_shape, weight, {}, eps, weight_offset,
                     seed_for(seed, dropout_p, input), dropout_p, post_norm, /*keep_total=*/false, out_dtype,
                     residual_dtype, Stats::drop);
  return {out.y, out.residual_out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd_kernel(
    const Tensor& input, const Tensor& residual, at::SymIntArrayRef normalized_shape, const OptTensor& weight,
    const OptTensor& bias, double eps, const OptTensor& seed, double dropout_p, bool post_norm, bool keep_total,
    OptDtype out_dtype, OptDtype residual_dtype) {
  auto out = forward(Norm::layer, input, residual, normalized_shape, weight, bias, eps, 0.0, seed, dropout_p, post_norm,
                     keep_total, out_dtype, residual_dtype, Stats::keep);
  return {out.y, out.residual_out, out.total, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_rms_norm_fwd_kernel(const Tensor& input, const Tensor& residual,
                                                                   at::SymIntArrayRef normalized_shape,
                                                                   const OptTensor& weight, double eps,
                                                                   double weight_offset, const OptTensor& seed,
                                                                   double dropout_p, bool post_norm, bool keep_total,
                                                                   OptDtype out_dtype, OptDtype residual_dtype) {
  auto out = forward(Norm::rms, input, residual, normalized_shape, weight, {}, eps, weight_offset, seed, dropout_p,
                     post_norm, keep_total, out_dtype, residual_dtype, Stats::keep);
  return {out.y, out.residual_out, out.total, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_bwd_kernel(
    const Tensor& dy, const OptTensor& dresidual_out, const Tensor& total, at::SymIntArrayRef normalized_shape,
    const OptTensor& weight, const Tensor& mean, const Tensor& rstd, const OptTensor& seed, double dropout_p,
    bool post_norm, std::array<bool, 4> output_mask, at::ScalarType input_dtype, at::ScalarType residual_dtype,
    OptDtype bias_dtype) {
  auto out = backward(Norm::layer, dy, dresidual_out, total, normalized_shape, weight, mean, rstd, 0.0, seed, dropout_p,
                      post_norm, output_mask, input_dtype, residual_dtype, bias_dtype);
  return {out.dinput, out.dresidual, out.dweight, out.dbias};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_bwd_kernel(
    const Tensor& dy, const OptTensor& dresidual_out, const Tensor& total, at::SymIntArrayRef normalized_shape,
    const OptTensor& weight, const Tensor& rstd, double weight_offset, const OptTensor& seed, double dropout_p,
    bool post_norm, std::array<bool, 3> output_mask, at::ScalarType input_dtype, at::ScalarType residual_dtype) {
  auto out =
      backward(Norm::rms, dy, dresidual_out, total, normalized_shape, weight, {}, rstd, weight_offset, seed, dropout_p,
               post_norm, {output_mask[0], output_mask[1], output_mask[2], false}, input_dtype, residual_dtype, {});
  return {out.dinput, out.dresidual, out.dweight};
}

void register_add_norms(torch::Library& m) {
  m.impl("add_layer_norm", &add_layer_norm_kernel);
  m.impl("add_layer_norm_fwd", &add_layer_norm_fwd_kernel);
  m.impl("add_layer_norm_bwd", &add_layer_norm_bwd_kernel);
  m.impl("add_rms_norm", &add_rms_norm_kernel);
  m.impl("add_rms_norm_fwd", &add_rms_norm_fwd_kernel);
  m.impl("add_rms_norm_bwd", &add_rms_norm_bwd_kernel);
}

}  // namespace

// ---- into the dispatcher --------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                                          const OptTensor& bias, double eps, double dropout_p, bool post_norm,
                                          OptDtype out_dtype, OptDtype residual_dtype, const OptTensor& seed) {
  static const auto op = find_op<decltype(add_layer_norm)>("fusedops::add_layer_norm");
  return op.call(input, residual, normalized_shape, weight, bias, eps, dropout_p, post_norm, out_dtype, residual_dtype,
                 seed);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                        at::SymIntArrayRef normalized_shape, const OptTensor& weight, double eps,
                                        double weight_offset, double dropout_p, bool post_norm, OptDtype out_dtype,
                                        OptDtype residual_dtype, const OptTensor& seed) {
  static const auto op = find_op<decltype(add_rms_norm)>("fusedops::add_rms_norm");
  return op.call(input, residual, normalized_shape, weight, eps, weight_offset, dropout_p, post_norm, out_dtype,
                 residual_dtype, seed);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd(const Tensor& input, const Tensor& residual,
                                                                      at::SymIntArrayRef normalized_shape,
                                                                      const OptTensor& weight, const OptTensor& bias,
                                                                      double eps, const OptTensor& seed,
                                                                      double dropout_p, bool post_norm, bool keep_total,
                                                                      OptDtype out_dtype, OptDtype residual_dtype) {
  static const auto op = find_op<decltype(add_layer_norm_fwd)>("fusedops::add_layer_norm_fwd");
  return op.call(input, residual, normalized_shape, weight, bias, eps, seed, dropout_p, post_norm, keep_total,
                 out_dtype, residual_dtype);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_rms_norm_fwd(const Tensor& input, const Tensor& residual,
                                                            at::SymIntArrayRef normalized_shape,
                                                            const OptTensor& weight, double eps, double weight_offset,
                                                            const OptTensor& seed, double dropout_p, bool post_norm,
                                                            bool keep_total, OptDtype out_dtype,
                                                            OptDtype residual_dtype) {
  static const auto op = find_op<decltype(add_rms_norm_fwd)>("fusedops::add_rms_norm_fwd");
  return op.call(input, residual, normalized_shape, weight, eps, weight_offset, seed, dropout_p, post_norm, keep_total,
                 out_dtype, residual_dtype);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_bwd(
    const Tensor& dy, const OptTensor& dresidual_out, const Tensor& total, at::SymIntArrayRef normalized_shape,
    const OptTensor& weight, const Tensor& mean, const Tensor& rstd, const OptTensor& seed, double dropout_p,
    bool post_norm, std::array<bool, 4> output_mask, at::ScalarType input_dtype, at::ScalarType residual_dtype,
    OptDtype bias_dtype) {
  static const auto op = find_op<decltype(add_layer_norm_bwd)>("fusedops::add_layer_norm_bwd");
  return op.call(dy, dresidual_out, total, normalized_shape, weight, mean, rstd, seed, dropout_p, post_norm,
                 output_mask, input_dtype, residual_dtype, bias_dtype);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_bwd(const Tensor& dy, const OptTensor& dresidual_out,
                                                    const Tensor& total, at::SymIntArrayRef normalized_shape,
                                                    const OptTensor& weight, const Tensor& rstd, double weight_offset,
                                                    const OptTensor& seed, double dropout_p, bool post_norm,
                                                    std::array<bool, 3> output_mask, at::ScalarType input_dtype,
                                                    at::ScalarType residual_dtype) {
  static const auto op = find_op<decltype(add_rms_norm_bwd)>("fusedops::add_rms_norm_bwd");
  return op.call(dy, dresidual_out, total, normalized_shape, weight, rstd, weight_offset, seed, dropout_p, post_norm,
                 output_mask, input_dtype, residual_dtype);
}

Tensor dropout_seed(const Tensor& like) {
  static const auto op = find_op<decltype(dropout_seed)>("fusedops::dropout_seed");
  return op.call(like);
}

}  // namespace fusedops

// On every device: Triton and plain PyTorch draw their seeds with it as well.
TORCH_LIBRARY_IMPL(fusedops, CompositeExplicitAutograd, m) { m.impl("dropout_seed", &fusedops::dropout_seed_kernel); }
TORCH_LIBRARY_IMPL(fusedops, CPU, m) { fusedops::register_add_norms(m); }
TORCH_LIBRARY_IMPL(fusedops, Meta, m) { fusedops::register_add_norms(m); }
#ifdef FUSEDOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fusedops, CUDA, m) { fusedops::register_add_norms(m); }
#endif
