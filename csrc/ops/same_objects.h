// Identity of Python objects, for checks that every optimizer step makes of a thousand of them.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedops {

// Whether the containers (lists, and dicts for their values) hold, one after the other, the very objects of `seen`.
bool same_objects(const pybind11::list& seen, const pybind11::list& containers);

}  // namespace fusedops
