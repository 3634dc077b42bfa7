// The Adam engine as Python sees it (bound in bindings.cpp). Formulas: ../adam.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "../adam.h"

namespace fusedops {

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

// The parameters of one device with their state: checked once, their pointers kept in tables, updated together by
// step().
class AdamPlan {
 public:
  AdamPlan(std::vector<at::Tensor> params, std::vector<at::Tensor> exp_avg, std::vector<at::Tensor> exp_avg_sq,
           OptionalTensors max_exp_avg_sq, OptionalTensors master, std::vector<at::Tensor> step,
           std::vector<int64_t> group);
  ~AdamPlan();

  // One step of every parameter that has a gradient. Nothing is written before everything is checked.
  void step(const OptionalTensors& grads, const std::vector<std::variant<double, at::Tensor>>& lr,
            const std::vector<double>& beta1, const std::vector<double>& beta2, const std::vector<double>& eps,
            const std::vector<double>& weight_decay, const std::vector<bool>& decoupled,
            const std::vector<bool>& amsgrad, const std::vector<bool>& maximize,
            const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
            const std::optional<at::Tensor>& grad_norm, std::optional<double> max_grad_norm);

 private:
  enum Role { kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kMaster, kRoles };

  // One parameter and its state.
  struct Entry {
    at::Tensor tensors[kRoles];
    void* pointers[kRoles];  // what was checked last; a tensor whose storage was replaced shows another
    bool staged[kRoles];     // not laid out as the record wants: a copy is updated and copied back
    at::Tensor step;
    void* step_pointer;
    c10::SmallVector<int64_t, 5> strides;        // the layout that all roles and the gradient are walked in
    c10::SmallVector<int64_t, 5> param_strides;  // the parameter's own, when it was checked
    bool any_staged;
  };

  // A tensor that stands in for one of another layout during a step.
  struct Stand {
    size_t entry;
    Role role;
    at::Tensor copy;
  };

  struct StreamTables;

  void check_entry(size_t i);
  void check_overlaps() const;
  void refresh_pointers();
  void* gradient_pointer(size_t i, const at::Tensor& grad, std::vector<at::Tensor>& copies);
  std::vector<Stand> stage(const std::vector<void*>& grads);
  std::vector<adam::GroupParams> group_params(const std::vector<std::variant<double, at::Tensor>>& lr,
                                              const std::vector<double>& beta1, const std::vector<double>& beta2,
                                              const std::vector<double>& eps, const std::vector<double>& weight_decay,
                                              const std::vector<bool>& decoupled,
                                              const std::vector<bool>& maximize) const;
  void step_cpu(const std::vector<void*>& grads, const std::vector<adam::GroupParams>& groups,
                const adam::StepInputs& inputs);
  void step_cuda(const std::vector<void*>& grads, const std::vector<adam::GroupParams>& groups,
                 const adam::StepInputs& inputs);

  std::mutex mutex_;
  c10::Device device_;
  std::vector<Entry> entries_;
  std::vector<adam::TensorRecord> records_;
  uint64_t version_ = 0;  // of records_
  bool checked_ = false;  // entries_ passed all checks with the pointers they hold
  int64_t group_count_ = 0;
  std::map<void*, std::unique_ptr<StreamTables>> tables_;  // by stream
};

// sqrt(sum of (g / grad_scale)^2) over all gradients: 0-dim, fp32 (fp64 when a gradient is). Sets found_inf to 1 when
// an element is inf or NaN.
at::Tensor grad_norm(const std::vector<at::Tensor>& grads, const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf);

// g *= coef for all gradients; memory is left alone where coef is 1.
void grad_scale_(const std::vector<at::Tensor>& grads, const at::Tensor& coef);

}  // namespace fusedops
