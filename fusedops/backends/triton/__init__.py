"""The Triton backend: norms, cross-entropy and Adam, on CUDA devices or, with `TRITON_INTERPRET=1`, on the CPU.

Importing this package does not import Triton: the kernels are loaded when one of its functions is first asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

from ...dispatch import Limits
from ...ops.cross_entropy import refuse_probabilities

NAME = "triton"

# fp64 is left to plain torch: the kernels' arithmetic is fp32. A row's columns are counted in 32 bits.
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_NORM = Limits(_FLOATS, max_hidden=2**20, min_capability=(7, 5))
_ADAM = Limits(_FLOATS, min_capability=(7, 5), traceable=False)
_NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
_LOSS = Limits(_FLOATS, max_hidden=2**30, min_capability=(7, 5), extra=refuse_probabilities)
LIMITS = {**dict.fromkeys(_NORMS, _NORM), "cross_entropy": _LOSS, "adam": _ADAM, "adamw": _ADAM}

_HOMES = {
    "layer_norm_fwd": "norm",
    "layer_norm_bwd": "norm",
    "rms_norm_fwd": "norm",
    "rms_norm_bwd": "norm",
    "add_layer_norm_fwd": "add_norm",
    "add_layer_norm_bwd": "add_norm",
    "add_rms_norm_fwd": "add_norm",
    "add_rms_norm_bwd": "add_norm",
    "cross_entropy_fwd": "cross_entropy",
    "cross_entropy_bwd": "cross_entropy",
    "adam_plan": "adam",
    "grad_norm": "adam",
    "grad_scale_": "adam",
}


def unavailable(device_type: str) -> str | None:
    """Say why Triton cannot serve tensors on `device_type`, or None when it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type == "cpu":
        return None if interpreting else "Triton runs on the CPU only under its interpreter (TRITON_INTERPRET=1)"
    if device_type != "cuda":
        return f"not tried on {device_type} devices"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "not tried on ROCm"
    if interpreting:
        return "TRITON_INTERPRET=1 is set: kernels would run in Python"
    return None


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = function
    return function
