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
using Numbers = std::vector<std::variant<double, at::Tensor>>;

// The parameters of one device with their state: checked once, their pointers kept in tables, updated together.
class AdamPlan {
 public:
  AdamPlan(std::vector<at::Tensor> params, std::vector<at::Tensor> exp_avg, std::vector<at::Tensor> exp_avg_sq,
           OptionalTensors max_exp_avg_sq, OptionalTensors master, OptionalTensors compensation,
           std::vector<at::Tensor> step, std::vector<int64_t> group, std::vector<int64_t> index);
  ~AdamPlan();

  // Checks one step of every parameter that has a gradient now and makes whatever it needs; nothing of the caller's
  // is written. A seed asks for stochastic rounding of bf16 parameters without master and compensation.
  void prepare(const Numbers& lr, const Numbers& beta1, const Numbers& beta2, const std::vector<double>& eps,
               const std::vector<double>& weight_decay, const std::vector<bool>& decoupled,
               const std::vector<bool>& amsgrad, const std::vector<bool>& maximize,
               const std::vector<std::optional<uint64_t>>& seed, const std::optional<at::Tensor>& grad_scale,
               const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& grad_norm,
               std::optional<double> max_grad_norm);

  // Takes the step that was prepared last, once.
  void launch();

  // The gradients there are. The caller holds the GIL, so that nobody replaces one meanwhile.
  std::vector<at::Tensor> gradients() const;

 private:
  enum Role { kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kMaster, kCompensation, kRoles };

  // One parameter and its state.
  struct Entry {
    at::Tensor tensors[kRoles];
    c10::SmallVector<int64_t, 5> param_sizes, param_strides;  // the parameter's own, when it was checked
    c10::SmallVector<int64_t, 5> strides;  // the layout that all roles and the gradient are walked in
    void* pointers[kRoles];                // what was checked last
    bool staged[kRoles];                   // not laid out as the record wants: a copy is updated and copied back
    bool any_staged;
    at::Tensor step;
    size_t first_watched;
  };

  // Where a tensor lies, told in as few loads as can be: each step looks at every one.
  struct Place {
    const void* storage;
    int64_t offset;
    int64_t numel;
    caffe2::TypeMeta dtype;

    static Place of(const at::TensorImpl& tensor) {
      const c10::Storage& storage = tensor.unsafe_storage();
      return {storage ? storage.data() : nullptr, tensor.storage_offset(), tensor.numel(), tensor.dtype()};
    }
    bool operator==(const Place& other) const {
      return storage == other.storage && offset == other.offset && numel == other.numel && dtype == other.dtype;
    }
  };

  // A tensor of an entry as it was checked last; one whose storage was replaced lies elsewhere.
  struct Watched {
    const at::TensorImpl* tensor;
    Place place;
    size_t entry;
  };

  // A tensor that stands in for one of another layout during a step.
  struct Stand {
    size_t entry;
    Role role;
    at::Tensor copy;
  };

  struct StreamTables;

  // A step that was prepared, with what its pointers point to.
  struct Prepared {
    std::vector<void*> grads;
    std::vector<adam::GroupParams> groups;
    adam::StepInputs inputs;
    std::vector<Stand> stands;
    std::vector<at::Tensor> kept;
    std::shared_ptr<StreamTables> tables;
  };

  void check_entry(size_t i);
  void check_overlaps() const;
  void refresh_pointers();
  void* gradient_pointer(size_t i, const at::Tensor& grad, std::vector<at::Tensor>& copies);
  std::vector<Stand> stage(const std::vector<void*>& grads);
  adam::Number number(const char* name, const std::variant<double, at::Tensor>& given,
                      std::vector<at::Tensor>& kept) const;
  std::shared_ptr<StreamTables> stream_tables(const std::vector<void*>& grads);
  void step_cpu(const Prepared& step);
  void step_cuda(const Prepared& step);

  std::mutex mutex_;
  c10::Device device_;
  std::vector<Entry> entries_;
  std::vector<Watched> watched_;  // all tensors of all entries
  std::vector<adam::TensorRecord> records_;
  uint64_t version_ = 0;  // of records_
  bool checked_ = false;  // entries_ passed all checks with the pointers they hold
  int64_t group_count_ = 0;
  std::map<void*, std::shared_ptr<StreamTables>> tables_;  // by stream
  std::optional<Prepared> prepared_;
};

// Gradients that someone else holds.
using Gradients = std::vector<const at::Tensor*>;

// sqrt(sum of (g / grad_scale)^2) over all gradients: 0-dim, fp32 (fp64 when a gradient is). Sets found_inf to 1 when
// an element is inf or NaN.
at::Tensor grad_norm(const Gradients& grads, const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf);

// g *= coef for all gradients; memory is left alone where coef is 1.
void grad_scale_(const Gradients& grads, const at::Tensor& coef);

}  // namespace fusedops
