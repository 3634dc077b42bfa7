// The cross-entropy ops as C++ functions: each is one call into the dispatcher, so devices, autograd and tracing are
// decided there. Formulas: csrc/cross_entropy.h.
#pragma once

#include <optional>
#include <string_view>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace fusedops {

at::Tensor cross_entropy(const at::Tensor& input, const at::Tensor& target, const std::optional<at::Tensor>& weight,
                         int64_t ignore_index, std::string_view reduction, double label_smoothing, double z_loss,
                         std::optional<double> softcap, bool inplace_backward);

// (loss, stats, total_weight): stats is [rows, 2], total_weight one element.
std::tuple<at::Tensor, at::Tensor, at::Tensor> cross_entropy_fwd(const at::Tensor& input, const at::Tensor& target,
                                                                 const std::optional<at::Tensor>& weight,
                                                                 int64_t ignore_index, std::string_view reduction,
                                                                 double label_smoothing, double z_loss,
                                                                 std::optional<double> softcap);

at::Tensor cross_entropy_bwd(const at::Tensor& dloss, const at::Tensor& input, const at::Tensor& target,
                             const std::optional<at::Tensor>& weight, const at::Tensor& stats,
                             const at::Tensor& total_weight, int64_t ignore_index, std::string_view reduction,
                             double label_smoothing, double z_loss, std::optional<double> softcap);

// The same, written over `input`.
void cross_entropy_bwd_(const at::Tensor& input, const at::Tensor& dloss, const at::Tensor& target,
                        const std::optional<at::Tensor>& weight, const at::Tensor& stats,
                        const at::Tensor& total_weight, int64_t ignore_index, std::string_view reduction,
                        double label_smoothing, double z_loss, std::optional<double> softcap);

}  // namespace fusedops
