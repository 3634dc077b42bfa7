// cross_entropy and its forward and backward halves: tensors to pointers, checks, device guard, stream. One function
// serves CPU, CUDA and Meta, so shapes, strides and messages cannot differ between them. Autograd:
// cross_entropy_autograd.cpp.
#include "cross_entropy.h"

#include <limits>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "../cross_entropy.h"
#include "rows.h"

namespace fusedops {

namespace {

constexpr const char* kOp = "cross_entropy";

struct Options {
  int64_t ignore_index;
  Reduction reduction;
  double smoothing;
  double z_loss;
  double softcap;

  Options(int64_t ignore_index, std::string_view reduction, double smoothing, double z_loss,
          std::optional<double> softcap)
      : ignore_index(ignore_index),
        reduction(code_of(reduction)),
        smoothing(smoothing),
        z_loss(z_loss),
        softcap(softcap.value_or(0)) {
    TORCH_CHECK_VALUE(smoothing >= 0 && smoothing <= 1, kOp, ": label_smoothing: expected 0 to 1, got ", smoothing);
    TORCH_CHECK_VALUE(!softcap || *softcap > 0, kOp, ": softcap: expected None or a number > 0, got ", *softcap);
  }

 private:
  static Reduction code_of(std::string_view name) {
    if (name == "none") return Reduction::none;
    if (name == "mean") return Reduction::mean;
    TORCH_CHECK_VALUE(name == "sum", kOp, ": reduction: expected one of none, mean, sum, got '", name, "'");
    return Reduction::sum;
  }
};

int64_t class_dim(const Tensor& input) { return input.dim() > 1 ? 1 : 0; }

void check(const Tensor& input, const Tensor& target, const OptTensor& weight) {
  TORCH_CHECK_VALUE(input.dim() > 0, kOp, ": input: expected (rows, classes), got a tensor without dimensions");
  auto shape = input.sym_sizes().vec();
  const c10::SymInt classes = shape[class_dim(input)];
  shape.erase(shape.begin() + class_dim(input));
  TORCH_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(shape), kOp, ": target: expected shape ",
                    c10::SymIntArrayRef(shape), ", got ", target.sym_sizes());
  TORCH_CHECK_VALUE(target.scalar_type() == at::kLong, kOp, ": target: expected int64, got ", target.scalar_type());
  TORCH_CHECK_VALUE(target.device() == input.device(), kOp, ": target: expected a tensor on ", input.device(),
                    ", got one on ", target.device());
  if (!given(weight)) return;
  TORCH_CHECK_VALUE(weight->dim() == 1 && weight->sym_size(0) == classes, kOp, ": weight: expected shape [", classes,
                    "], got ", weight->sym_sizes());
  TORCH_CHECK_VALUE(weight->device() == input.device(), kOp, ": weight: expected a tensor on ", input.device(),
                    ", got one on ", weight->device());
  check_double({kOp, "weight"}, weight->scalar_type(), input);
  dtype_code({kOp, "weight"}, weight->scalar_type());
}

// A call's tensors as the kernels take them, alive as long as this is. Not for the Meta device, nor without elements.
struct Call {
  Tensor x, target, weight, weights;
  CrossEntropy args{};

