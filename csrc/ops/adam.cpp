// The Adam engine: tensors to tables, checks, device guard, stream.
//
// A plan keeps one record a parameter. Each step compares every pointer with the one checked last (a user may replace
// storage with p.data = ...), looks at the gradients, and rebuilds what moved. On CUDA the records and the list of
// chunks live in device memory, and so do the gradient pointers. These tables are immutable once written: a change
// makes new ones, and the allocator's stream order keeps the old until their last reader is done, however far the host
// runs ahead. They belong to one stream; a captured graph records the writing of its own.
#include "adam.h"

#include <algorithm>
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include "../multi_tensor.h"
#include "tensors.h"

namespace fusedops {

using adam::GroupParams;
using adam::Number;
using adam::Rounding;
using adam::Scalars;
using adam::StepInputs;
using adam::TensorRecord;

namespace {

constexpr const char* kRoleNames[] = {"params", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "compensation"};

// A gradient without elements: its step counts, and there is nothing to read.
void* const kEmptyGradient = reinterpret_cast<void*>(uintptr_t{16});

// Of a few integers each: no call into libc.
bool same(at::IntArrayRef a, at::IntArrayRef b) {
  if (a.size() != b.size()) return false;
  for (size_t d = 0; d < a.size(); ++d) {
    if (a[d] != b[d]) return false;
  }
  return true;
}

// Whether both walk memory alike; strides of dimensions of size one mean nothing.
bool same_layout(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b) {
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && a[d] != b[d]) return false;
  }
  return true;
}

