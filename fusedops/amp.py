"""Autocast as a choice of output dtype, and the gradient scaler.

Kernels take any mix of fp32, fp16 and bf16, so autocast never casts an input: under autocast of the input's device a
norm returns the autocast dtype, its value being PyTorch's fp32 result rounded once. Who wants PyTorch's fp32 output
asks for it with ``set_norm_output("fp32")`` or ``out_dtype=``.
"""

from __future__ import annotations

from types import TracebackType

import torch

from .amp_scaler import GradScaler
from .config import CONFIG

__all__ = ["GradScaler", "norm_output_dtype", "set_norm_output"]

_norm_output = "autocast"


class set_norm_output:
    """Choose what norms return under autocast, from here on or within a ``with`` block.

    Args:
        mode: ``"autocast"`` (default): the autocast dtype; ``"fp32"``: fp32, as PyTorch's own LayerNorm does.

    Raises:
        ValueError: another mode.
    """

    def __init__(self, mode: str) -> None:
        global _norm_output
        if mode not in ("autocast", "fp32"):
            raise ValueError(f"set_norm_output: mode: expected 'autocast' or 'fp32', got {mode!r}")
        self._before = _norm_output
        _norm_output = mode

    def __enter__(self) -> set_norm_output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _norm_output
        _norm_output = self._before


def norm_output_dtype(input: torch.Tensor, out_dtype: torch.dtype | None, op: str) -> torch.dtype:
    """Return the dtype a norm of ``input`` returns here and now; ``op`` is its name, for the message.

    ``out_dtype`` if given; else, under autocast of the input's device, the autocast dtype (fp32 under
    ``set_norm_output("fp32")`` and when fusedops is disabled, as PyTorch's LayerNorm); else the input's dtype. fp64
    stays fp64.
    """
    if not isinstance(input, torch.Tensor):
        raise ValueError(f"{op}: input: expected a tensor, got {type(input).__name__}")
    if out_dtype is not None:
        return out_dtype
    dtype = input.dtype
    if not torch._C._is_any_autocast_enabled():  # a third of the cost of asking for one device
        return dtype
    if torch.is_autocast_enabled(input.device.type) and dtype is not torch.float64:
        if _norm_output == "fp32" or CONFIG.disabled:
            return torch.float32
        return torch.get_autocast_dtype(input.device.type)
    return dtype
