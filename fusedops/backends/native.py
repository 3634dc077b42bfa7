"""The compiled extension: CPU kernels, and CUDA kernels where it was built with nvcc.

In eager an op is one pybind11 call straight into the dispatcher; traced code calls the same op as
``torch.ops.fusedops.<op>``, so that it shows as one node in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch

from .._build import load_native, native_problem
from ..dispatch import Call, Limits
from ..ops._common import FLOATS
from ..ops.cross_entropy import refuse_probabilities
from ..registry import OPS, OPTIMS
from . import schemas

NAME = "native"
CHECKS_ARGUMENTS = True  # in C++, where it costs nothing
_C: Any = load_native()
# Without the extension its ops exist all the same, over plain PyTorch, for graphs that were exported with it.
_LIBRARY = schemas.define() if _C is None else None


def _refuse(call: Call) -> str | None:
    """Look at the call's own GPU: another one in the same machine may be of an architecture that was built for."""
    problem = native_problem(call.device, call.index) if call.device == "cuda" else None
    return problem or refuse_probabilities(call)


# An op is native when the extension has it. The kernels take every float dtype; columns are counted in 32 bits.
LIMITS = {
    **{op: Limits(FLOATS, max_hidden=2**30, extra=_refuse) for op in OPS if hasattr(_C, op)},
    **{op: Limits(FLOATS, extra=_refuse) for op in OPTIMS},
}


def unavailable(device_type: str) -> str | None:
    """Return why the extension can't run on any device of a type, or None where it can."""
    return native_problem(device_type)


def implementation(call: Call) -> Callable[..., Any]:
    """Return the op: the dispatcher's entry while tracing, the pybind11 front door otherwise."""
    if call.op in OPTIMS:
        return adam_plan
    whole: Callable[..., Any] = getattr(torch.ops.fusedops, call.op).default if call.compiling else getattr(_C, call.op)
    return whole


def same_objects(seen: list[Any], containers: list[Any]) -> bool:
    """Tell whether lists, and dicts by their values, hold one after the other the very objects of ``seen``."""
    if _C is not None:
        same: bool = _C.same_objects(seen, containers)
        return same
    now = [x for container in containers for x in (container.values() if isinstance(container, dict) else container)]
    return len(now) == len(seen) and all(map(is_, now, seen))


def is_profiled() -> bool:
    """Tell whether a profiler or another observer is told of what runs here now; True where that is not known."""
    return _C is None or bool(_C.is_profiled())


def adam_plan(*args: Any) -> Any:
    """Return the engine's plan for the tensors of one device; see ``fusedops.optim.base``."""
    return _C.AdamPlan(*args)


def gradients_of(params: list[Any]) -> list[Any] | None:
    """Return the gradients of parameters, one sequence a device; None where one of them is nothing for the kernels.

    A sequence knows its ``largest`` number of elements and, as bits, its ``dtypes``.
    """
    lists: list[Any] | None = None if _C is None else _C.gradients_of(params)
    return lists


def grad_norm(
    grads: Sequence[torch.Tensor], grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
) -> torch.Tensor:
    """Return the norm of all gradients over ``grad_scale`` (one element); sets ``found_inf`` if one is inf or NaN."""
    norm: torch.Tensor = _C.grad_norm(grads, grad_scale, found_inf)
    return norm


def grad_scale_(grads: Sequence[torch.Tensor], coef: torch.Tensor) -> None:
    """Multiply all gradients by ``coef`` in place."""
    _C.grad_scale_(grads, coef)