c10::SmallVector<int64_t, 5> contiguous_strides(at::IntArrayRef sizes) {
  c10::SmallVector<int64_t, 5> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

void* pointer_of(const at::Tensor& tensor) {
  return tensor.defined() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
}

// param.grad(), which would ask autograd whether the parameter is a leaf.
const at::Tensor& gradient_of(const at::Tensor& param) { return param.unsafeGetTensorImpl()->grad(); }

// Whether a gradient looks like its parameter, as nearly all do: it passes the checks of others, in a third of the
// time.
bool is_like(const at::TensorImpl& grad, const at::TensorImpl& param, at::IntArrayRef strides) {
  constexpr c10::DispatchKeySet kNotAsStored({c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  const c10::DispatchKeySet keys = grad.key_set();
  return keys == param.key_set() && !keys.has_any(kNotAsStored) && grad.dtype() == param.dtype() &&
         grad.device() == param.device() && same(grad.sizes(), param.sizes()) && same(grad.strides(), strides) &&
         grad.numel() != 0 && grad.unsafe_storage() && grad.unsafe_storage().data() != nullptr;
}

void check_length(const char* name, size_t got, size_t expected) {
  TORCH_CHECK_VALUE(got == expected, name, ": expected ", expected, " entries, got ", got);
}

}  // namespace

struct AdamPlan::StreamTables {
  uint64_t version = 0;  // of the plan's records that these are
  at::Tensor records;
  bool all_roundings = false;
  at::Tensor scalars;
  std::vector<uint32_t> first;  // first chunk of each tensor, then the number of chunks
  at::Tensor chunks;
  std::vector<void*> grad_pointers;
  at::Tensor grads;
};

AdamPlan::AdamPlan(std::vector<at::Tensor> params, std::vector<at::Tensor> exp_avg, std::vector<at::Tensor> exp_avg_sq,
                   OptionalTensors max_exp_avg_sq, OptionalTensors master, OptionalTensors compensation,
                   std::vector<at::Tensor> step, std::vector<int64_t> group, std::vector<int64_t> index)
    : device_(params.empty() ? c10::Device(at::kCPU) : params.front().device()) {
  const size_t n = params.size();
  check_length("exp_avg", exp_avg.size(), n);
  check_length("exp_avg_sq", exp_avg_sq.size(), n);
  if (!max_exp_avg_sq.empty()) check_length("max_exp_avg_sq", max_exp_avg_sq.size(), n);
  if (!master.empty()) check_length("master", master.size(), n);
  if (!compensation.empty()) check_length("compensation", compensation.size(), n);
  check_length("step", step.size(), n);
  check_length("group", group.size(), n);
  check_length("index", index.size(), n);
  check_device_is_served(device_);

  entries_.resize(n);
  records_.resize(n);
  for (size_t i = 0; i < n; ++i) {
    Entry& entry = entries_[i];
    entry.tensors[kParam] = std::move(params[i]);
    entry.tensors[kExpAvg] = std::move(exp_avg[i]);
    entry.tensors[kExpAvgSq] = std::move(exp_avg_sq[i]);
    if (!max_exp_avg_sq.empty() && max_exp_avg_sq[i]) entry.tensors[kMaxExpAvgSq] = std::move(*max_exp_avg_sq[i]);
    if (!master.empty() && master[i]) entry.tensors[kMaster] = std::move(*master[i]);
    if (!compensation.empty() && compensation[i]) entry.tensors[kCompensation] = std::move(*compensation[i]);
    entry.step = std::move(step[i]);
    entry.first_watched = watched_.size();
    for (const at::Tensor& tensor : entry.tensors) {
      if (tensor.defined()) watched_.push_back({tensor.unsafeGetTensorImpl(), {}, i});
    }
    if (entry.step.defined()) watched_.push_back({entry.step.unsafeGetTensorImpl(), {}, i});
    TORCH_CHECK_VALUE(group[i] >= 0 && group[i] <= UINT16_MAX, "group[", i, "]: expected 0 to ", UINT16_MAX, ", got ",
                      group[i]);
    group_count_ = std::max(group_count_, group[i] + 1);
    records_[i] = {};
    records_[i].group = static_cast<uint16_t>(group[i]);
    records_[i].index = static_cast<uint32_t>(index[i]);
    records_[i].grad_dtype = DType::f32;
    check_entry(i);
  }
  check_overlaps();
  checked_ = true;
}

AdamPlan::~AdamPlan() = default;

// Checks one parameter with its state and writes its record.
void AdamPlan::check_entry(size_t i) {
  Entry& entry = entries_[i];
  const at::Tensor& param = entry.tensors[kParam];
  TORCH_CHECK_VALUE(
      param.defined() && entry.tensors[kExpAvg].defined() && entry.tensors[kExpAvgSq].defined() && entry.step.defined(),
      "params, exp_avg, exp_avg_sq, step: expected tensors, got None at ", i);
  const bool is_double = param.scalar_type() == at::kDouble;
  entry.any_staged = false;
  for (int role = 0; role < kRoles; ++role) {
    const at::Tensor& tensor = entry.tensors[role];
    entry.pointers[role] = pointer_of(tensor);
    entry.staged[role] = false;
    if (!tensor.defined()) continue;
    const char* const name = kRoleNames[role];
    TORCH_CHECK_VALUE(tensor.device() == device_, name, "[", i, "]: expected a tensor on ", device_,
                      " as params[0], got one on ", tensor.device());
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name, "[", i, "]: expected a dense tensor, got layout ",
                      tensor.layout());
    TORCH_CHECK_VALUE(tensor.sizes() == param.sizes(), name, "[", i, "]: expected shape ", param.sizes(),
                      " as the parameter, got ", tensor.sizes());
    TORCH_CHECK_VALUE(
        is_float_dtype(tensor.scalar_type()) && (role == kParam || is_double || tensor.scalar_type() != at::kDouble),
        name, "[", i, "]: expected float32, float16 or bfloat16 (float64 with a float64 parameter), got ",
        tensor.scalar_type());
    TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, name, "[", i,
                      "]: expected every element to have its own memory, got an expanded tensor");
    TORCH_CHECK_VALUE(tensor.unsafeGetTensorImpl()->storage_initialized(), name, "[", i,
                      "]: expected a tensor with storage, got none");
  }
  const at::Tensor& master = entry.tensors[kMaster];
  TORCH_CHECK_VALUE(!master.defined() || (master.scalar_type() == at::kFloat && !is_double), "master[", i,
                    "]: expected float32 beside a parameter that is not float64, got ", master.scalar_type(),
                    " beside ", param.scalar_type());
  const at::Tensor& compensation = entry.tensors[kCompensation];
  const bool is_narrow = param.scalar_type() == at::kBFloat16 || param.scalar_type() == at::kHalf;
  TORCH_CHECK_VALUE(
      !compensation.defined() || (is_narrow && compensation.scalar_type() == param.scalar_type() && !master.defined()),
      "compensation[", i, "]: expected the dtype of a float16 or bfloat16 parameter without master, got ",
      compensation.scalar_type(), " beside ", param.scalar_type());
  const at::Tensor& largest = entry.tensors[kMaxExpAvgSq];
  TORCH_CHECK_VALUE(!largest.defined() || largest.scalar_type() == entry.tensors[kExpAvgSq].scalar_type(),
                    "max_exp_avg_sq[", i, "]: expected ", entry.tensors[kExpAvgSq].scalar_type(),
                    " as exp_avg_sq, got ", largest.scalar_type());
  check_scalar("step", entry.step, device_, false);
  for (size_t k = entry.first_watched; k < watched_.size() && watched_[k].entry == i; ++k) {
    watched_[k].place = Place::of(*watched_[k].tensor);
  }

  entry.param_sizes.assign(param.sizes().begin(), param.sizes().end());
  entry.param_strides.assign(param.strides().begin(), param.strides().end());
  if (param.is_non_overlapping_and_dense()) {
    entry.strides.assign(param.strides().begin(), param.strides().end());
  } else {
    entry.strides = contiguous_strides(param.sizes());
  }
  for (int role = 0; role < kRoles; ++role) {
    const at::Tensor& tensor = entry.tensors[role];
    entry.staged[role] = tensor.defined() && !same_layout(param.sizes(), tensor.strides(), entry.strides);
    entry.any_staged |= entry.staged[role];
  }

  TensorRecord& record = records_[i];
  record.param = entry.pointers[kParam];
  record.exp_avg = entry.pointers[kExpAvg];
  record.exp_avg_sq = entry.pointers[kExpAvgSq];
  record.max_exp_avg_sq = nullptr;  // set by a step whose group wants amsgrad
  record.companion = entry.pointers[master.defined() ? kMaster : kCompensation];
  record.rounding = master.defined()         ? Rounding::kMaster
                    : compensation.defined() ? Rounding::kKahan
                                             : Rounding::kNearest;  // until a step whose group has a seed
  record.step = static_cast<float*>(pointer_of(entry.step));
  record.numel = param.numel();
  record.param_dtype = dtype_of(param);
  record.exp_avg_dtype = dtype_of(entry.tensors[kExpAvg]);
  record.exp_avg_sq_dtype = dtype_of(entry.tensors[kExpAvgSq]);
  record.path = choose_path(record);
  ++version_;
}

