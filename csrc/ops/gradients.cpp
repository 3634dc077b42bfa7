#include "gradients.h"

#include <algorithm>

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/python_variable.h>

#include "tensors.h"

namespace fusedops {

namespace {

// Whether to Python it is a torch.Tensor itself; most have no Python object yet.
bool is_plain(const at::Tensor& tensor) {
  at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const PyObject* const object = impl.pyobj_slot()->load_pyobj();
  return !impl.key_set().has(c10::DispatchKey::Python) &&
         (object == nullptr || Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

bool is_served(const at::Tensor& grad) {
  return is_plain(grad) && grad.layout() == at::kStrided && is_float_dtype(grad.scalar_type()) &&
         (grad.is_non_overlapping_and_dense() || at::has_internal_overlap(grad) != at::MemOverlap::Yes);
}

}  // namespace

GradientList::GradientList(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) add(tensor);
}

void GradientList::add(const at::Tensor& grad) {
  tensors_.push_back(grad);
  largest_ = std::max(largest_, grad.numel());
  dtypes_ |= int64_t{1} << static_cast<int>(grad.scalar_type());
}

Gradients GradientList::pointers() const {
  Gradients pointers;
  pointers.reserve(tensors_.size());
  for (const at::Tensor& tensor : tensors_) pointers.push_back(&tensor);
  return pointers;
}

std::optional<std::vector<GradientList>> gradients_of(const pybind11::list& params) {
  std::vector<GradientList> lists;
  for (const pybind11::handle param : params) {
    if (!THPVariable_CheckExact(param.ptr())) return std::nullopt;
    const at::Tensor& grad = THPVariable_Unpack(param.ptr()).unsafeGetTensorImpl()->grad();
    if (!grad.defined()) continue;
    if (!is_served(grad)) return std::nullopt;
    auto list = std::find_if(lists.begin(), lists.end(), [&](const GradientList& other) {
      return other.tensors().front().device() == grad.device();
    });
    if (list == lists.end()) list = lists.emplace(lists.end());
    list->add(grad);
  }
  return lists;
}

}  // namespace fusedops