  Call(const Tensor& input, const Tensor& target_, const OptTensor& weight_, const Options& o)
      : target(target_.contiguous()) {
    check_memory(Arg{kOp, "target"}, target_);
    const Rows rows({kOp, "input"}, input.movedim(class_dim(input), -1), 1);
    x = rows.tensor;
    const auto acc = stats_dtype(input.scalar_type());
    if (given(weight_)) {
      check_memory(Arg{kOp, "weight"}, *weight_);
      weight = weight_->to(acc).contiguous();
      if (o.smoothing != 0) weights = weight.sum();
    }
    args.classes = input.size(class_dim(input));
    args.rows = input.numel() / args.classes;
    args.x = x.const_data_ptr();
    args.x_stride = rows.stride;
    args.x_dtype = dtype_code({kOp, "input"}, input.scalar_type());
    args.target = target.const_data_ptr<int64_t>();
    args.weight = weight.defined() ? weight.const_data_ptr() : nullptr;
    args.weights = weights.defined() ? weights.const_data_ptr() : nullptr;
    args.ignore_index = o.ignore_index;
    args.reduction = o.reduction;
    args.smoothing = o.smoothing;
    args.z_loss = o.z_loss;
    args.softcap = o.softcap;
  }
};

// A GPU's kernel sees to its targets itself: here their values would have to be waited for.
void check_targets_on_cpu(const CrossEntropy& args) {
  const int64_t row = cpu::find_wrong_target(args);
  TORCH_CHECK_VALUE(row < 0, kOp, ": target: expected class indices from 0 to ", args.classes - 1, ", or ignore_index ",
                    args.ignore_index, ", got ", args.target[row], " at row ", row);
}

#ifdef FUSEDOPS_WITH_CUDA
void check_classes(int64_t classes) {  // which the kernels count in 32 bits
  constexpr int64_t kMost = int64_t{1} << 30;
  TORCH_CHECK_NOT_IMPLEMENTED(classes <= kMost, kOp, ": input: expected at most ", kMost,
                              " classes on a CUDA device, got ", classes);
}
#endif

void launch(CrossEntropyFwd args, c10::Device device) {
  if (device.is_cpu()) {
    check_targets_on_cpu(args.c);
    return cpu::cross_entropy_fwd(args);
  }
#ifdef FUSEDOPS_WITH_CUDA
  check_classes(args.c.classes);
  const c10::DeviceGuard guard(device);
  Tensor workspace;
  if (const int64_t bytes = cuda::cross_entropy_workspace(args.c.rows, args.c.reduction)) {
    workspace = at::empty({bytes}, at::TensorOptions().device(device).dtype(at::kByte));
    args.workspace = workspace.mutable_data_ptr();
  }
  const char* error = cuda::cross_entropy_fwd(args, current_stream(device));
  TORCH_CHECK(error == nullptr, kOp, " forward, ", args.c.rows, " x ", args.c.classes, ": ", error);
#endif
}

void launch(const CrossEntropyBwd& args, c10::Device device) {
  if (device.is_cpu()) {
    check_targets_on_cpu(args.c);  // the halves may be called alone
    return cpu::cross_entropy_bwd(args);
  }
#ifdef FUSEDOPS_WITH_CUDA
  check_classes(args.c.classes);
  const c10::DeviceGuard guard(device);
  const char* error = cuda::cross_entropy_bwd(args, current_stream(device));
  TORCH_CHECK(error == nullptr, kOp, " backward, ", args.c.rows, " x ", args.c.classes, ": ", error);
#endif
}

enum class Stats { drop, keep };

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const Tensor& target, const OptTensor& weight,
                                           const Options& o, Stats wanted) {
  check(input, target, weight);
  const auto options = input.options().memory_format(std::nullopt).dtype(stats_dtype(input.scalar_type()));
  const Tensor losses = at::empty_symint(target.sym_sizes(), options);
  const Tensor total_weight = at::empty({}, options);
  const Tensor stats = wanted == Stats::keep ? at::empty_symint({target.sym_numel(), 2}, options) : Tensor();
  const Tensor loss = o.reduction == Reduction::none ? losses : at::empty({}, options);
  if (input.is_meta()) return {loss, stats, total_weight};
  if (input.numel() == 0) {  // no rows, or no classes and so nothing that a target could name
    if (target.numel() != 0 && input.is_cpu()) {
      const Tensor contiguous = target.contiguous();
      CrossEntropy args{};
      args.rows = target.numel();
      args.target = contiguous.const_data_ptr<int64_t>();
      args.ignore_index = o.ignore_index;
      check_targets_on_cpu(args);
    }
    if (stats.defined()) stats.zero_();
    total_weight.zero_();
    loss.fill_(o.reduction == Reduction::mean ? std::numeric_limits<double>::quiet_NaN() : 0.0);
    return {loss, stats, total_weight};
  }

  const Call call(input, target, weight, o);
  CrossEntropyFwd args{};
  args.c = call.args;
  args.stats = stats.defined() ? stats.mutable_data_ptr() : nullptr;
  args.losses = losses.mutable_data_ptr();
  args.loss = o.reduction == Reduction::none ? nullptr : loss.mutable_data_ptr();
  args.total_weight = total_weight.mutable_data_ptr();
  if (o.reduction != Reduction::mean) total_weight.zero_();
  launch(args, input.device());
  return {loss, stats, total_weight};
}