// Two tensors of a plan must not share memory: their updates would race. Tensors with gaps may interleave, so only
// their starts are compared.
void AdamPlan::check_overlaps() const {
  struct Range {
    const char* begin;
    const char* end;
    const char* name;
    size_t index;
  };
  std::vector<Range> ranges;
  const auto add = [&](const at::Tensor& tensor, const char* name, size_t i) {
    if (!tensor.defined() || tensor.numel() == 0) return;
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    const int64_t elements = tensor.is_non_overlapping_and_dense() ? tensor.numel() : 1;
    ranges.push_back({begin, begin + elements * static_cast<int64_t>(tensor.itemsize()), name, i});
  };
  for (size_t i = 0; i < entries_.size(); ++i) {
    for (int role = 0; role < kRoles; ++role) add(entries_[i].tensors[role], kRoleNames[role], i);
    add(entries_[i].step, "step", i);
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t k = 1; k < ranges.size(); ++k) {
    TORCH_CHECK_VALUE(ranges[k].begin >= ranges[k - 1].end, ranges[k].name, "[", ranges[k].index,
                      "]: expected memory of its own, got memory of ", ranges[k - 1].name, "[", ranges[k - 1].index,
                      "]");
  }
}

// Checks what was given other storage or strides since the last step, and everything after a check that failed.
void AdamPlan::refresh_pointers() {
  const bool all = !std::exchange(checked_, false);
  bool moved = all;
  const auto check = [&](size_t i) {
    check_entry(i);
    moved = true;
  };
  if (all) {
    for (size_t i = 0; i < entries_.size(); ++i) check(i);
  } else {
    for (const Watched& watched : watched_) {
      if (!(Place::of(*watched.tensor) == watched.place)) check(watched.entry);
    }
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& entry = entries_[i];
      const at::Tensor& param = entry.tensors[kParam];
      if (!same(param.strides(), entry.param_strides) || !same(param.sizes(), entry.param_sizes)) check(i);
    }
  }
  if (moved) check_overlaps();
  checked_ = true;
}

