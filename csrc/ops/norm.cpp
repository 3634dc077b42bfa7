// layer_norm, rms_norm and their forward and backward halves: tensors to pointers, checks, device guard, stream.
// One function serves CPU, CUDA and Meta, so shapes, strides and messages cannot differ between them; SymInts are
// compared but never read before the Meta device has left. Autograd: norm_autograd.cpp.
#include "norm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "../norm.h"
#include "tensors.h"

namespace fusedops {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using OptDtype = std::optional<at::ScalarType>;

namespace {

const char* name_of(bool rms) { return rms ? "rms_norm" : "layer_norm"; }

// ---- checks ---------------------------------------------------------------------------------------------------

DType dtype_code(const Arg& name, at::ScalarType dtype) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_float_dtype(dtype), name,
                              ": expected dtype float32, float16, bfloat16 or float64, got ", dtype);
  return dtype_of(dtype);
}

at::ScalarType stats_dtype(at::ScalarType input_dtype) { return input_dtype == at::kDouble ? at::kDouble : at::kFloat; }

void check_shape(const char* op, const Tensor& input, at::SymIntArrayRef normalized_shape) {
  const auto sizes = input.sym_sizes();
  const auto dims = normalized_shape.size();
  TORCH_CHECK_VALUE(dims >= 1, op, ": normalized_shape: expected at least one dimension, got an empty shape");
  TORCH_CHECK_VALUE(sizes.size() >= dims && sizes.slice(sizes.size() - dims) == normalized_shape, op,
                    ": input: expected a shape that ends in normalized_shape ", normalized_shape, ", got ", sizes);
}

// A parameter, or anything else of one row's shape: where it must live and how it must look.
void check_param(const Arg& name, const OptTensor& param, const Tensor& input, at::SymIntArrayRef normalized_shape) {
  if (!param || !param->defined()) return;
  TORCH_CHECK_VALUE(param->sym_sizes() == normalized_shape, name, ": expected shape ", normalized_shape,
                    " (normalized_shape), got ", param->sym_sizes());
  TORCH_CHECK_VALUE(param->device() == input.device(), name, ": expected a tensor on ", input.device(),
                    " as input is, got one on ", param->device());
  TORCH_CHECK_VALUE((param->scalar_type() == at::kDouble) == (input.scalar_type() == at::kDouble), name,
                    ": expected float64 exactly when input is float64 (", input.scalar_type(), "), got ",
                    param->scalar_type());
  dtype_code(name, param->scalar_type());
}

c10::SymInt row_count(const Tensor& input, at::SymIntArrayRef normalized_shape) {
  const auto sizes = input.sym_sizes();
  c10::SymInt rows = 1;
  for (size_t i = 0; i + normalized_shape.size() < sizes.size(); ++i) rows *= sizes[i];
  return rows;
}

// ---- tensors to pointers --------------------------------------------------------------------------------------

// A tensor seen as [rows, hidden] with unit stride inside a row; copied only where its strides do not allow that.
struct Rows {
  Tensor tensor;  // keeps the copy alive
  int64_t stride;

  Rows(const Arg& name, const Tensor& source, size_t row_dims) : tensor(source), stride(collapse(source, row_dims)) {
    check_memory(name, source);
    if (stride >= 0) return;
    tensor = source.contiguous();
    stride = collapse(tensor, row_dims);
  }

 private:
  // The one stride between rows, or -1. Strides of dimensions of size one mean nothing and are passed over.
  static int64_t collapse(const Tensor& t, size_t row_dims) {
    const auto sizes = t.sizes();
    const auto strides = t.strides();
    const size_t lead = sizes.size() - row_dims;
    int64_t inner = 1;
    for (size_t d = sizes.size(); d-- > lead;) {
      if (sizes[d] == 1) continue;
      if (strides[d] != inner) return -1;
      inner *= sizes[d];
    }
    int64_t row_stride = inner, next = -1;
    for (size_t d = lead; d-- > 0;) {
      if (sizes[d] == 1) continue;
      if (next == -1) {
        row_stride = strides[d];
      } else if (strides[d] != next) {
        return -1;
      }
      next = strides[d] * sizes[d];
    }
    return row_stride;
  }
};

// Pointer, dtype and life of an optional [hidden] parameter.
struct Param {
  Tensor tensor;
  DType dtype = DType::f32;

