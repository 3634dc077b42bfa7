"""Plain PyTorch: serves every call on every device, and is what the others are held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dispatch import Call, Limits
from ..ops import norm
from ..ops._common import FLOATS
from .reference_adam import adam_plan, grad_norm, grad_scale_

__all__ = ["LIMITS", "NAME", "RUN", "adam_plan", "grad_norm", "grad_scale_", "implementation", "unavailable"]

NAME = "reference"
RUN: dict[str, Callable[..., Any]] = {
    "layer_norm": norm.layer_norm_reference,
    "rms_norm": norm.rms_norm_reference,
    "adam": adam_plan,
    "adamw": adam_plan,
}
LIMITS = {op: Limits(FLOATS) for op in RUN}


def unavailable(device_type: str) -> str | None:
    """Return None: plain PyTorch runs wherever the tensors are."""
    return None


def implementation(call: Call) -> Callable[..., Any]:
    """Return the plain function of an op."""
    return RUN[call.op]
