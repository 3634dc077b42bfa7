#include "same_objects.h"

namespace fusedops {

bool same_objects(const pybind11::list& seen, const pybind11::list& containers) {
  const Py_ssize_t expected = PyList_GET_SIZE(seen.ptr());
  Py_ssize_t at = 0;
  const auto next_is = [&](PyObject* object) { return at < expected && PyList_GET_ITEM(seen.ptr(), at++) == object; };
  for (const pybind11::handle container : containers) {
    if (PyDict_Check(container.ptr())) {
      Py_ssize_t position = 0;
      PyObject* value = nullptr;
      while (PyDict_Next(container.ptr(), &position, nullptr, &value)) {
        if (!next_is(value)) return false;
      }
    } else if (PyList_Check(container.ptr())) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(container.ptr()); ++i) {
        if (!next_is(PyList_GET_ITEM(container.ptr(), i))) return false;
      }
    } else {
      return false;  // whatever it is, it is not what was planned with
    }
  }
  return at == expected;
}

}  // namespace fusedops