void check_one(const char* name, const Tensor& tensor, const Tensor& input, const c10::SymInt& elements) {
  TORCH_CHECK_VALUE(tensor.sym_numel() == elements && tensor.scalar_type() == stats_dtype(input.scalar_type()) &&
                        tensor.device() == input.device(),
                    Arg{kOp, name}, ": expected ", elements, " elements of ", stats_dtype(input.scalar_type()), " on ",
                    input.device(), ", got ", tensor.sym_numel(), " of ", tensor.scalar_type(), " on ",
                    tensor.device());
}

// The gradient, in memory of its own where `into` is not given.
Tensor backward(const Tensor& dloss, const Tensor& input, const Tensor& target, const OptTensor& weight,
                const Tensor& stats, const Tensor& total_weight, const Options& o, bool in_place) {
  check(input, target, weight);
  const c10::SymInt rows = target.sym_numel();
  check_one("dloss", dloss, input, o.reduction == Reduction::none ? rows : c10::SymInt(1));
  check_one("stats", stats, input, 2 * rows);
  check_one("total_weight", total_weight, input, 1);
  // Classes lie next to each other in the gradient, as the kernels read and write them.
  const Tensor moved = input.movedim(class_dim(input), -1);
  const auto made = [&] { return at::empty_symint(moved.sym_sizes(), input.options().memory_format(std::nullopt)); };
  if (input.is_meta() || input.numel() == 0) return in_place ? input : made().movedim(-1, class_dim(input));

  const Call call(input, target, weight, o);
  TORCH_CHECK_VALUE(!in_place || call.x.is_alias_of(input), kOp, ": input: expected rows that lie in memory as such, ",
                    "to be written over, got strides ", input.strides());
  const Tensor dx = in_place ? moved : made();
  const Tensor scale = dloss.contiguous(), stats_data = stats.contiguous();
  CrossEntropyBwd args{};
  args.c = call.args;
  args.stats = stats_data.const_data_ptr();
  args.dloss = scale.const_data_ptr();
  args.total_weight = total_weight.const_data_ptr();
  args.dx = dx.mutable_data_ptr();
  args.dx_stride = in_place ? call.args.x_stride : call.args.classes;
  launch(args, input.device());
  return in_place ? input : dx.movedim(-1, class_dim(input));
}

// ---- kernels of the schemas -----------------------------------------------------------------------------------

