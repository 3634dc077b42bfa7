"""The ops: one file a family, with its public functions, its references and its records."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from .norm import layer_norm, rms_norm, wrap_layer_norm, wrap_rms_norm

# How a backend's forward and backward pair becomes one differentiable op.
WRAPPERS: dict[str, Callable[[ModuleType], Callable[..., Any]]] = {
    "layer_norm": wrap_layer_norm,
    "rms_norm": wrap_rms_norm,
}

__all__ = ["WRAPPERS", "layer_norm", "rms_norm"]