// Checks a gradient; returns its memory, or that of a copy laid out as the parameter.
void* AdamPlan::gradient_pointer(size_t i, const at::Tensor& grad, std::vector<at::Tensor>& copies) {
  const Entry& entry = entries_[i];
  const at::Tensor& param = entry.tensors[kParam];
  TORCH_CHECK_VALUE(grad.layout() == at::kStrided, "grads[", i, "]: expected a dense tensor, got layout ",
                    grad.layout());
  TORCH_CHECK_VALUE(grad.device() == device_, "grads[", i, "]: expected a tensor on ", device_,
                    " as the parameter, got one on ", grad.device());
  TORCH_CHECK_VALUE(grad.sizes() == param.sizes(), "grads[", i, "]: expected shape ", param.sizes(),
                    " as the parameter, got ", grad.sizes());
  TORCH_CHECK_VALUE(is_float_dtype(grad.scalar_type()), "grads[", i,
                    "]: expected float32, float16, bfloat16 or float64, got ", grad.scalar_type());
  if (grad.numel() == 0) return kEmptyGradient;
  const bool zeros = grad._is_zerotensor();  // has no memory, and may come from autograd
  TORCH_CHECK_VALUE(zeros || grad.unsafeGetTensorImpl()->storage_initialized(), "grads[", i,
                    "]: expected a tensor with storage, got none");
  if (same_layout(param.sizes(), grad.strides(), entry.strides) && !grad.is_neg() && !zeros) return pointer_of(grad);
  at::Tensor copy = at::empty_strided(param.sizes(), entry.strides, grad.options());
  copy.copy_(grad);
  copies.push_back(std::move(copy));
  return pointer_of(copies.back());
}

// Copies what is laid out otherwise, and points the records at the copies.
std::vector<AdamPlan::Stand> AdamPlan::stage(const std::vector<void*>& grads) {
  std::vector<Stand> stands;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (!entry.any_staged || grads[i] == nullptr) continue;
    TensorRecord& record = records_[i];
    const TensorRecord before = record;
    for (int role = 0; role < kRoles; ++role) {
      if (!entry.staged[role] || (role == kMaxExpAvgSq && record.max_exp_avg_sq == nullptr)) continue;
      const at::Tensor& tensor = entry.tensors[role];
      at::Tensor copy = at::empty_strided(tensor.sizes(), entry.strides, tensor.options());
      copy.copy_(tensor);
      void* const pointer = pointer_of(copy);
      switch (role) {
        case kParam: record.param = pointer; break;
        case kExpAvg: record.exp_avg = pointer; break;
        case kExpAvgSq: record.exp_avg_sq = pointer; break;
        case kMaxExpAvgSq: record.max_exp_avg_sq = pointer; break;
        default: record.companion = pointer;
      }
      stands.push_back({i, static_cast<Role>(role), std::move(copy)});
    }
    const bool moved = before.param != record.param || before.exp_avg != record.exp_avg ||
                       before.exp_avg_sq != record.exp_avg_sq || before.max_exp_avg_sq != record.max_exp_avg_sq ||
                       before.companion != record.companion;
    if (!moved) continue;
    record.path = choose_path(record);
    ++version_;
  }
  return stands;
}

