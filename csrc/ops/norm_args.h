// What the norm ops and the add + norm ops share: checks and launches. SymInts are compared but never
// read before the Meta device has left.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "../norm.h"
#include "rows.h"

namespace fusedops {

enum class Norm { layer, rms };

inline const char* name_of(bool rms, bool add) {
  if (add) return rms ? "add_rms_norm" : "add_layer_norm";
  return rms ? "rms_norm" : "layer_norm";
}

// ---- checks ---------------------------------------------------------------------------------------------------

inline void check_shape(const char* op, const Tensor& input, at::SymIntArrayRef normalized_shape) {
  const auto sizes = input.sym_sizes();
  const auto dims = normalized_shape.size();
  TORCH_CHECK_VALUE(dims >= 1, op, ": normalized_shape: expected at least one dimension, got an empty shape");
  TORCH_CHECK_VALUE(sizes.size() >= dims && sizes.slice(sizes.size() - dims) == normalized_shape, op,
                    ": input: expected a shape that ends in normalized_shape ", normalized_shape, ", got ", sizes);
}

// Another tensor of input's shape.
inline void check_like_input(const Arg& name, const Tensor& tensor, const Tensor& input) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == input.sym_sizes(), name, ": expected the shape of input ", input.sym_sizes(),
                    ", got ", tensor.sym_sizes());
  TORCH_CHECK_VALUE(tensor.device() == input.device(), name, ": expected a tensor on ", input.device(), ", got one on ",
                    tensor.device());
  check_double(name, tensor.scalar_type(), input);
}

// A parameter, or anything else of one row's shape: where it must live and how it must look.
inline void check_param(const Arg& name, const OptTensor& param, const Tensor& input,
                        at::SymIntArrayRef normalized_shape) {
  if (!given(param)) return;
  TORCH_CHECK_VALUE(param->sym_sizes() == normalized_shape, name, ": expected shape ", normalized_shape,
                    " (normalized_shape), got ", param->sym_sizes());
  TORCH_CHECK_VALUE(param->device() == input.device(), name, ": expected a tensor on ", input.device(),
                    " as input is, got one on ", param->device());
  check_double(name, param->scalar_type(), input);
  dtype_code(name, param->scalar_type());
}

inline c10::SymInt row_count(const Tensor& input, at::SymIntArrayRef normalized_shape) {
  const auto sizes = input.sym_sizes();
  c10::SymInt rows = 1;
  for (size_t i = 0; i + normalized_shape.size() < sizes.size(); ++i) rows *= sizes[i];
  return rows;
}

// ---- launches -------------------------------------------------------------------------------------------------

#ifdef FUSEDOPS_WITH_CUDA
// The CUDA kernels count the columns of a row in 32 bits.
inline void check_hidden(const char* op, int64_t hidden) {
  constexpr int64_t kMaxHidden = int64_t{1} << 30;
  TORCH_CHECK_NOT_IMPLEMENTED(hidden <= kMaxHidden, op, ": normalized_shape: expected at most ", kMaxHidden,
                              " elements on a CUDA device, got ", hidden);
}
#endif

inline void launch(const NormFwd& args, c10::Device device) {
  if (device.is_cpu()) return cpu::norm_fwd(args);
#ifdef FUSEDOPS_WITH_CUDA
  const char* const op = name_of(args.rms, args.residual != nullptr);
  check_hidden(op, args.hidden);
  const c10::DeviceGuard guard(device);
  const char* error = cuda::norm_fwd(args, current_stream(device));
  TORCH_CHECK(error == nullptr, op, " forward, ", args.rows, " x ", args.hidden, ": ", error);
#endif
}

inline void launch(NormBwd args, c10::Device device) {
  if (device.is_cpu()) return cpu::norm_bwd(args);
#ifdef FUSEDOPS_WITH_CUDA
  const char* const op = name_of(args.rms, args.add);
  check_hidden(op, args.hidden);
  const c10::DeviceGuard guard(device);
  Tensor workspace;
  if (const int64_t bytes = cuda::norm_bwd_workspace(args)) {
    workspace = at::empty({bytes}, at::TensorOptions().device(device).dtype(at::kByte));
    args.workspace = workspace.mutable_data_ptr();
  }
  const char* error = cuda::norm_bwd(args, current_stream(device));
  TORCH_CHECK(error == nullptr, op, " backward, ", args.rows, " x ", args.hidden, ": ", error);
#endif
}

inline void check_stats(const Arg& name, const Tensor& stats, const Tensor& input,
                        at::SymIntArrayRef normalized_shape) {
  const auto rows = row_count(input, normalized_shape);
  TORCH_CHECK_VALUE(stats.dim() == 1 && stats.sym_size(0) == rows, name, ": expected shape [", rows,
                    "] (one value a row), got ", stats.sym_sizes());
  TORCH_CHECK_VALUE(stats.scalar_type() == stats_dtype(input.scalar_type()), name, ": expected dtype ",
                    stats_dtype(input.scalar_type()), ", got ", stats.scalar_type());
  TORCH_CHECK_VALUE(stats.device() == input.device(), name, ": expected a tensor on ", input.device(), ", got one on ",
                    stats.device());
}

}  // namespace fusedops
