"""Plain PyTorch: serves every call on every device, and is what the others are held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Call, Limits
from ..ops._common import FLOATS
from ..registry import OPS, OPTIMS
from .reference_adam import adam_plan, grad_norm, grad_scale_

__all__ = ["LIMITS", "NAME", "adam_plan", "grad_norm", "grad_scale_", "implementation", "unavailable"]

NAME = "reference"
LIMITS = {op: Limits(FLOATS) for op in (*OPS, *OPTIMS)}


def unavailable(device_type: str) -> str | None:
    """Return None: plain PyTorch runs wherever the tensors are."""
    return None


def implementation(call: Call) -> Callable[..., Any]:
    """Return the plain function of an op, the plain engine of an optimizer."""
    return OPS[call.op].reference if call.op in OPS else adam_plan