// A tensor on the CPU is read now, one on the plan's device when the step runs.
Number AdamPlan::number(const char* name, const std::variant<double, at::Tensor>& given,
                        std::vector<at::Tensor>& kept) const {
  if (const auto* value = std::get_if<double>(&given)) return {*value, nullptr, DType::f64};
  const at::Tensor& tensor = std::get<at::Tensor>(given);
  check_scalar(name, tensor, tensor.is_cpu() ? c10::Device(at::kCPU) : device_, true);
  const DType dtype = dtype_of(tensor);
  if (tensor.is_cpu()) return {adam::read_scalar(tensor.const_data_ptr(), dtype), nullptr, dtype};
  kept.push_back(tensor);
  return {0.0, tensor.const_data_ptr(), dtype};
}

void AdamPlan::prepare(const Numbers& lr, const Numbers& beta1, const Numbers& beta2, const std::vector<double>& eps,
                       const std::vector<double>& weight_decay, const std::vector<bool>& decoupled,
                       const std::vector<bool>& amsgrad, const std::vector<bool>& maximize,
                       const std::vector<std::optional<uint64_t>>& seed, const std::optional<at::Tensor>& grad_scale,
                       const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& grad_norm,
                       std::optional<double> max_grad_norm) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  prepared_.reset();
  const size_t n = entries_.size();
  const size_t count = lr.size();
  TORCH_CHECK_VALUE(count >= static_cast<size_t>(group_count_), "lr: expected at least ", group_count_, " groups, got ",
                    count);
  check_length("beta1", beta1.size(), count);
  check_length("beta2", beta2.size(), count);
  check_length("eps", eps.size(), count);
  check_length("weight_decay", weight_decay.size(), count);
  check_length("decoupled", decoupled.size(), count);
  check_length("amsgrad", amsgrad.size(), count);
  check_length("maximize", maximize.size(), count);
  check_length("seed", seed.size(), count);
  Prepared step;
  for (size_t g = 0; g < count; ++g) {
    step.groups.push_back({number("lr", lr[g], step.kept), number("beta1", beta1[g], step.kept),
                           number("beta2", beta2[g], step.kept), eps[g], weight_decay[g], seed[g].value_or(0),
                           decoupled[g], maximize[g]});
  }
  if (n == 0) return;

  StepInputs& inputs = step.inputs = {};
  if (grad_scale) {
    check_scalar("grad_scale", *grad_scale, device_, false);
    inputs.grad_scale = grad_scale->const_data_ptr<float>();
    step.kept.push_back(*grad_scale);
  }
  if (found_inf) {
    check_scalar("found_inf", *found_inf, device_, false);
    inputs.found_inf = found_inf->const_data_ptr<float>();
    step.kept.push_back(*found_inf);
  }
  if (max_grad_norm) {
    TORCH_CHECK_VALUE(grad_norm.has_value(), "grad_norm: expected a tensor beside max_grad_norm, got None");
    check_scalar("grad_norm", *grad_norm, device_, true);
    inputs.grad_norm = grad_norm->const_data_ptr();
    inputs.grad_norm_dtype = dtype_of(*grad_norm);
    inputs.max_grad_norm = *max_grad_norm;
    inputs.clip = true;
    step.kept.push_back(*grad_norm);
  }

  const c10::OptionalDeviceGuard guard(device_.is_cpu() ? std::nullopt : std::optional<c10::Device>(device_));
  refresh_pointers();
  step.grads.assign(n, nullptr);
  bool any = false;
  for (size_t i = 0; i < n; ++i) {
    const Entry& entry = entries_[i];
    const at::Tensor& grad = gradient_of(entry.tensors[kParam]);
    if (!grad.defined()) continue;
    const bool plain =
        is_like(*grad.unsafeGetTensorImpl(), *entry.tensors[kParam].unsafeGetTensorImpl(), entry.strides);
    step.grads[i] = plain ? pointer_of(grad) : gradient_pointer(i, grad, step.kept);
    any = true;
    TensorRecord& record = records_[i];
    void* largest = nullptr;
    bool same_largest = record.max_exp_avg_sq == nullptr;
    if (amsgrad[record.group]) {
      TORCH_CHECK_VALUE(entry.tensors[kMaxExpAvgSq].defined(), "max_exp_avg_sq[", i,
                        "]: expected a tensor, as its group uses amsgrad, got None");
      largest = entry.pointers[kMaxExpAvgSq];
      same_largest =
          entry.staged[kMaxExpAvgSq] ? !same_largest == (largest != nullptr) : record.max_exp_avg_sq == largest;
    }
    Rounding rounding = record.rounding;
    if (rounding == Rounding::kNearest || rounding == Rounding::kStochastic) {
      const bool at_random = record.param_dtype == DType::bf16 && seed[record.group];
      rounding = at_random ? Rounding::kStochastic : Rounding::kNearest;
    }
    if (record.grad_dtype == dtype_of(grad) && same_largest && record.rounding == rounding) continue;
    record.grad_dtype = dtype_of(grad);
    record.max_exp_avg_sq = largest;
    record.rounding = rounding;
    record.path = choose_path(record);
    ++version_;
  }
  if (!any) return;
  step.stands = stage(step.grads);
  if (!device_.is_cpu()) step.tables = stream_tables(step.grads);
  prepared_ = std::move(step);
}

