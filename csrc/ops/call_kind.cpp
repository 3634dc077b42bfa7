#include "call_kind.h"

#include <cstdint>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/llvmMathExtras.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace fusedops {

namespace {

constexpr int kDtypeBits = 7;
constexpr int kMostTensors = 6;  // whose dtypes fit beside device and size

PyTypeObject* buffer_type() {
  static auto* const type = reinterpret_cast<PyTypeObject*>(
      pybind11::object(pybind11::module_::import("torch.nn").attr("Buffer")).release().ptr());
  return type;
}

bool is_plain(PyObject* object) { return THPVariable_CheckExact(object) || Py_TYPE(object) == buffer_type(); }

// torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state(), as they are known to this thread.
bool is_transformed() {
  constexpr c10::DispatchKeySet kKeys({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                       c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::Tracer});
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(kKeys);
}

PyObject* call_kind(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3 && PyTuple_Check(arguments[1]) && PyTuple_Check(arguments[2]),
                   "call_kind: expected input and two tuples");
  PyObject *const others = arguments[1], *const constants = arguments[2];
  TORCH_CHECK_VALUE(PyTuple_GET_SIZE(others) < kMostTensors, "call_kind: others: expected less than ", kMostTensors,
                    " tensors, got ", PyTuple_GET_SIZE(others));
  if (is_transformed() || !is_plain(arguments[0])) Py_RETURN_NONE;
  const at::Tensor& input = THPVariable_Unpack(arguments[0]);
  if (input.is_nested()) Py_RETURN_NONE;
  const c10::Device device = input.device();
  uint64_t kind = static_cast<uint8_t>(device.type());
  kind = kind << 8 | static_cast<uint8_t>(device.index());
  kind = kind << 6 | (c10::llvm::Log2_64(static_cast<uint64_t>(input.numel())) + 1);  // of 0: -1
  kind = kind << kDtypeBits | static_cast<uint8_t>(input.scalar_type());
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(others); ++i) {
    PyObject* const other = PyTuple_GET_ITEM(others, i);
    constexpr uint64_t kAbsent = (1 << kDtypeBits) - 1;
    if (other != Py_None && !is_plain(other)) Py_RETURN_NONE;
    kind = kind << kDtypeBits |
           (other == Py_None ? kAbsent : static_cast<uint8_t>(THPVariable_Unpack(other).scalar_type()));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(constants); ++i) {
    PyObject* const constant = PyTuple_GET_ITEM(constants, i);
    if (constant != Py_None && !is_plain(constant)) Py_RETURN_NONE;
  }
  return PyLong_FromUnsignedLongLong(kind);
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef call_kind_methods[] = {
    {"call_kind", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_kind)), METH_FASTCALL, nullptr}, {}};

}  // namespace fusedops