Tensor cross_entropy_kernel(const Tensor& input, const Tensor& target, const OptTensor& weight, int64_t ignore_index,
                            std::string_view reduction, double label_smoothing, double z_loss,
                            std::optional<double> softcap, bool /*inplace_backward*/) {
  const Options o(ignore_index, reduction, label_smoothing, z_loss, softcap);
  return std::get<0>(forward(input, target, weight, o, Stats::drop));
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_fwd_kernel(const Tensor& input, const Tensor& target,
                                                            const OptTensor& weight, int64_t ignore_index,
                                                            std::string_view reduction, double label_smoothing,
                                                            double z_loss, std::optional<double> softcap) {
  const Options o(ignore_index, reduction, label_smoothing, z_loss, softcap);
  return forward(input, target, weight, o, Stats::keep);
}

Tensor cross_entropy_bwd_kernel(const Tensor& dloss, const Tensor& input, const Tensor& target, const OptTensor& weight,
                                const Tensor& stats, const Tensor& total_weight, int64_t ignore_index,
                                std::string_view reduction, double label_smoothing, double z_loss,
                                std::optional<double> softcap) {
  const Options o(ignore_index, reduction, label_smoothing, z_loss, softcap);
  return backward(dloss, input, target, weight, stats, total_weight, o, /*in_place=*/false);
}

void cross_entropy_bwd_in_place_kernel(const Tensor& input, const Tensor& dloss, const Tensor& target,
                                       const OptTensor& weight, const Tensor& stats, const Tensor& total_weight,
                                       int64_t ignore_index, std::string_view reduction, double label_smoothing,
                                       double z_loss, std::optional<double> softcap) {
  const Options o(ignore_index, reduction, label_smoothing, z_loss, softcap);
  backward(dloss, input, target, weight, stats, total_weight, o, /*in_place=*/true);
}

void register_cross_entropy(torch::Library& m) {
  m.impl("cross_entropy", &cross_entropy_kernel);
  m.impl("cross_entropy_fwd", &cross_entropy_fwd_kernel);
  m.impl("cross_entropy_bwd", &cross_entropy_bwd_kernel);
  m.impl("cross_entropy_bwd_", &cross_entropy_bwd_in_place_kernel);
}

}  // namespace

// ---- into the dispatcher --------------------------------------------------------------------------------------

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptTensor& weight, int64_t ignore_index,
                     std::string_view reduction, double label_smoothing, double z_loss, std::optional<double> softcap,
                     bool inplace_backward) {
  static const auto op = find_op<decltype(cross_entropy)>("fusedops::cross_entropy");
  return op.call(input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, inplace_backward);
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_fwd(const Tensor& input, const Tensor& target, const OptTensor& weight,
                                                     int64_t ignore_index, std::string_view reduction,
                                                     double label_smoothing, double z_loss,
                                                     std::optional<double> softcap) {
  static const auto op = find_op<decltype(cross_entropy_fwd)>("fusedops::cross_entropy_fwd");
  return op.call(input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap);
}

Tensor cross_entropy_bwd(const Tensor& dloss, const Tensor& input, const Tensor& target, const OptTensor& weight,
                         const Tensor& stats, const Tensor& total_weight, int64_t ignore_index,
                         std::string_view reduction, double label_smoothing, double z_loss,
                         std::optional<double> softcap) {
  static const auto op = find_op<decltype(cross_entropy_bwd)>("fusedops::cross_entropy_bwd");
  return op.call(dloss, input, target, weight, stats, total_weight, ignore_index, reduction, label_smoothing, z_loss,
                 softcap);
}

void cross_entropy_bwd_(const Tensor& input, const Tensor& dloss, const Tensor& target, const OptTensor& weight,
                        const Tensor& stats, const Tensor& total_weight, int64_t ignore_index,
                        std::string_view reduction, double label_smoothing, double z_loss,
                        std::optional<double> softcap) {
  static const auto op = find_op<decltype(cross_entropy_bwd_)>("fusedops::cross_entropy_bwd_");
  op.call(input, dloss, target, weight, stats, total_weight, ignore_index, reduction, label_smoothing, z_loss, softcap);
}

}  // namespace fusedops

TORCH_LIBRARY_IMPL(fusedops, CPU, m) { fusedops::register_cross_entropy(m); }
TORCH_LIBRARY_IMPL(fusedops, Meta, m) { fusedops::register_cross_entropy(m); }
#ifdef FUSEDOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fusedops, CUDA, m) { fusedops::register_cross_entropy(m); }
#endif