void AdamPlan::launch() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!prepared_) return;
  const at::NoGradGuard no_grad;
  const Prepared step = *std::exchange(prepared_, std::nullopt);
  const c10::OptionalDeviceGuard guard(device_.is_cpu() ? std::nullopt : std::optional<c10::Device>(device_));
  if (device_.is_cpu()) {
    step_cpu(step);
  } else {
    step_cuda(step);
  }
  for (const Stand& stand : step.stands) entries_[stand.entry].tensors[stand.role].copy_(stand.copy);
  for (size_t i = 0; i < entries_.size(); ++i) {  // autograd notices a backward through values that were overwritten
    const at::Tensor& param = entries_[i].tensors[kParam];
    if (step.grads[i] != nullptr && !param.is_inference()) param.unsafeGetTensorImpl()->bump_version();
  }
}

std::vector<at::Tensor> AdamPlan::gradients() const {
  std::vector<at::Tensor> grads;
  grads.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    if (const at::Tensor& grad = gradient_of(entry.tensors[kParam]); grad.defined()) grads.push_back(grad);
  }
  return grads;
}

void AdamPlan::step_cpu(const Prepared& step) {
  constexpr int64_t kChunk = 16384;
  constexpr int64_t kSerial = 65536;  // elements below which another thread does not pay
  if (step.inputs.found_inf != nullptr && *step.inputs.found_inf != 0.0f) return;
  const size_t n = records_.size();
  const double factor = adam::grad_factor(step.inputs);
  std::vector<Scalars> scalars(n);
  std::vector<int64_t> first(n + 1, 0);  // first chunk of each tensor
  int64_t numel = 0;
  for (size_t i = 0; i < n; ++i) {
    const TensorRecord& record = records_[i];
    first[i + 1] = first[i];
    if (step.grads[i] == nullptr) continue;
    *record.step += 1.0f;
    scalars[i] = adam::scalars(record, step.groups[record.group], factor, *record.step);
    first[i + 1] += (record.numel + kChunk - 1) / kChunk;
    numel += record.numel;
  }
  at::parallel_for(0, first[n], numel < kSerial ? first[n] : 1, [&](int64_t begin, int64_t end) {
    auto t = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), begin) - first.begin()) - 1;
    for (int64_t c = begin; c < end; ++c) {
      while (c >= first[t + 1]) ++t;
      const int64_t start = (c - first[t]) * kChunk;
      cpu::adam_update(records_[t], step.grads[t], scalars[t], start, std::min(start + kChunk, records_[t].numel));
    }
  });
}

