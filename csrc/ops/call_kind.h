// What dispatch tells calls apart by, read off their tensors in one go: every call of an op asks.
#pragma once

#include <Python.h>

namespace fusedops {

// call_kind(input, others, constants) -> int | None. `others` and `constants` are tuples of tensors and Nones.
//
// The int holds the device, the bit length of input.numel(), and the dtypes of input and others. None: no kernel may
// see such a call, as a tensor is of a subclass, or none at all, the input is nested, or a functorch transform or
// torch.jit.trace is in force.
extern PyMethodDef call_kind_methods[];

}  // namespace fusedops