  Param(const Arg& name, const OptTensor& param) {
    if (!param || !param->defined()) return;
    check_memory(name, *param);
    tensor = param->contiguous();
    dtype = dtype_code(name, tensor.scalar_type());
  }
  const void* data() const { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
};

void* data_or_null(const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }

#ifdef FUSEDOPS_WITH_CUDA
// The CUDA kernels count the columns of a row in 32 bits.
void check_hidden(bool rms, int64_t hidden) {
  constexpr int64_t kMaxHidden = int64_t{1} << 30;
  TORCH_CHECK_NOT_IMPLEMENTED(hidden <= kMaxHidden, name_of(rms), ": normalized_shape: expected at most ", kMaxHidden,
                              " elements on a CUDA device, got ", hidden);
}
#endif

void launch(const NormFwd& args, c10::Device device) {
  if (device.is_cpu()) return cpu::norm_fwd(args);
#ifdef FUSEDOPS_WITH_CUDA
  check_hidden(args.rms, args.hidden);
  const c10::DeviceGuard guard(device);
  const char* error = cuda::norm_fwd(args, current_stream(device));
  TORCH_CHECK(error == nullptr, name_of(args.rms), " forward, ", args.rows, " x ", args.hidden, ": ", error);
#endif
}

void launch(NormBwd args, c10::Device device) {
  if (device.is_cpu()) return cpu::norm_bwd(args);
#ifdef FUSEDOPS_WITH_CUDA
  check_hidden(args.rms, args.hidden);
  const c10::DeviceGuard guard(device);
  Tensor workspace;
  if (const int64_t bytes = cuda::norm_bwd_workspace(args)) {
    workspace = at::empty({bytes}, at::TensorOptions().device(device).dtype(at::kByte));
    args.workspace = workspace.mutable_data_ptr();
  }
  const char* error = cuda::norm_bwd(args, current_stream(device));
  TORCH_CHECK(error == nullptr, name_of(args.rms), " backward, ", args.rows, " x ", args.hidden, ": ", error);
#endif
}

// ---- the two halves -------------------------------------------------------------------------------------------

enum class Norm { layer, rms };
enum class Stats { drop, keep };

std::tuple<Tensor, Tensor, Tensor> forward(Norm norm, const Tensor& input, at::SymIntArrayRef normalized_shape,
                                           const OptTensor& weight, const OptTensor& bias, double eps,
                                           double weight_offset, OptDtype out_dtype, Stats stats) {
  const char* const op = name_of(norm == Norm::rms);
  check_shape(op, input, normalized_shape);
  check_param({op, "weight"}, weight, input, normalized_shape);
  check_param({op, "bias"}, bias, input, normalized_shape);
  const auto y_dtype = out_dtype.value_or(input.scalar_type());
  TORCH_CHECK_VALUE((y_dtype == at::kDouble) == (input.scalar_type() == at::kDouble), op,
                    ": out_dtype: expected float64 exactly when input is float64 (", input.scalar_type(), "), got ",
                    y_dtype);
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

void check_stats(const Arg& name, const Tensor& stats, const Tensor& input, at::SymIntArrayRef normalized_shape) {
  const auto rows = row_count(input, normalized_shape);
  TORCH_CHECK_VALUE(stats.dim() == 1 && stats.sym_size(0) == rows, name, ": expected shape [", rows,
                    "] (one value a row), got ", stats.sym_sizes());
  TORCH_CHECK_VALUE(stats.scalar_type() == stats_dtype(input.scalar_type()), name, ": expected dtype ",
                    stats_dtype(input.scalar_type()), ", got ", stats.scalar_type());
  TORCH_CHECK_VALUE(stats.device() == input.device(), name, ": expected a tensor on ", input.device(), ", got one on ",
                    stats.device());
}

std::tuple<Tensor, Tensor, Tensor> backward(Norm norm, const Tensor& dy, const Tensor& input,
                                            at::SymIntArrayRef normalized_shape, const OptTensor& weight,
                                            const OptTensor& mean, const Tensor& rstd, double weight_offset,
                                            std::array<bool, 3> output_mask, OptDtype bias_dtype) {
  const char* const op = name_of(norm == Norm::rms);
  check_shape(op, input, normalized_shape);
  check_param({op, "weight"}, weight, input, normalized_shape);
  TORCH_CHECK_VALUE(dy.sym_sizes() == input.sym_sizes(), op, ": dy: expected the shape of input ", input.sym_sizes(),
                    ", got ", dy.sym_sizes());
  TORCH_CHECK_VALUE(dy.device() == input.device(), op, ": dy: expected a tensor on ", input.device(), ", got one on ",
                    dy.device());
  TORCH_CHECK_VALUE((dy.scalar_type() == at::kDouble) == (input.scalar_type() == at::kDouble), op,
                    ": dy: expected float64 exactly when input is float64 (", input.scalar_type(), "), got ",
                    dy.scalar_type());
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

// The handle of an operator, looked up once, for calls that go straight into the dispatcher.
template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
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
