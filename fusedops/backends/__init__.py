"""The backends, one module each.

A backend module holds ``unavailable(device_type)`` (a reason why it can't run there, or None), ``LIMITS`` (op →
``Limits``) and the implementations: either a whole differentiable op (``layer_norm``) or a pair ``layer_norm_fwd`` /
``layer_norm_bwd`` on (rows, hidden), which the op's own file wraps in an autograd function. Optimizers are
``adam_plan``, ``grad_norm`` and ``grad_scale_``. A backend computes; it does not reshape, cast, save or choose.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..config import BACKENDS

if TYPE_CHECKING:
    from ..dispatch import Call

_modules: dict[str, ModuleType] = {}


def get(name: str) -> ModuleType:
    """Return a backend's module, imported at first use."""
    module = _modules.get(name)
    if module is None:
        module = _modules[name] = importlib.import_module(f".{name}", __name__)
    return module


def implementation(name: str, call: Call) -> tuple[Callable[..., Any], bool]:
    """Return what backend ``name`` runs for a call, and whether that checks its arguments itself.

    That is the backend's own whole op, or its pair under the op's autograd function.
    """
    module = get(name)
    if hasattr(module, "implementation"):
        return module.implementation(call), checks_arguments(module)
    from ..registry import OPS

    return OPS[call.op].wrap(module) if call.op in OPS else module.adam_plan, False


def checks_arguments(module: ModuleType) -> bool:
    """Tell whether a backend refuses unsound tensors itself; others would read what is not there."""
    return getattr(module, "CHECKS_ARGUMENTS", False)


def backends(device_type: str | None = None) -> dict[str, str | None]:
    """Return each backend's name with the reason why it can't run on a device type, or None where it can.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, …; None: CUDA where a GPU is visible, else the CPU.
    """
    import torch

    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return {name: get(name).unavailable(device_type) for name in BACKENDS}


class _Callable(ModuleType):
    """Lets ``fusedops.backends()`` be the public function and ``fusedops.backends.native`` stay a module."""

    def __call__(self, device_type: str | None = None) -> dict[str, str | None]:
        return backends(device_type)


sys.modules[__name__].__class__ = _Callable