#ifdef FUSEDOPS_WITH_CUDA

namespace {

at::Tensor device_bytes(size_t bytes, c10::Device device) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
}

template <class T>
at::Tensor uploaded(const std::vector<T>& table, c10::Device device, cudaStream_t stream) {
  at::Tensor bytes = device_bytes(table.size() * sizeof(T), device);
  check_launch(cuda::upload(bytes.mutable_data_ptr(), table.data(), table.size() * sizeof(T), stream));
  return bytes;
}

}  // namespace

// The tables of the current stream, or new ones that a captured step owns, brought up to date.
std::shared_ptr<AdamPlan::StreamTables> AdamPlan::stream_tables(const std::vector<void*>& grads) {
  const cudaStream_t stream = current_stream(device_);
  std::shared_ptr<StreamTables> captured;
  std::shared_ptr<StreamTables>& slot = cuda::is_capturing(stream) ? captured : tables_[stream];
  if (slot == nullptr) slot = std::make_shared<StreamTables>();
  StreamTables& tables = *slot;
  const size_t n = records_.size();

  if (tables.version != version_) {
    std::vector<uint32_t> first(n + 1, 0);
    for (size_t i = 0; i < n; ++i) {
      const int64_t size = cuda::adam_chunk_size();
      first[i + 1] = first[i] + static_cast<uint32_t>((records_[i].numel + size - 1) / size);
    }
    if (tables.first != first) {
      const at::Tensor device_first = uploaded(first, device_, stream);
      tables.chunks = device_bytes(first[n] * sizeof(cuda::Chunk), device_);
      check_launch(cuda::expand_chunks(
          {static_cast<cuda::Chunk*>(tables.chunks.mutable_data_ptr()),
           static_cast<const uint32_t*>(device_first.const_data_ptr()), static_cast<int64_t>(n), first[n]},
          stream));
      tables.scalars = device_bytes(n * sizeof(Scalars), device_);
      tables.first = std::move(first);  // last: an allocation that failed is tried again in the next step
    }
    tables.records = uploaded(records_, device_, stream);
    tables.all_roundings = std::any_of(records_.begin(), records_.end(), [](const TensorRecord& r) {
      return r.rounding == Rounding::kKahan || r.rounding == Rounding::kStochastic;
    });
    tables.version = version_;
  }
  if (tables.grad_pointers != grads) {
    tables.grads = uploaded(grads, device_, stream);
    tables.grad_pointers = grads;
  }
  return slot;
}

void AdamPlan::step_cuda(const Prepared& step) {
  const StreamTables& tables = *step.tables;
  cuda::AdamTables args;
  args.records = static_cast<const TensorRecord*>(tables.records.const_data_ptr());
  args.grads = static_cast<const void* const*>(tables.grads.const_data_ptr());
  args.scalars = static_cast<Scalars*>(tables.scalars.mutable_data_ptr());
  args.chunks = static_cast<const cuda::Chunk*>(tables.chunks.const_data_ptr());
  args.tensor_count = static_cast<int64_t>(records_.size());
  args.chunk_count = tables.first.back();
  args.all_roundings = tables.all_roundings;
  check_launch(cuda::adam_step(args, step.groups.data(), static_cast<int64_t>(step.groups.size()), step.inputs,
                               current_stream(device_)));
}

#else

std::shared_ptr<AdamPlan::StreamTables> AdamPlan::stream_tables(const std::vector<void*>&) { return nullptr; }
void AdamPlan::step_cuda(const Prepared&) {}

#endif

}  // namespace fusedops
